"""Models that are not a GPT-2 raise an AdaptError that says what they are instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import AdaptError, adapt
from tests.adaptation.catalogue import FOREIGN, ZOO
from tests.adaptation.common import build

REASONS = {
    "llama": ("layer 0", "gated MLP", "foreign_llama.py"),
    "encoder": ("layer ", "foreign_encoder.py"),
    "rnn": ("no attention", "not a GPT-2"),
    "mlp": ("no attention", "not a GPT-2"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_model_raises_with_a_reason(tiny: Path, name: str) -> None:
    model = build(FOREIGN[name], ZOO / FOREIGN[name].file, tiny)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(AdaptError) as caught:
        adapt(model, tiny)
    for words in REASONS[name]:
        assert words in str(caught.value)
    assert "Place(" not in str(caught.value)  # for a person, not for a debugger
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
