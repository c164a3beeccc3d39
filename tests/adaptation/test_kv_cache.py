"""A model's own KV cache: a correct one is proved, and a wrong one is reported and repaired."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import Adaptation, Finding, GPT2Config
from compat.adaptation.repair.repair import Search, Target, small_checkpoint
from compat.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("shared_reference")

RETURNED = (Path(__file__).parent / "zoo/cached.py").read_text()
START = "start = 0 if cache is None else cache[0][0].shape[2]"
# The modules store their keys and values, and the model counts the ids in the cache.
STORED = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("cache_k", None, persistent=False)
        self.register_buffer("cache_v", None, persistent=False)

    def forward(self, x, use_cache=False):
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        if use_cache:
            if self.cache_k is not None:
                k = torch.cat([self.cache_k, k], dim=2)
                v = torch.cat([self.cache_v, v], dim=2)
            self.cache_k, self.cache_v = k, v
        mask = torch.ones(T, k.shape[2], dtype=torch.bool).tril(k.shape[2] - T)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        gelu = nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))

    def forward(self, x, use_cache):
        x = x + self.attn(self.norm1(x), use_cache)
        return x + self.mlp(self.norm2(x))


class KeptGPT(nn.Module):
    def __init__(self, vocab_size, n_positions, width, layers, heads):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab_size, width), nn.Embedding(n_positions, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.current = 0

    def reset_kv_cache(self):
        self.current = 0
        for block in self.blocks:
            block.attn.cache_k = block.attn.cache_v = None

    def forward(self, ids, use_cache=False):
        T = ids.shape[1]
        positions = torch.arange(T)
        if use_cache:
            positions = positions + self.current
            self.current += T
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x, use_cache)
        return self.head(self.norm(x))
"""
EXPLICIT = RETURNED.replace(
    "mask=None):\n        start", "mask=None, position_ids=None):\n        start"
)
EXPLICIT = EXPLICIT.replace(START, "start = 0").replace(
    "position = torch.arange(start, start + idx.shape[1], device=idx.device)",
    "position = torch.arange(idx.shape[1]) if position_ids is None else position_ids[0]",
)
assert EXPLICIT.count("position_ids") == 3
# The caller concatenates the caches, as in the original code of GPT-2.
ONLY_NEW = RETURNED.replace(
    "        if cache is not None:\n            k =",
    "        new = k, v\n        if cache is not None:\n            k =",
).replace("self.o_proj(out), (k, v)", "self.o_proj(out), new")
assert ONLY_NEW.count("new\n") == 1
CORRECT = {
    "returned": RETURNED, "kept": STORED, "explicit positions": EXPLICIT, "only new": ONLY_NEW,
}  # fmt: skip

SCORES = """        mask = torch.ones(T, k.shape[2], dtype=torch.bool).tril(k.shape[2] - T)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
"""
FUSED = """        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))
"""

