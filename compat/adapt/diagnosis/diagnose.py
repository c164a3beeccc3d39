"""The structural witness: everything in a model that is unlike GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from compat.adapt.diagnosis.case import Case, Deviation
from compat.adapt.diagnosis.of_attention import of_attention
from compat.adapt.diagnosis.of_blocks import of_mlp, of_wiring
from compat.adapt.diagnosis.of_ends import (
    of_dropout,
    of_embedding,
    of_head,
    of_output,
    of_random,
    of_tracing,
)
from compat.adapt.diagnosis.of_homes import of_lost, of_shared, of_sizes, of_sourceless
from compat.adapt.diagnosis.of_names import of_names
from compat.adapt.diagnosis.of_norms import of_norms
from compat.adapt.mapping.fit import Lost


def _examined(part: Callable[[Case], Iterable[Deviation]], case: Case) -> list[Deviation]:
    """What one part finds; somebody's code may be anything, and the verdict needs it not."""
    try:
        return list(part(case))
    except Exception as error:
        what = part.__name__.removeprefix("of_")
        text = f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return [Deviation("unexamined", None, None, {"found": text})]


def deviations(case: Case, lost: Lost) -> list[Deviation]:
    """Everything unlike GPT-2, in the order in which a text meets it."""
    found: list[Deviation] = []
    blocks, ends = (of_norms, of_attention, of_mlp, of_wiring), (of_head, of_output)
    for part in (of_embedding, *blocks, *ends, of_random, of_dropout, of_tracing):
        found += _examined(part, case)
    for missing in (of_sizes, of_lost, of_shared):
        found += missing(case, lost)
    return [*found, *of_sourceless(case, lost), *of_names(case)]
