"""`record` records hidden states, or replaces them, without other changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compat import ConfigError, ParityError, Tap, load_pretrained
from compat.dialects import DIALECTS, get_dialect
from compat.parity.trace import record
from compat.tap import expand_taps, tap_names

IDS = torch.arange(20).view(2, 10)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_taps_are_recorded_in_execution_order(tiny: Path, dialect: str) -> None:
    model, taps = load_pretrained(tiny, dialect), expand_taps(get_dialect(dialect).taps, 3)
    recorded = record(model, taps, IDS)
    assert list(recorded) == tap_names(3)
    assert torch.equal(recorded["logits"], model(IDS))
    assert recorded["h.1.q"].shape == recorded["h.1.heads"].shape == (2, 10, 24)
    assert recorded["h.1.probs"].shape == (2, 4, 10, 10)
    residual = recorded["h.0.out"] + recorded["h.1.attn"]
    assert torch.equal(recorded["h.1.resid_mid"], residual)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_later_modules_use_the_forced_values(tiny: Path, dialect: str) -> None:
    model, taps = load_pretrained(tiny, dialect), expand_taps(get_dialect(dialect).taps, 3)
    plain = record(model, taps, IDS)
    assert all(torch.equal(plain[k], v) for k, v in record(model, taps, IDS, forced=plain).items())
    doubled = record(model, taps, IDS, forced=plain | {"h.1.resid_mid": 2 * plain["h.1.resid_mid"]})
    changed = [tap for tap in plain if not torch.equal(plain[tap], doubled[tap])]
    # `resid_mid` itself is recorded before it is replaced. The forced value enters the second norm
    # and the second residual connection.
    assert changed in (["h.1.ln_2", "h.1.out"], ["h.1.out"])
    expected = 2 * plain["h.1.resid_mid"] + plain["h.1.mlp"]
    assert torch.equal(doubled["h.1.out"], expected)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_tap_with_a_layer_index_is_expanded_for_every_layer(tiny: Path, dialect: str) -> None:
    """This works in the dialect's order of taps and in any other order."""
    model, taps = load_pretrained(tiny, dialect), get_dialect(dialect).taps
    assert list(record(model, taps, IDS)) == list(record(model, taps[::-1], IDS)) == tap_names(3)
    acts = [tap for tap in taps if tap.name == "h.{i}.act"]
    assert list(record(model, acts, IDS)) == ["h.0.act", "h.1.act", "h.2.act"]


def test_a_run_may_stop_at_the_last_tap(tiny: Path) -> None:
    model = load_pretrained(tiny, "conv1d")
    finished: list[nn.Module] = []
    model.lm_head.register_forward_hook(lambda module, *_: finished.append(module))
    taps = [Tap("embed", "h.0", at="input"), Tap("h.{i}.out", "h.{i}")]
    complete = record(model, taps, IDS)
    assert len(finished) == 1
    part = record(model, taps, IDS, stop_early=True)
    assert len(finished) == 1 and list(part) == list(complete)
    assert all(torch.equal(part[name], complete[name]) for name in complete)


def test_hooks_are_removed_afterwards(tiny: Path) -> None:
    model = load_pretrained(tiny, "conv1d")
    before = model(IDS)
    taps = expand_taps(get_dialect("conv1d").taps, 3)
    record(model, taps, IDS, forced={"embed": torch.zeros(2, 10, 24)})
    assert torch.equal(model(IDS), before)


def test_recorded_tensors_are_copies() -> None:
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
    recorded = record(model, [Tap("embed", "first"), Tap("logits", "head")], IDS)
    assert torch.equal(recorded["embed"], model.kept)


class RaisesSystemExit(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise SystemExit("no")


def test_an_exception_of_the_model_is_reported_with_its_line() -> None:
    with pytest.raises(ParityError, match=r"raised SystemExit at .*test_trace.py:\d+: no"):
        record(RaisesSystemExit(), [Tap("logits", "")], IDS)


def test_a_tap_that_cannot_be_recorded_is_named(tiny: Path) -> None:
    model = load_pretrained(tiny, "conv1d")
    with pytest.raises(ParityError, match=r"GPTModel has no module 'h\.0\.norm'"):
        record(model, [Tap("h.0.ln_1", "h.0.norm")], IDS)
    model.add_module("idle", nn.Linear(2, 2))
    with pytest.raises(ParityError, match="did not execute the modules of its taps embed"):
        record(model, [Tap("embed", "idle")], IDS)
    with pytest.raises(ParityError, match=r"GPTModel has no module 'h\.0\.norm'"):
        record(model, [Tap("h.{i}.ln_1", "h.{i}.norm")], IDS)
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
        record("conv1d", [Tap("embed", "h.0")], IDS)  # type: ignore[arg-type]
    with pytest.raises(ParityError, match=r"unknown tap 'h\.0\.norm'"):
        expand_taps([Tap("h.{i}.norm", "h.{i}.ln_1")], 1)
