"""Traces: what is recorded, what is forced, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compat import ParityError, Tap, load_pretrained
from compat.dialects import DIALECTS, get_dialect
from compat.parity.trace import trace
from compat.taps import expand_taps, tap_names

IDS = torch.arange(20).view(2, 10)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_taps_in_execution_order(tiny: Path, dialect: str) -> None:
    model, taps = load_pretrained(tiny, dialect), expand_taps(get_dialect(dialect).taps, 3)
    recorded = trace(model, taps, IDS)
    assert list(recorded) == tap_names(3)
    assert torch.equal(recorded["logits"], model(IDS))
    assert recorded["h.1.q"].shape == recorded["h.1.heads"].shape == (2, 10, 24)
    assert recorded["h.1.probs"].shape == (2, 4, 10, 10)
    residual = recorded["h.0.out"] + recorded["h.1.attn"]
    assert torch.equal(recorded["h.1.resid_mid"], residual)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_forced_values_are_what_the_next_piece_works_on(tiny: Path, dialect: str) -> None:
    model, taps = load_pretrained(tiny, dialect), expand_taps(get_dialect(dialect).taps, 3)
    plain = trace(model, taps, IDS)
    assert all(torch.equal(plain[k], v) for k, v in trace(model, taps, IDS, forced=plain).items())
    doubled = trace(model, taps, IDS, forced=plain | {"h.1.resid_mid": 2 * plain["h.1.resid_mid"]})
    changed = [tap for tap in plain if not torch.equal(plain[tap], doubled[tap])]
    # `mid` itself is recorded before it is replaced; it enters the norm and the second shortcut.
    assert changed in (["h.1.ln_2", "h.1.out"], ["h.1.out"])
    expected = 2 * plain["h.1.resid_mid"] + plain["h.1.mlp"]
    assert torch.equal(doubled["h.1.out"], expected)


def test_hooks_are_gone_afterwards(tiny: Path) -> None:
    model = load_pretrained(tiny, "conv1d")
    before = model(IDS)
    taps = expand_taps(get_dialect("conv1d").taps, 3)
    trace(model, taps, IDS, forced={"embed": torch.zeros(2, 10, 24)})
    assert torch.equal(model(IDS), before)


def test_captured_tensors_survive_an_in_place_residual() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Embedding(20, 4)
            self.head = nn.Linear(4, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.first(ids)
            kept = x.clone()
            x += 1
            self.kept = kept
            logits: torch.Tensor = self.head(x)
            return logits

    model = InPlace()
    recorded = trace(model, [Tap("embed", "first"), Tap("logits", "head")], IDS)
    assert torch.equal(recorded["embed"], model.kept)


class Quits(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise SystemExit("no")


def test_a_model_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(ParityError, match=r"raised SystemExit at .*test_trace.py:\d+: no"):
        trace(Quits(), [Tap("logits", "")], IDS)


def test_tap_that_cannot_be_taken_is_named(tiny: Path) -> None:
    model = load_pretrained(tiny, "conv1d")
    with pytest.raises(ParityError, match=r"GPTModel has no module 'h\.0\.norm'"):
        trace(model, [Tap("h.0.ln_1", "h.0.norm")], IDS)
    model.add_module("idle", nn.Linear(2, 2))
    with pytest.raises(ParityError, match="did not execute the modules of its taps embed"):
        trace(model, [Tap("embed", "idle")], IDS)
    with pytest.raises(ParityError, match=r"unknown tap 'h\.0\.norm'"):
        expand_taps([Tap("h.{i}.norm", "h.{i}.ln_1")], 1)
