"""Parity as an assertion, for the tests of your own project."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from compat.adaptation import Adaptation, Finding
from compat.adaptation.adapt import adapt
from compat.checkpoint import Source
from compat.decoding import HasDecoder
from compat.dialects import dialect_of
from compat.errors import listed
from compat.name_map import NameMap
from compat.parity import ParityReport, check_parity
from compat.summary import further_places
from compat.user_code import place


def assert_parity(
    model: nn.Module | HasDecoder | str,
    source: Source,
    *,
    name_map: NameMap | None = None,
    gradients: bool = False,
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> None:
    """Assert that a model computes what `transformers` computes.

    A dialect's model, or any model with its name map, is compared with its current weights. For
    other models `adapt` loads the checkpoint first, and every deviation is named with its line and
    a fix.

    Args:
        model: an nn.Module, the name of a dialect, an `Engine` or `PlainBlocks`.
        source: "demo", a hub id such as `gpt2`, a folder, a weights file, or a Checkpoint.
        name_map: the model holds the checkpoint's weights already, under these names.
        gradients: the gradients have to agree too.
        forward: `forward(model, input_ids)` returns logits (B, T, V), see `adapt`.

    Raises:
        AssertionError: the model differs; the message has the first divergence, and each finding
            with its code, line and fix.
        CompatError: the comparison is not possible.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    own = isinstance(model, nn.Module) and dialect_of(model) is None and name_map is None
    if not own:
        report = check_parity(model, source, gradients=gradients, name_map=name_map)
        if not report:
            raise AssertionError("\n".join([report.headline, *_first_divergence(report)]))
        return
    assert isinstance(model, nn.Module)
    adaptation = adapt(model, source, forward=forward)
    untrainable = ("wrong_gradient", "changed_in_place")
    wrong = [found for found in adaptation.findings if found.code in untrainable]
    if not adaptation or (gradients and wrong):
        raise AssertionError(_of_adaptation(adaptation))


def _of_adaptation(adaptation: Adaptation) -> str:
    report = adaptation.parity
    lines = [f"{adaptation.model} does not compute what transformers computes on "
             f"{adaptation.source}"]  # fmt: skip
    lines += [adaptation.why_unchecked] if report is None else _first_divergence(report)
    shown = [found for found in adaptation.findings if found.severity != "info"]
    if not any(found.severity == "breaks" for found in shown) and report is not None:
        lines.append(report.headline)
    for found in shown:
        lines += _of_finding(found)
    return "\n".join(lines)


def _first_divergence(report: ParityReport) -> list[str]:
    first = report.first_divergence
    return [] if first is None else [f"first divergence: {first}"]


def _of_finding(found: Finding) -> list[str]:
    where = "" if found.file is None else f"{place(found.file, found.line)}  "
    lines = ["", f"{where}{found.source_line or ''}".rstrip(), f"  {found.code}: {found.message}"]
    lines.append(f"  fix: {found.fix}")
    if found.also:
        lines.append(f"  also at {listed(further_places(found.also), len(found.also))}")
    return [line for number, line in enumerate(lines) if line or number == 0]
