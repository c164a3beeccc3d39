"""Numbers and sentences of a result as text, for the terminal and for the HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from compat.user_code import place

if TYPE_CHECKING:
    from compat.inspection import Inspection
    from compat.parity import Difference, ParityReport, TapResult

Kind = Literal["accumulated", "local"]
KINDS: tuple[Kind, Kind] = ("accumulated", "local")

# The mark of a finding's severity, and its effect in words.
SEVERITY = {
    "breaks": ("✗", "breaks parity"),
    "drifts": ("≈", "differs within the bound"),
    "limit": ("?", "limit of the proof"),
    "info": ("·", "info"),
}

INPUT_COLUMNS = ("input", "ids", ">max|Δ|", ">error", ">bound", "verdict")


@dataclass(frozen=True)
class Worst:
    """The largest numbers of several taps, as text, and how many of the taps are bit-identical."""

    max_abs: str
    rel_rms: str
    error: str
    ratio: str
    identical: int

    @classmethod
    def of(cls, found: Sequence[Difference]) -> Worst:
        ratios = [d.ratio for d in found if d.ratio is not None]
        if not found:
            return cls("-", "-", "-", "-", 0)
        return cls(
            number(_largest(d.max_abs for d in found)),
            number(_largest(d.rel_rms for d in found)),
            number(_largest(d.error for d in found)),
            f"{_largest(ratios):.2f}" if ratios else "-",
            sum(d.bit_identical for d in found),
        )


@dataclass(frozen=True)
class Layer:
    """The taps of one block, or one tap outside the blocks.

    Args:
        name: such as "h.3" or "ln_f".
        taps: how many there are.
        passed: how many of them are in bounds.
        first_failed: the first tap out of bounds, without the layer's name, or None.
        accumulated, local: the largest numbers.
    """

    name: str
    taps: int
    passed: int
    first_failed: str | None
    accumulated: Worst
    local: Worst


def layers(results: Sequence[TapResult]) -> list[Layer]:
    """Return a report's taps by layer, in execution order."""
    found = []
    for name, group in groupby(results, lambda result: layer_of(result.tap)):
        taps = list(group)
        failed = [result.tap.removeprefix(f"{name}.") for result in taps if not result.passed]
        found.append(
            Layer(
                name,
                len(taps),
                len(taps) - len(failed),
                failed[0] if failed else None,
                Worst.of([result.accumulated for result in taps]),
                Worst.of([result.local for result in taps if result.local is not None]),
            )
        )
    return found


def layer_of(tap: str) -> str:
    """Return the block of a tap, "h.3" for "h.3.act"; the tap itself outside the blocks.

    The gradients of a golden file are separate from its taps, as in "grad.h.3".
    """
    block = re.match(r"(grad\.)?h\.\d+(?=\.)", tap)
    return block[0] if block else tap


def input_rows(report: ParityReport) -> list[list[str]]:
    """Return the logits on every input, one row of INPUT_COLUMNS each."""
    rows = []
    for result in report.logits.inputs:
        B, T = result.input_shape
        numbers = ["-", "-", "-"]
        if (found := result.logits) is not None:
            bound = "-" if found.bound is None else number(found.bound)
            numbers = [number(found.max_abs), number(found.error), bound]
        verdict = "✓" if result.passed else f"✗ {result.error}".rstrip()
        rows.append([result.name, f"{B} × {T}", *numbers, verdict])
    return rows


INPUT_NOTE = "error and bound: at the worst position, relative to the norm of its logits"


GRADIENT_COLUMNS = ("gradients", ">max|Δ|", ">Δ/RMS", ">× ref", "verdict")


def gradient_rows(report: ParityReport) -> list[list[str]]:
    """Return a row of GRADIENT_COLUMNS for each layer, in the order of the backward pass."""
    trained = (report if report.float32 is None else report.float32).gradients
    rows = []
    for name, group in groupby(trained.results if trained else (), lambda r: _block_of(r.tensor)):
        results = list(group)
        worst = Worst.of([result.difference for result in results])
        failed = [result.tensor.removeprefix(f"{name}.") for result in results if not result.passed]
        verdict = f"✗ from {failed[0]}" if failed else "✓"
        rows.append([name, worst.max_abs, worst.rel_rms, worst.ratio, verdict])
    return rows


