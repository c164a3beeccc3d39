"""Every idiom that computes GPT-2's logits is mapped, loaded and proved."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import adapt
from tests.adapt.common import error_of
from tests.adapt.equal_idioms import IDIOMS, built


@pytest.mark.parametrize("name", IDIOMS)
def test_an_equal_model_is_proved(tiny: Path, name: str) -> None:
    model = built(name)
    adaptation = adapt(model, tiny)
    assert adaptation
    assert error_of(model) < 1e-5  # seen from outside, on ids of its own
