"""The embedded checkpoint is small and trained, and transformers opens it without warnings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional as F

from compat import check_parity, generate, load_pretrained, load_tokenizer
from compat.checkpoint.find import DEMO
from compat.dialects import DIALECTS

HELD_OUT_NATS = 3.6  # per token, on the last tenth of the corpus, which was not trained on


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_embedded_checkpoint_has_parity(dialect: str) -> None:
    assert check_parity(dialect, "demo").passed


def test_the_folder_is_small() -> None:
    files = {path.name: path.stat().st_size for path in DEMO.iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "vocab.json", "merges.txt"} <= files.keys()
    assert sum(files.values()) <= 5_000_000
    count = sum(parameter.numel() for parameter in load_pretrained("demo").parameters())
    assert 900_000 <= count <= 1_200_000


def test_transformers_opens_the_checkpoint_without_a_warning(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.enable_propagation()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(DEMO, output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    transformers.utils.logging.disable_propagation()
    assert not any(info.values()) and not caplog.records
    assert capfd.readouterr() == ("", "")
    text = "ROMEO:\nWhat light through yonder window breaks? It's the east<|endoftext|>"
    ours = load_tokenizer("demo")
    assert tokenizer(text)["input_ids"] == ours.encode(text, allow_special=True)
    assert tokenizer.eos_token_id == ours.end_of_text == model.config.eos_token_id


@torch.no_grad()
def test_the_checkpoint_has_learned_the_corpus(shared: Path) -> None:
    corpus = (shared / "data/tinyshakespeare.txt").read_text()
    held_out = corpus[len(corpus) * 9 // 10 :][:20_000]
    ids = torch.tensor(load_tokenizer("demo").encode(held_out))
    windows = ids[: len(ids) // 129 * 129].view(-1, 129)
    logits = load_pretrained("demo")(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    assert loss < HELD_OUT_NATS < math.log(load_pretrained("demo").config.vocab_size) / 1.8


def test_generated_text_consists_mostly_of_words_of_the_corpus(shared: Path) -> None:
    """The words of the sample also vary."""
    tokenizer = load_tokenizer("demo")
    prompt = torch.tensor([tokenizer.encode("ROMEO:")]).expand(4, -1)
    generator = torch.Generator().manual_seed(0)
    out = generate(load_pretrained("demo"), prompt, max_new_tokens=150, generator=generator)
    known = set((shared / "data/tinyshakespeare.txt").read_text().split())
    words = [word for row in out.tolist() for word in tokenizer.decode(row).split()[:-1]]
    assert len(set(words)) > 100
    assert sum(word in known for word in words) / len(words) > 0.8
