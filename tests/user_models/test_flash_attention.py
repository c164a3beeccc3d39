"""The stand-in for flash-attn: what it computes, and models whose files import it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compat import adapt
from compat.user_models import load_target
from compat.user_models.missing import flash_attn_func, flash_attn_qkvpacked_func
from tests.adapt_project import GPT, line_of
from tests.conftest import MakeCheckpoint


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: tuple[int, int]
) -> Tensor:
    """Attend position by position, with positions aligned at the end."""
    (B, T, H, D), S = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (k, v))
    out = torch.empty(B, T, H, D)
    for t in range(T):
        at = t + S - T
        first = max(0, at - window[0]) if window[0] >= 0 else 0
        after = 0 if causal else window[1]
        last = min(S, at + after + 1) if after >= 0 else S
        scores = torch.einsum("bhd,bshd->bhs", q[:, t], k[:, first:last]) * scale
        out[:, t] = torch.einsum("bhs,bshd->bhd", scores.softmax(-1), v[:, first:last])
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, 4), (5, -1)])
@pytest.mark.parametrize(("T", "key_heads"), [(9, 4), (9, 2), (4, 4)])
def test_the_stand_in_computes_attention_as_flash_attn_documents_it(
    causal: bool, window: tuple[int, int], T: int, key_heads: int
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, T, 4, 8), *torch.randn(2, 2, 9, key_heads, 8)
    found = flash_attn_func(q, k, v, 0.0, 0.3, causal, window)
    torch.testing.assert_close(found, by_hand(q, k, v, 0.3, causal, window))
    other = by_hand(q, k, v, 0.3, not causal, (1, 1))
    assert (found - other).norm() > 0.1 * other.norm()


def test_packed_projections_are_unpacked() -> None:
    qkv = torch.randn(2, 9, 3, 4, 8)
    expected = by_hand(*qkv.unbind(2), 8**-0.5, True, (-1, -1))
    torch.testing.assert_close(flash_attn_qkvpacked_func(qkv, causal=True), expected)


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"alibi_slopes": torch.ones(4)}])
def test_what_it_does_not_compute_is_refused(option: dict[str, object]) -> None:
    q = torch.randn(1, 3, 4, 8)
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        flash_attn_func(q, q, q, causal=True, **option)


IMPORTS = {
    "a function": "from no_flash_attn import flash_attn_func\n",
    "a kernel": "from no_kernels import get_kernel\n"
    'flash_attn_func = get_kernel("fast/attention").interface.flash_attn_func\n',
}


@pytest.mark.parametrize("imported", IMPORTS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_model_that_needs_it_is_compared(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, causal: bool, imported: str
) -> None:
    source = GPT.replace(
        "q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in (q, k, v))",
        "q, k, v = (t.view(B, T, self.heads, -1) for t in (q, k, v))",
    )
    source = source.replace(
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        f"flash_attn_func(q, k, v, causal={causal})",
    )
    source = source.replace("y.transpose(1, 2).reshape", "y.reshape")
    path = tmp_path / "fast.py"
    path.write_text(f"{IMPORTS[imported]}{source}")
    cls = load_target(f"{path}:MyGPT")
    checkpoint = make_checkpoint(
        n_layer=3, n_head=4, n_embd=24, n_positions=32, vocab_size=97, layer_norm_epsilon=1e-5
    )
    model = cls(97, 32, 24, 4, 3)  # type: ignore[operator]
    adaptation = adapt(model, checkpoint)
    breaking = [(f.code, f.line) for f in adaptation.findings if f.severity == "breaks"]
    line = line_of(path.read_text(), "y = flash_attn_func")
    assert breaking == ([] if causal else [("no_mask", line)])
    assert bool(adaptation) is causal
