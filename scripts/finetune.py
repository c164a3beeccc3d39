"""Fine-tune a GPT-2 on a text.

The model with the lowest held-out loss and its tokenizer are written to a folder, in the format of
`transformers` and of all commands of compat. The folder also contains `finetune.pt`, from which
--resume continues, and `loss.svg`. Under torchrun, --parallel fsdp divides the batch among the
processes, and --parallel tensor divides the model.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from compat import CompatError, load_pretrained, load_tokenizer, open_checkpoint, save_pretrained
from compat.sharding import as_divided, is_writer, local, mesh_of_torchrun, share_of, whole

HELD_OUT = 10  # the last tenth of the text


def main() -> None:
    args = arguments()
    mesh = mesh_of_torchrun() if args.parallel else None
    rank, world = (mesh.get_rank(), mesh.size()) if mesh and args.parallel == "fsdp" else (0, 1)
    torch.manual_seed(args.seed + rank)  # of dropout; ranks with the same rows draw alike
    checkpoint = open_checkpoint(args.model)
    ids = torch.tensor(load_tokenizer(checkpoint).encode(args.corpus.read_text(encoding="utf-8")))
    T = min(args.length, checkpoint.config.n_positions)
    cut = len(ids) - len(ids) // HELD_OUT
    train, test = ids[:cut], ids[cut:]
    if len(test) <= T or args.batch % world:
        sys.exit(
            f"{args.corpus} has {len(ids)} tokens and the batch {args.batch} rows. Pass a text of "
            f"more than {HELD_OUT * (T + 1)} tokens, and a multiple of {world} as --batch."
        )
    model = load_pretrained(checkpoint, args.dialect, mesh=mesh, parallel=args.parallel or "tensor")
    optimizer = new_optimizer(model, args.lr)
    state = args.out / "finetune.pt"
    losses: list[tuple[int, float, float]] = []  # step, loss of the batch, held-out loss
    first, best = 0, math.inf
    if args.resume:
        first, best, losses = resume(state, model, optimizer)
    writer = is_writer(model.parameters())
    with Progress(disable=not writer or not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=args.steps, completed=first)
        for step in range(first + 1, args.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.lr)
            rows = batch(train, args.batch, T, seed=args.seed + step)[rank::world]
            model.train(args.parallel != "tensor")  # which has no dropout
            loss = loss_of(model, rows)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(bar, advance=1, description=f"loss {loss.item():.3f}")
            if step % args.every == 0 or step == args.steps:
                mean = loss.detach()
                if world > 1:
                    distributed.all_reduce(mean, distributed.ReduceOp.AVG)
                held_out = held_out_loss(model, test, T, args.batch)
                losses.append((step, mean.item(), held_out))
                if writer:
                    print(f"step {step}: loss {mean.item():.4f}, held-out {held_out:.4f}")
                if held_out < best:
                    best = held_out
                    save_pretrained(model, args.out, tokenizer=checkpoint)
                save_state(state, model, optimizer, step, best, losses)
                if writer:
                    (args.out / "loss.svg").write_text(plot(losses), encoding="utf-8")
    if writer:
        print(
            f"{args.out}: held-out loss {best:.4f} nats per token, perplexity {math.exp(best):.2f}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="a text file in UTF-8")
    parser.add_argument(
        "--model", required=True, help="a hub id, a folder, a weights file, or demo"
    )
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument(
        "--dialect", choices=["linear", "conv1d"], default="conv1d", help="the blocks (conv1d)"
    )
    parser.add_argument(
        "--parallel", choices=["tensor", "fsdp"], help="what torchrun's processes divide"
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (200)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (8)")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence (256)")
    parser.add_argument("--lr", type=float, default=5e-5, help="peak learning rate (5e-5)")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations (50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the batches (0)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    return parser.parse_args()


def new_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return an AdamW with weight decay for matrices and embeddings only."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Warm up linearly for 5% of the steps, then decay to 10% by a cosine."""
    warmup = max(1, steps // 20)
    if step <= warmup:
        return highest * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def batch(ids: Tensor, rows: int, length: int, seed: int) -> Tensor:
    """Return random windows (rows, length + 1), equal on every rank and after a resume."""
    starts = torch.randint(
        len(ids) - length, (rows,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([ids[start : start + length + 1] for start in starts.tolist()])


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token over windows (B, T + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, ids: Tensor, length: int, rows: int) -> float:
    """Return the loss over consecutive windows, which is the same on every rank."""
    model.eval()
    windows = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)
    losses = [loss_of(model, part).item() * len(part) for part in windows.split(rows)]
    return sum(losses) / len(windows)


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    best: float,
    losses: list[tuple[int, float, float]],
) -> None:
    """Write the state for `resume`: full tensors, gathered by all ranks and written by one."""
    weights = [whole(p.detach()) for p in model.parameters()]
    moments = [
        {name: whole(value) for name, value in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    if is_writer(model.parameters()):
        state = {"weights": weights, "moments": moments, "step": step, "best": best}
        torch.save({**state, "losses": losses}, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, float, list[tuple[int, float, float]]]:
    """Load the weights and the optimizer's state, which any number of ranks may have written."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    with torch.no_grad():
        for p, value in zip(model.parameters(), state["weights"], strict=True):
            local(p).copy_(share_of(value, p))
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    for p, moments in zip(ordered, state["moments"], strict=True):
        optimizer.state[p] = {
            name: as_divided(share_of(value, p), p) if value.shape == p.shape else value
            for name, value in moments.items()
        }
    return state["step"], state["best"], [tuple(entry) for entry in state["losses"]]


def plot(losses: list[tuple[int, float, float]]) -> str:
    """Plot both losses by step as an SVG."""
    width, height, margin = 640, 320, 40
    steps = [step for step, *_ in losses]
    values = [value for _, *both in losses for value in both]
    low, high = min(values), max(max(values), min(values) + 1e-6)

    def line(column: int, color: str) -> str:
        points = " ".join(
            f"{margin + (width - 2 * margin) * entry[0] / steps[-1]:.1f},"
            f"{margin + (height - 2 * margin) * (high - entry[column]) / (high - low):.1f}"
            for entry in losses
        )
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'

    def text(x: int, y: int, content: str, color: str = "#333") -> str:
        return f'<text x="{x}" y="{y}" fill="{color}">{content}</text>'

    parts = [
        line(1, "#9bb"),
        line(2, "#c50"),
        text(4, margin, f"{high:.2f}"),
        text(4, height - margin, f"{low:.2f}"),
        text(width - 2 * margin, height - 12, f"step {steps[-1]}"),
        text(width // 2 - 90, 20, "loss of the batch", "#688"),
        text(width // 2 + 50, 20, "held-out loss", "#c50"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    try:
        main()
    except CompatError as error:
        sys.exit(f"error: {error}")