# A model, the old and the new text of an edit, and part of the finding's message.
WRONG = {
    "positions restart": (RETURNED, START, "start = 0", "gets position 0 instead of 10"),
    "one too far": (RETURNED, START, f"{START} + 1", "gets position 11 instead of 10"),
    "one too few": (RETURNED, START, f"{START} - 1", "gets position 9 instead of 10"),
    "first dropped": (
        RETURNED, "if cache is not None:\n",
        "if cache is not None:\n            cache = cache[0][:, :, 1:], cache[1][:, :, 1:]\n",
        "does not attend to the one at 0",
    ),
    "not counted": (STORED, "self.current += T", "pass", "gets position 0 instead of 10"),
    "not used": (
        STORED, "if self.cache_k is not None", "if False", "does not attend to any of them"
    ),
    "causal step": (STORED, SCORES, FUSED, "attend to the first cached key alone"),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return small_checkpoint(GPT2Config(), tmp_path_factory.mktemp("small"))


def target(tmp_path: Path, text: str) -> Target:
    path = tmp_path / "model.py"
    path.write_text(text)
    return Target(f"{path}:{'KeptGPT' if 'KeptGPT' in text else 'CachedGPT'}")


def cache_findings(adaptation: Adaptation) -> list[Finding]:
    return [
        f for f in adaptation.findings
        if f.code.startswith("kv_cache") or (f.code == "not_compared" and "KV cache" in f.message)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", CORRECT)
def test_a_correct_cache_is_proved(tmp_path: Path, small: Checkpoint, kind: str) -> None:
    adaptation = target(tmp_path, CORRECT[kind]).adapt(small, {})
    assert adaptation.compatible
    assert cache_findings(adaptation) == []


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_cache_is_reported_with_its_cause(
    tmp_path: Path, small: Checkpoint, kind: str
) -> None:
    text, old, new, expected_text = WRONG[kind]
    assert text.count(old) == 1
    adaptation = target(tmp_path, text.replace(old, new)).adapt(small, {})
    assert not adaptation.compatible
    [found] = cache_findings(adaptation)
    assert (found.code, found.severity) == ("kv_cache", "breaks")
    assert expected_text in found.message
    assert found.file is not None and found.line is not None
    if expected_text.startswith("gets"):
        assert "position" in str(found.source_line)


def test_a_cache_that_is_wrong_for_an_unknown_reason_is_a_limit(
    tmp_path: Path, small: Checkpoint
) -> None:
    text = RETURNED.replace("torch.cat([cache[0], k], dim=2)", "torch.cat([k, cache[0]], dim=2)")
    [found] = cache_findings(target(tmp_path, text).adapt(small, {}))
    assert (found.code, found.severity) == ("kv_cache", "limit")
    assert "for a reason that compat does not know" in found.message


def test_a_wrong_cache_without_an_edit_is_left_and_the_rest_is_repaired(
    tmp_path: Path, small: Checkpoint
) -> None:
    text = RETURNED.replace("torch.cat([cache[0], k], dim=2)", "torch.cat([k, cache[0]], dim=2)")
    found = Search(target(tmp_path, text), small, GPT2Config(), unsafe=False).run()
    assert found is None  # there is nothing else to repair
    text = text.replace('approximate="tanh"', 'approximate="none"')
    found = Search(target(tmp_path, text), small, GPT2Config(), unsafe=False).run()
    assert found is not None and (found.fixed, found.left) == (["erf_gelu"], ["kv_cache"])


def test_positions_begin_at_a_variable_that_the_code_has(tmp_path: Path, small: Checkpoint) -> None:
    old, new = "torch.arange(start, start + idx.shape[1]", "torch.arange(idx.shape[1]"
    assert RETURNED.count(old) == 1
    text = RETURNED.replace(old, new)
    found = Search(target(tmp_path, text), small, GPT2Config(), unsafe=False).run()
    assert found is not None and found.fixed == ["kv_cache"]
    [repaired] = found.texts.values()
    assert repaired == RETURNED


def test_a_cache_without_a_mask_for_later_calls_is_a_limit(
    tmp_path: Path, small: Checkpoint
) -> None:
    """Later calls with one id need no mask, but those with several ids do."""
    mask = "mask = torch.ones(T, k.shape[2], dtype=torch.bool).tril(k.shape[2] - T)"
    assert STORED.count(mask) == 1
    text = STORED.replace(mask, f"{mask} if k.shape[2] == T else torch.tensor(True)")
    adaptation = target(tmp_path, text).adapt(small, {})
    assert adaptation.compatible
    [found] = cache_findings(adaptation)
    assert (found.code, found.severity) == ("kv_cache_chunk", "limit")
    assert "for one new id at a time, but not for 3 at once" in found.message


@pytest.mark.parametrize("kind", ["returned", "kept"])
def test_the_cache_of_another_model_is_compared_with_its_own_logits(
    tmp_path: Path, small: Checkpoint, kind: str
) -> None:
    text = CORRECT[kind].replace('approximate="tanh"', 'approximate="none"')
    adaptation = target(tmp_path, text).adapt(small, {})
    assert [f.code for f in adaptation.findings if f.severity == "breaks"] == ["erf_gelu"]
    assert cache_findings(adaptation) == []
    old, new = (START, "start = 0") if kind == "returned" else ("self.current += T", "pass")
    assert text.count(old) == 1
    [found] = cache_findings(target(tmp_path, text.replace(old, new)).adapt(small, {}))
    assert (found.code, found.severity) == ("kv_cache", "limit")
    assert "differ from those of the whole sequence" in found.message


def test_positions_that_a_decode_step_requires_are_passed(
    tmp_path: Path, small: Checkpoint
) -> None:
    text = EXPLICIT.replace("torch.arange(idx.shape[1]) if position_ids is None else ", "")
    text = text.replace("position_ids[0]", "_positions(position_ids, idx, cache)")
    text += """

def _positions(position_ids, idx, cache):
    if position_ids is None and cache is not None:
        raise ValueError("a step needs positions")
    return torch.arange(idx.shape[1]) if position_ids is None else position_ids[0]
"""
    adaptation = target(tmp_path, text).adapt(small, {})
    assert adaptation.compatible and cache_findings(adaptation) == []


def test_a_cache_that_raises_is_reported(tmp_path: Path, small: Checkpoint) -> None:
    text = RETURNED.replace("torch.cat([cache[0], k], dim=2)", "torch.cat([cache[0], k], dim=1)")
    [found] = cache_findings(target(tmp_path, text).adapt(small, {}))
    assert (found.code, found.severity) == ("not_compared", "limit")
    assert "was not compared: RuntimeError" in found.message


@pytest.mark.parametrize("kind", ["positions restart", "one too far", "one too few"])
def test_a_wrong_start_position_is_repaired(tmp_path: Path, small: Checkpoint, kind: str) -> None:
    text, old, new, _ = WRONG[kind]
    repair = Search(
        target(tmp_path, text.replace(old, new)), small, GPT2Config(), unsafe=False
    ).run()
    assert repair is not None and repair.fixed == ["kv_cache"]
    [changed] = [line for line in repair.diff.splitlines() if line.startswith("+ ")]
    assert changed.strip("+ ") in (START, START.replace("[2]", "[-2]"))


@pytest.mark.parametrize("gelu", ["tanh", "none"])
def test_a_causal_mask_of_steps_is_named_at_its_line_and_repaired(
    tmp_path: Path, small: Checkpoint, gelu: str
) -> None:
    """This cause is found by running the model's own code, which need not be a GPT-2."""
    text = STORED.replace(SCORES, FUSED).replace('approximate="tanh"', f'approximate="{gelu}"')
    own = target(tmp_path, text)
    [found] = cache_findings(own.adapt(small, {}))
    assert found.severity == "breaks" and "is_causal=True" in (found.source_line or "")
    if gelu == "tanh":
        repaired = Search(own, small, GPT2Config(), unsafe=False).run()
        assert repaired is not None and repaired.fixed == ["kv_cache"]
        assert "is_causal=q.shape[-2] == k.shape[-2])" in repaired.diff


def test_a_missing_start_position_is_added(tmp_path: Path, small: Checkpoint) -> None:
    text = RETURNED.replace(f"        {START}\n", "").replace(
        "torch.arange(start, start + idx.shape[1], device=idx.device)",
        "torch.arange(idx.shape[1], device=idx.device)",
    )
    repair = Search(target(tmp_path, text), small, GPT2Config(), unsafe=False).run()
    assert repair is not None
    new = "past = 0 if cache is None else cache[0][0].shape[-2]"
    assert f"+        {new}\n" in repair.diff
    assert "torch.arange(past, past + idx.shape[1], device=idx.device)" in repair.diff
