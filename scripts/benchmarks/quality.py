"""bench.py quality: what lower precision costs on held-out text."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common import JsonOption
from compat import load_tokenizer
from compat.checkpoint import open_checkpoint
from compat.checkpoint.layout import HEAD, PREFIX
from compat.engine import Engine
from compat.parity.transformers_gpt2 import load_reference

HELD_OUT = Path(__file__).parent / "held_out.txt"
PRECISIONS = ("float32", "bfloat16", "int8")
BATCH = 16
MOST_LOSS, LEAST_AGREEMENT = 0.005, 0.98  # of int8: rise in perplexity, equal most likely tokens

OUTLIER_CHANNELS, TIMES = (7, 20, 41), 1000  # of each norm, and how much larger they are

Judged = tuple[Tensor, Tensor]  # log-probabilities of the following tokens, most likely tokens

TextOption = Annotated[
    Path | None,
    typer.Option(
        "--corpus",
        exists=True,
        dir_okay=False,
        help="The text tinyshakespeare; its last tenth is used. Default: an excerpt of that.",
    ),
]


def quality_command(corpus: TextOption = None, as_json: JsonOption = False) -> None:
    """Measure what bfloat16 and int8 cost on held-out text, with the embedded checkpoint.

    Log-probabilities are computed by scoring whole windows, and the most likely tokens by decode
    steps through the same windows, as in generation. The last row is that of a model with outliers:
    a few channels of each norm are a thousand times as large, and the weights that read them a
    thousandth.
    """
    text = HELD_OUT.read_text() if corpus is None else held_out(corpus.read_text())
    length = open_checkpoint("demo").config.n_positions
    ids = load_tokenizer("demo").encode(text)
    windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    judged = {"transformers float32": by_transformers(windows)}
    judged |= {f"engine {precision}": by_engine(windows, precision) for precision in PRECISIONS}
    with tempfile.TemporaryDirectory() as folder:
        plant_outliers(Path(folder))
        judged["engine int8, outliers"] = by_engine(windows, "int8", folder)
    result = {"ids": windows.numel(), "rows": rows(judged)}
    print(json.dumps(result, indent=2)) if as_json else show(result)
    if not all(met for met, _ in verdicts(result)):
        raise typer.Exit(1)


def held_out(corpus: str) -> str:
    """Return the part that scripts/train_demo.py did not train on."""
    return corpus[len(corpus) * 9 // 10 :]


def by_transformers(windows: Tensor) -> Judged:
    model = load_reference(open_checkpoint("demo"), torch.float32, "sdpa")
    with torch.no_grad():
        logits = torch.cat([model(batch).logits[:, :-1] for batch in windows.split(BATCH)])
    scores = logits.log_softmax(-1).gather(2, windows[:, 1:, None])[..., 0]
    return scores, logits.argmax(-1)


def plant_outliers(folder: Path) -> None:
    """Write the embedded checkpoint with outliers, which do not change what it computes."""
    checkpoint = open_checkpoint("demo")
    (folder / "config.json").write_text(json.dumps(checkpoint.config.to_hf_dict()))
    tensors = {name: checkpoint.read(name) for name in checkpoint.infos}
    channels = list(OUTLIER_CHANNELS)
    for i in range(checkpoint.config.n_layer):
        for norm, product in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
            tensors[f"h.{i}.{norm}.weight"][channels] *= TIMES
            tensors[f"h.{i}.{norm}.bias"][channels] *= TIMES
            tensors[f"h.{i}.{product}.weight"][channels] /= TIMES
    del tensors[HEAD]  # it is the embedding
    prefixed = {PREFIX + name: tensor for name, tensor in tensors.items()}
    save_file(prefixed, folder / "model.safetensors", {"format": "pt"})


def by_engine(windows: Tensor, precision: str, source: str = "demo") -> Judged:
    engine = Engine.from_pretrained(source, dtype=precision, max_batch=BATCH)
    batches = windows.split(BATCH)
    scores = torch.cat([engine.score(batch) for batch in batches])
    return scores, torch.cat([most_likely(engine, batch) for batch in batches])


def most_likely(engine: Engine, batch: Tensor) -> Tensor:
    """Return the token that decoding would choose after every token but the last: (B, T − 1)."""
    decoder = engine.decoder()
    chosen = [decoder.start(batch[:, :1].tolist()).argmax(-1)]
    chosen += [decoder.step(batch[:, t]).argmax(-1) for t in range(1, batch.shape[1] - 1)]
    return torch.stack(chosen, dim=1)


def perplexity(scores: Tensor) -> float:
    return math.exp(-scores.double().mean())


def rows(judged: dict[str, Judged]) -> dict[str, dict[str, float]]:
    """Return by name: perplexity, its rise over float32, and agreement with float32."""
    exact_scores, exact_ids = judged["engine float32"]
    found = {}
    for name, (scores, chosen) in judged.items():
        found[name] = {
            "perplexity": perplexity(scores),
            "rise": perplexity(scores) / perplexity(exact_scores) - 1,
            "agreement": (chosen == exact_ids).double().mean().item(),
        }
    return found


def show(result: dict[str, Any]) -> None:
    table = Table("", title=f"the embedded checkpoint on {result['ids']:,} held-out tokens")
    for heading in ("perplexity", "over float32", "most likely token as in float32"):
        table.add_column(heading, justify="right")
    for name, row in result["rows"].items():
        percent = f"{100 * row['rise']:+.3f} %", f"{100 * row['agreement']:.2f} %"
        table.add_row(name, f"{row['perplexity']:.4f}", *percent)
    Console().print(table)
    for met, words in verdicts(result):
        print(f"{'✓' if met else '✗'} {words}")


def verdicts(result: dict[str, Any]) -> list[tuple[bool, str]]:
    """Return whether each target of int8 is met, and the target in words."""
    found = []
    for name in ("engine int8", "engine int8, outliers"):
        row = result["rows"][name]
        found.append(
            (row["rise"] <= MOST_LOSS, f"{name}: perplexity at most {MOST_LOSS:.1%} above float32")
        )
        found.append(
            (row["agreement"] >= LEAST_AGREEMENT, f"{name}: {LEAST_AGREEMENT:.0%} of tokens agree")
        )
    return found
