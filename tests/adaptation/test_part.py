"""Single parts of a GPT-2: mapped, proved, diagnosed and loaded like whole models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compat import AdaptError, NameMapError, adapt, load_into
from compat.checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("shared_reference")

C, H = 24, 4  # of the tiny checkpoint


class Attention(nn.Module):
    def __init__(self, scaled: bool = True) -> None:
        super().__init__()
        self.scaled = scaled
        self.query, self.key, self.value = (nn.Linear(C, C) for _ in range(3))
        self.out = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            f(x).view(B, T, H, C // H).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1)
        if self.scaled:
            scores = scores / math.sqrt(C // H)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return self.out((F.softmax(scores, -1) @ v).transpose(1, 2).reshape(B, T, C))


class MaskedAttention(Attention):
    """Accepts the mask as an argument and also returns the weights."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        B, T, _ = x.shape
        q, k, v = (
            f(x).view(B, T, H, C // H).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // H)
        weights = F.softmax(scores.masked_fill(mask, -torch.inf), -1)
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, C)), weights


class OptionallyMaskedBlock(nn.Module):
    """Without the mask, which comes after one of padding, tokens attend to later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn, self.mlp = MaskedAttention(), FeedForward()

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if padding_mask is not None:
            x = x.masked_fill(padding_mask[None, :, :1] == 0, 0.0)
        if mask is None:
            mask = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        x = x + self.attn(self.ln_1(x), mask)[0]
        return x + self.mlp(self.ln_2(x))


class FeedForward(nn.Module):
    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.up, self.down, self.approximate = nn.Linear(C, 4 * C), nn.Linear(4 * C, C), approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn, self.mlp = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(-1, keepdim=True)
        return self.gain * (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt() + self.shift


CORRECT = {
    "h.1.attn": Attention, "h.0.attn": MaskedAttention, "h.2.mlp": FeedForward, "h.1": Block,
    "ln_f": lambda: nn.LayerNorm(C), "h.0.ln_2": lambda: nn.LayerNorm(C),
}  # fmt: skip
WRONG = {
    "h.1.attn": (lambda: Attention(scaled=False), "no_attn_scale"),
    "h.0.mlp": (lambda: FeedForward("none"), "erf_gelu"),
    "ln_f": (lambda: nn.LayerNorm(C, eps=1e-2), "eps_value"),
    "h.1.ln_1": (Norm, "unbiased_var"),
}


@pytest.mark.parametrize("part", CORRECT)
def test_a_part_is_loaded_and_proved(tiny: Path, part: str) -> None:
    module = CORRECT[part]()
    adaptation = adapt(module, tiny, part=part)
    assert adaptation and not adaptation.findings
    checkpoint = open_checkpoint(tiny)
    stored = {name for name in checkpoint.infos if name.startswith(f"{part}.")}
    assert f"GPT-2 with {type(module).__name__} as {part} computes" in str(adaptation.parity)
    assert {row.hf for row in adaptation.name_map.rows} == stored
    assert adaptation.tensors == len(stored)
    loaded = {name for row in adaptation.name_map.rows for name in row.ours}
    assert loaded == dict(module.named_parameters()).keys()


@pytest.mark.parametrize("part", WRONG)
def test_a_deviation_of_a_part_is_reported(tiny: Path, part: str) -> None:
    make, code = WRONG[part]
    adaptation = adapt(make(), tiny, part=part)
    assert not adaptation
    [found] = [f for f in adaptation.findings if f.severity == "breaks"]
    assert found.code == code
    assert found.file == (None if part == "ln_f" else __file__)
    assert not found.also  # no lines of compat's own model
    assert "only in" not in found.message


def test_the_map_of_a_part_loads_the_same_part_of_every_layer(tiny: Path) -> None:
    name_map = adapt(Attention(), tiny, part="h.0.attn").name_map
    checkpoint = open_checkpoint(tiny)
    for layer in range(3):
        module = Attention()
        load_into(module, name_map, tiny, part=f"h.{layer}.attn")
        expected = checkpoint.read(f"h.{layer}.attn.c_proj.weight")
        assert torch.equal(module.out.weight, expected.T)
    with pytest.raises(NameMapError, match=r"does not fit h\.0\.mlp"):
        load_into(Attention(), name_map, tiny, part="h.0.mlp")
    with pytest.raises(NameMapError, match=r"no part 'h\.9\.attn'"):
        load_into(Attention(), name_map, tiny, part="h.9.attn")


@pytest.mark.parametrize(
    ("part", "make", "words"),
    [
        ("h.7", Block, "has 3 layers"),
        ("attention", Attention, "must be ln_f, h.0"),
        ("h.0.mlp", lambda: nn.Linear(5, 5), "cannot be called with hidden states"),
        ("h.0.mlp", lambda: nn.Linear(C, 5), "returns"),
    ],
)
def test_a_module_that_is_not_a_part_is_refused(
    tiny: Path, part: str, make: type[nn.Module], words: str
) -> None:
    with pytest.raises(AdaptError, match=words):
        adapt(make(), tiny, part=part)


def test_the_error_for_a_part_without_its_name_suggests_one(tiny: Path) -> None:
    with pytest.raises(AdaptError, match=r"Attention takes hidden states .* --part h\.0\.attn"):
        adapt(Attention(), tiny)


def test_an_optional_mask_is_passed_if_tokens_attend_to_later_ones_without_it(tiny: Path) -> None:
    assert adapt(OptionallyMaskedBlock(), tiny, part="h.1")
