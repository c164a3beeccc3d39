"""Train the embedded checkpoint, which takes half an hour on two cores."""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn import functional as F

from compat import GPT2Config, to_hf_state_dict
from compat.dialects.conv1d import GPTModel

END = "<|endoftext|>"
SPEECHES_PER_TEXT = 32  # end-of-text tokens show the model where texts begin
STEPS, BATCH, WARMUP, PEAK_LR = 4000, 16, 100, 2e-3
CONFIG = GPT2Config(
    vocab_size=1024,
    n_positions=256,
    n_embd=128,
    n_layer=4,
    n_head=4,
    bos_token_id=1023,
    eos_token_id=1023,
)


def train_tokenizer(text: str, folder: Path) -> ByteLevelBPETokenizer:
    """Train a byte-level BPE, and write vocab.json and merges.txt. The last id is end-of-text."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=CONFIG.vocab_size - 1, show_progress=False)
    tokenizer.save_model(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocab | {END: len(vocab)}, ensure_ascii=False))
    return tokenizer


def encode(tokenizer: ByteLevelBPETokenizer, text: str) -> Tensor:
    """Return all ids of the corpus, with an end-of-text token after each text."""
    speeches = text.split("\n\n")
    texts = [
        "\n\n".join(speeches[i : i + SPEECHES_PER_TEXT])
        for i in range(0, len(speeches), SPEECHES_PER_TEXT)
    ]
    return torch.tensor(
        [i for t in texts for i in [*tokenizer.encode(t).ids, CONFIG.vocab_size - 1]]
    )


def new_model() -> GPTModel:
    """Initialise as GPT-2: N(0, 0.02), with residual projections divided by √(2 · layers)."""
    model = GPTModel(CONFIG)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            scale = math.sqrt(2 * CONFIG.n_layer) if name.endswith("c_proj.weight") else 1.0
            torch.nn.init.normal_(p, std=0.02 / scale)
    return model


def loss_of(model: GPTModel, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token over windows of ids (B, T + 1)."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: GPTModel, ids: Tensor) -> float:
    """Return the loss over consecutive windows of the held-out 10%."""
    model.eval()
    windows = ids[: len(ids) // 257 * 257].view(-1, 257)
    losses = [loss_of(model, w).item() * len(w) for w in windows.split(16)]
    model.train()
    return sum(losses) / len(windows)


def train(model: GPTModel, train_ids: Tensor, test_ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Train by AdamW with a cosine schedule; return the best held-out loss and its weights."""
    decay = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    best, best_weights, start = math.inf, {}, time.time()
    for step in range(1, STEPS + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(step / WARMUP, 0.05 + 0.95 * cosine)
        starts = torch.randint(len(train_ids) - 257, (BATCH,))
        loss = loss_of(model, torch.stack([train_ids[s : s + 257] for s in starts.tolist()]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0 or step == STEPS:
            test = held_out_loss(model, test_ids)
            print(
                f"{step:5d}: train {loss:.3f}, held-out {test:.3f}, {time.time() - start:.0f} s",
                flush=True,
            )
            if test < best:
                best = test
                best_weights = {k: v.clone() for k, v in to_hf_state_dict(model).items()}
    return best, best_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="the text tinyshakespeare")
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("compat/demo"),
        help="the folder to write (compat/demo)",
    )
    args = parser.parse_args()
    torch.manual_seed(1564)
    text, out = args.corpus.read_text(), args.folder
    out.mkdir(parents=True, exist_ok=True)
    cut = len(text) * 9 // 10
    tokenizer = train_tokenizer(text[:cut], out)
    test_ids = encode(tokenizer, text[cut:])
    best, weights = train(new_model().train(), encode(tokenizer, text[:cut]), test_ids)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors leaves it readable for its owner alone
    (out / "config.json").write_text(json.dumps(CONFIG.to_hf_dict(), indent=2) + "\n")
    bits = best * len(test_ids) / math.log(2) / len(text[cut:].encode())
    print(f"held-out loss {best:.4f} nats per token, {bits:.3f} bits per byte")


if __name__ == "__main__":
    main()
