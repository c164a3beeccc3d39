"""Idioms that compute GPT-2's logits are proved compatible, and the same with a fault are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compat import CompatError, adapt, load_into, to_hf_state_dict
from compat.checkpoint import open_checkpoint
from tests.adaptation.common import error_of
from tests.adaptation.equal_idioms import (
    GPT,
    IDIOMS,
    BiasAfterSum,
    GainBesideNorm,
    L,
    LayerScaleOne,
    LoopOverQueries,
    Lora,
    NanGuard,
    OutputPerHead,
    PaddedVocabulary,
    ResidualBiasZero,
    SecondProductOfVkq,
    ShiftedPositions,
    V,
    built,
    with_block,
)
from tests.conftest import MakeCheckpoint

pytestmark = pytest.mark.usefixtures("shared_reference")


@pytest.fixture(scope="module")
def tiny(make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint with the idioms' number of layers, which is less than in the usual `tiny`."""
    return make_checkpoint(n_layer=L)


@pytest.mark.parametrize("name", IDIOMS)
def test_an_equivalent_model_is_proved(tiny: Path, name: str) -> None:
    model = built(name)
    adaptation = adapt(model, tiny)
    assert adaptation
    assert error_of(model, L) < 1e-5  # an independent measurement, on other ids


@pytest.mark.parametrize("name", ["LayerScaleOne", "Lora", "TokenTypesZero", "FrozenMask"])
def test_parameters_without_effect_are_reported(tiny: Path, name: str) -> None:
    findings = adapt(built(name), tiny).findings
    extra = [f for f in findings if f.code in ("random_parameters", "unused_parameters")]
    assert any(word in f.message for f in extra for word in ("extra", "lora", "mask"))
    assert {f.severity for f in extra} == {"info"}


@pytest.mark.parametrize(
    "name", ["WeightNormEverywhere", "GainBesideNorm", "ShiftedPositions", "OutputPerHead"]
)
def test_the_map_can_load_and_save_another_instance(tiny: Path, name: str) -> None:
    name_map = adapt(built(name), tiny).name_map
    model = built(name)
    load_into(model, name_map, tiny)
    assert error_of(model, L) < 1e-5
    checkpoint = open_checkpoint(tiny)
    for hf, tensor in to_hf_state_dict(model, name_map).items():
        stored = checkpoint.read(hf.removeprefix("transformer."))
        torch.testing.assert_close(tensor, stored, rtol=1e-6, atol=1e-6)


# The same idioms with a fault


class AutocastOn(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().run_blocks(x).float()


class AutocastOffWithin(GPT):
    """A region without autocast inside a region with autocast."""

    def run_blocks(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[0](x)
            return self.blocks[1](x).float()


class SecondCallAdded(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        after = super().run_blocks(x)
        return after + 1e-3 * self.blocks[0](after)


class WronglyCut(PaddedVocabulary):
    def head(self, x: Tensor) -> Tensor:
        return self.lm_head(x)[..., 1 : V + 1]


class ShiftedTooFar(ShiftedPositions):
    def positions(self, ids: Tensor) -> Tensor:
        return self.wpe((torch.arange(ids.shape[1]) + 3).clamp(max=33))


class SecondRowDiffers(GPT):
    def run_blocks(self, x: Tensor) -> Tensor:
        rows = [GPT.run_blocks(self, row) for row in x.split(1)]
        return torch.cat([rows[0], *(row + 0.01 * row.flip(-1) for row in rows[1:])])


class QueriesSeeTwoKeysLess(LoopOverQueries):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = super().mix(q, k, v)
        return torch.cat([y[:, :, :1], y[:, :, 1:].roll(1, dims=2)], dim=2)


class HeadsOutOfOrder(OutputPerHead):
    def attend(self, x: Tensor) -> Tensor:
        own = [self.out[h](self.head(x, h)) for h in range(4)]
        return own[0] + own[1] + own[2] + 0.999 * own[3] + self.out_bias


class ValuesOfTheNextHead(SecondProductOfVkq):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q, k, v.roll(1, 1))


class GuardThatCuts(NanGuard):
    def head(self, x: Tensor) -> Tensor:
        logits = super().head(x)
        return torch.where(logits.isnan() | (logits > 1.5), 1.5, logits)


class GainTwice(GainBesideNorm):
    def ln_2(self, x: Tensor) -> Tensor:
        return super().ln_2(x) * (1 + 0.01 * self.gain)


class BiasOfOtherChannels(BiasAfterSum):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.down.bias + self.down.bias.roll(1)


FAULTS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        AutocastOn, AutocastOffWithin, SecondCallAdded, WronglyCut, ShiftedTooFar,
        SecondRowDiffers, with_block(QueriesSeeTwoKeysLess), with_block(HeadsOutOfOrder),
        with_block(GainTwice), with_block(LayerScaleOne), with_block(ResidualBiasZero),
        with_block(Lora), with_block(ValuesOfTheNextHead), GuardThatCuts,
        with_block(BiasOfOtherChannels),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_an_idiom_is_not_compatible(tiny: Path, name: str) -> None:
    """Noise is added to the parameters that have no effect while they are 0 or 1."""
    torch.manual_seed(0)
    model = FAULTS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    try:
        adaptation = adapt(model, tiny)
    except CompatError:
        return
    assert not adaptation


def test_a_tied_model_of_an_untied_checkpoint_is_not_compatible(
    make_checkpoint: MakeCheckpoint,
) -> None:
    untied = make_checkpoint(tie_word_embeddings=False, n_layer=L)
    adaptation = adapt(built("AutocastOffBlocks"), untied)
    assert not adaptation
    assert any("lm_head.weight" in f.message for f in adaptation.findings)
