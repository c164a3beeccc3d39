"""The structural witness: everything in a model that is unlike GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from compat.adaptation.diagnosis.check_assignments import (
    of_lost,
    of_shared,
    of_sizes,
    of_sourceless,
)
from compat.adaptation.diagnosis.check_attention import of_attention
from compat.adaptation.diagnosis.check_blocks import of_mlp, of_wiring
from compat.adaptation.diagnosis.check_embeddings_and_head import (
    of_dropout,
    of_embedding,
    of_head,
    of_output,
    of_random,
    of_tracing,
)
from compat.adaptation.diagnosis.check_names import of_names
from compat.adaptation.diagnosis.check_norms import of_norms
from compat.adaptation.diagnosis.context import Deviation, DiagnosisContext
from compat.adaptation.mapping.assignments import Unmatched


def _examined(
    part: Callable[[DiagnosisContext], Iterable[Deviation]], case: DiagnosisContext
) -> list[Deviation]:
    """What one part finds; somebody's code may be anything, and the verdict needs it not."""
    try:
        return list(part(case))
    except Exception as error:
        what = part.__name__.removeprefix("of_")
        text = f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return [Deviation("unexamined", None, None, {"found": text})]


def deviations(case: DiagnosisContext, lost: Unmatched) -> list[Deviation]:
    """Everything unlike GPT-2, in the order in which a text meets it."""
    found: list[Deviation] = []
    blocks, ends = (of_norms, of_attention, of_mlp, of_wiring), (of_head, of_output)
    for part in (of_embedding, *blocks, *ends, of_random, of_dropout, of_tracing):
        found += _examined(part, case)
    for missing in (of_sizes, of_lost, of_shared):
        found += missing(case, lost)
    return [*found, *of_sourceless(case, lost), *of_names(case)]