def _block_of(tensor: str) -> str:
    """Return the block of a tensor, "h.3" for "h.3.ln_1.bias"; its module outside the blocks."""
    return ".".join(tensor.split(".")[: 2 if tensor.startswith("h.") else 1])


def sensitivity(report: ParityReport) -> str | None:
    """Return the smallest error that a passing comparison would have caught, as a sentence."""
    smallest = report.smallest_detectable
    if not report.passed or not math.isfinite(smallest):
        return None
    return f"A relative error of {smallest:.1g} in the logits at one position would have failed."


def limits(report: ParityReport) -> list[str]:
    """Return what the comparison did not cover, with the lines of the user's code."""
    return [
        f"{place(limit.file, limit.line)}: {limit.message}" if limit.file else limit.message
        for limit in report.limits
    ]


def further_places(lines: Sequence[str]) -> list[str]:
    """Return a finding's further lines, `file:line` each, with paths as `place` shows them."""
    pairs = (line.rpartition(":") for line in lines)
    return [place(file, int(number)) for file, _, number in pairs]


def number(value: float) -> str:
    """Return a measured value with two digits, such as "1.2e-07"."""
    return f"{value:.1e}" if value else "0"


def _largest(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if there is one."""
    return max(values, key=lambda value: (math.isnan(value), value))


def properties(found: Inspection) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each known property."""
    if found.format:
        yield "format", found.format
    if found.weights:
        yield "weights", f"{found.weights}, {_size(found.bytes)}"
    if found.config:
        yield "config", " · ".join(_fields(found))
    if found.layout:
        prefixes = " or ".join(prefix for prefix in found.prefixes if prefix)
        names = f"names begin with {prefixes}" if prefixes else "names without prefix"
        yield "layout", f"projections {found.layout}, {names}"
    if found.parameters is not None:
        yield "parameters" if found.loads else "values", _counts(found)
    if found.names:
        yield "names", ", ".join(found.names) + ", …"
    if found.weights:
        yield "tokenizer", _tokenizer(found)
    for number, note in enumerate(found.notes):
        yield "" if number else "notes", note
    if found.error:
        yield "error", found.error


def _fields(found: Inspection) -> Iterator[str]:
    """Yield the main fields of the config in words."""
    words = {
        "n_layer": "{:,} layers",
        "n_head": "{:,} heads",
        "n_embd": "{:,} channels",
        "n_positions": "{:,} positions",
        "vocab_size": "vocabulary of {:,}",
    }
    for name, value in found.config.items():
        if type(value) is int and name in words:
            yield words[name].format(value)
        elif name == "tie_word_embeddings":
            yield "head tied to the embedding" if value else "untied head"
        else:
            yield str(value) if name == "activation_function" else f"{name} {value}"


def _counts(found: Inspection) -> str:
    """Return, for example, "124,439,808 in 148 tensors of float32"."""
    total = f"{found.parameters:,} in {found.tensors:,} tensors"
    if len(found.dtypes) == 1:
        return f"{total} of {next(iter(found.dtypes))}"
    return f"{total}: " + ", ".join(f"{count} of {name}" for name, count in found.dtypes.items())


def _tokenizer(found: Inspection) -> str:
    """Return the tokenizer's files and how many tokens it has, or why it cannot be used."""
    files, tokens = found.tokenizer["files"], found.tokenizer.get("tokens")
    if found.tokenizer.get("error"):
        return f"cannot be used: {found.tokenizer['error']}"
    if not found.loads:
        return ", ".join(files) or "no files"
    if not files and tokens:
        return "no files, so GPT-2's own from tiktoken is used"
    if not files:
        return "no files, so text cannot be encoded or decoded, but token ids can be used"
    unused = found.config["vocab_size"] - tokens
    return f"{', '.join(files)} with {tokens:,} tokens" + (
        f", {unused:,} ids without text" * bool(unused)
    )


def _size(count: int) -> str:
    """Return, for example, "3.8 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
