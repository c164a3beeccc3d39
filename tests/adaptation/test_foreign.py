"""Models that are not a GPT-2 raise an AdaptError that says what they are instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import AdaptError, adapt
from tests.adaptation.catalogue import FOREIGN, ZOO
from tests.adaptation.common import build

REASONS = {
    "encoder": ("layer ", "foreign_encoder.py"),
    "rnn": ("no attention", "not a GPT-2"),
    "mlp": ("no attention", "not a GPT-2"),
}


def test_what_distinguishes_llama_is_reported_at_its_lines(tiny: Path) -> None:
    model = build(FOREIGN["llama"], ZOO / FOREIGN["llama"].file, tiny)
    adaptation = adapt(model, tiny)
    assert not adaptation
    found = {finding.code: finding for finding in adaptation.findings}
    assert {"rmsnorm", "rope", "gated_mlp", "no_pos"} - found.keys() <= {"no_pos"}
    for code in ("rmsnorm", "rope", "gated_mlp"):
        assert found[code].severity == "breaks" and found[code].line is not None


@pytest.mark.parametrize("name", REASONS)
def test_a_foreign_model_raises_with_a_reason(tiny: Path, name: str) -> None:
    model = build(FOREIGN[name], ZOO / FOREIGN[name].file, tiny)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(AdaptError) as caught:
        adapt(model, tiny)
    for words in REASONS[name]:
        assert words in str(caught.value)
    assert "Place(" not in str(caught.value)  # for a person, not for a debugger
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
