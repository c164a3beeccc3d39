"""Repairs: edits are found for every deviation, proved, and written atomically."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat import AdaptError, GPT2Config, adapt
from compat.adaptation.repair.edits import Edit, Edits, apply, with_import_of_torch
from compat.adaptation.repair.fixes import FIXES, Site
from compat.adaptation.repair.repair import (
    MAX_SECONDS,
    Repair,
    Search,
    Target,
    Unrepaired,
    is_proved,
    repair,
    small_checkpoint,
)
from compat.adaptation.repair.source import Source, find
from compat.adaptation.repair.write import write
from compat.adaptation.result import Finding
from compat.checkpoint import Checkpoint, open_checkpoint
from compat.user_models.notebook import code_cells, read_source
from tests.adapt_project import ERF, GPT, TANH, notebook
from tests.adaptation.catalogue import MODELS, MUTATIONS, ZOO, Mutation, composed
from tests.adaptation.common import build
from tests.adaptation.test_mistakes import GPT as BOOK
from tests.conftest import MakeCheckpoint

pytestmark = pytest.mark.usefixtures("shared_reference")

# The deviations that are repaired. The others concern sizes or names, or change no values.
REPAIRED = set(
    """
    bias_before_scale changed_logits changed_scores doubled_residual dropout_always_on
    eps_outside_sqrt eps_value
    erf_gelu extra_ln inner_dim mask_after_softmax mask_off mask_value missing_ln
    missing_residual n_head_mismatch n_layer_mismatch no_attn_scale no_final_ln
    no_head_merge_transpose no_head_split_transpose no_ln_bias no_ln_weight no_mask no_mlp_bias
    no_out_proj no_pos no_proj_bias no_qkv_bias norm_axis norm_on_output other_activation
    other_softmax parallel_block pos_offset position_bias position_ids post_ln qk_norm
    random_parameters relu residual_from_norm rmsnorm scale_by_d_model scaled_embedding
    scaled_logits shared_kv silu sinusoidal_pos sliding_window softmax_dim softmax_output
    time_shift unbiased_var vocab_mismatch wrong_scale
    """.split()
)
# Styles whose constructors have arguments that are not recognised as sizes.
UNKNOWN_ARGUMENTS = {"conv_proj", "head_loop"}
NO_DEVIATION = {("hub_style", "eps_value")}  # the constructor is called with the checkpoint's eps
REPAIRABLE = [
    mutation for mutation in MUTATIONS
    if mutation.code in REPAIRED and mutation.style not in UNKNOWN_ARGUMENTS
    and (mutation.style, mutation.code) not in NO_DEVIATION
]  # fmt: skip
# One style of each deviation, or all of them if COMPAT_ALL_REPAIRS is set.
TESTED = [
    mutation for i, mutation in enumerate(REPAIRABLE)
    if "COMPAT_ALL_REPAIRS" in os.environ
    or sum(other.code == mutation.code for other in REPAIRABLE[:i]) < 1
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return small_checkpoint(GPT2Config(), tmp_path_factory.mktemp("small"))


def target_of(path: Path, style: str) -> Target:
    return Target(f"{path}:{MODELS[style].cls}")


def searched(path: Path, style: str, small: Checkpoint) -> Repair:
    """Search for a repair, and check that one is found."""
    found = Search(target_of(path, style), small, GPT2Config(), unsafe=False).run()
    assert found is not None
    return found


@pytest.mark.parametrize("mutation", TESTED, ids=lambda m: f"{m.style}-{m.code}")
def test_a_deviation_is_repaired(
    small: Checkpoint, tiny: Path, tmp_path: Path, mutation: Mutation
) -> None:
    """The edits are found with the sizes of one checkpoint and tested with those of another."""
    path = composed(MODELS[mutation.style], [mutation], tmp_path)
    before = path.read_text()
    found = searched(path, mutation.style, small)
    assert found.fixed
    assert path.read_text() == before  # the search writes nothing
    path.write_text(found.texts[str(path)])
    model = build(MODELS[mutation.style], path, tiny)
    repaired = adapt(model, tiny)
    wrong = {f.code for f in repaired.findings if f.severity in ("breaks", "drifts")}
    own_sizes = {"n_head_mismatch", "n_layer_mismatch", "vocab_mismatch"}  # of the zoo's builder
    assert repaired or wrong <= own_sizes


TOGETHER = [
    ("nano", "erf_gelu", "no_mask"),
    ("mingpt", "no_attn_scale", "missing_residual", "no_proj_bias"),
    ("book", "unbiased_var", "relu", "mask_off"),
    ("vkq_fused", "silu", "no_head_merge_transpose", "no_final_ln"),
    ("functional", "erf_gelu", "wrong_scale", "scaled_embedding"),
    ("lens", "silu", "softmax_dim", "no_final_ln"),
]


@pytest.mark.parametrize("wanted", TOGETHER, ids="-".join)
def test_several_deviations_are_repaired_by_one_diff(
    small: Checkpoint, tmp_path: Path, wanted: tuple[str, ...]
) -> None:
    style, *codes = wanted
    by_code = {m.code: m for m in reversed(MUTATIONS) if m.style == style}
    path = composed(MODELS[style], [by_code[code] for code in codes], tmp_path)
    found = searched(path, style, small)
    assert set(codes) <= set(found.fixed)
    assert found.diff.count("--- a/") == 1 and found.diff.count("@@") >= 2


# Other forms of a deviation than in the catalogue: edits of a correct file, the codes in the
# order of their repair, and a line of the repaired file.
ATTEND = """        scores = queries @ keys.transpose(2, 3) / self.head_dim ** 0.5
        scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        weights = self.drop(weights)
        out = (weights @ values).transpose(1, 2).contiguous().view(B, T, C)
"""
SPLIT = "".join(
    f"        {name} = {name}.view(B, T, self.heads, self.head_dim).transpose(1, 2)\n"
    for name in ("keys", "queries", "values")
)
FUSED = "F.scaled_dot_product_attention(queries, keys, values, is_causal=True)"
LOOKUP = "self.pos_emb(torch.arange(T, device=ids.device))"
EMBEDDING = "self.pos_emb = nn.Embedding(context_length, emb_dim)"
BLOCK = """        shortcut = x
        x = self.norm1(x)
        x = self.att(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.ff(x)
        x = x + shortcut
        return x
"""
MLP = 'self.down(F.gelu(self.up(x), approximate="tanh"))'
BOTH_NORMS = "        first = self.norm1(x)\n        second = self.norm2(x)\n"
PARTS = """        x = self.attend(x)
        x = self.think(x)
        return x

    def attend(self, x):
        return x + self.att(self.norm1(x))

    def think(self, x):
{}
"""
WAVES = """
def waves(length, depth, device=None):
    angles = torch.arange(length, device=device)[:, None] / 10000 ** (
        torch.arange(0, depth, 2, device=device) / depth
    )
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


class Waves(nn.Module):
    def forward(self, x):
        return x + waves(x.size(1), x.size(2), x.device)

"""
BLOCKS = """        blocks = [Block(emb_dim, n_heads, context_length) for _ in range(n_layers)]
        self.blocks = nn.ModuleList(blocks)
"""
LOOP = "        for block in self.blocks:\n            x = block(x)\n"
BLOCKS_BY_NAME = [
    (BLOCKS, "".join(f"        self.block{i} = Block(emb_dim, n_heads, context_length)\n"
                     for i in (1, 2, 3))),
    ("emb_dim, n_heads, n_layers)", "emb_dim, n_heads)"),
]  # fmt: skip
SUM = "        x = self.tok_emb(ids) + self.pos_emb(torch.arange(T, device=ids.device))\n"
WAVES_ADDED = [
    ("class GPT(nn.Module):\n", """class GPT(nn.Module):
    def waves(self, x):
        T, C = x.shape[1:]
        angles = torch.arange(T)[:, None] / 10000 ** (torch.arange(0, C, 2) / C)
        table = x.clone()
        table[..., 0::2] += torch.sin(angles)
        table[..., 1::2] += torch.cos(angles)
        return table

"""),
    ("        self.pos_emb = nn.Embedding(context_length, emb_dim)\n", ""),
]  # fmt: skip


ONE_BLOCK = "Block(emb_dim, n_heads, context_length)"
EINOPS = """def einsum(x, weight, equation):
    return x @ weight.T


class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def forward(self, x):
        return einsum(x, self.weight, "... i, o i -> ... o")


class Attention("""
TRANSPOSED = """def einsum(weight, x, equation):
    return x @ weight


class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def forward(self, x):
        return einsum(self.weight.T, x, "i o, ... i -> ... o")


class FeedForward("""
ROPE = """def rope(x):
    T, D = x.shape[-2:]
    angle = torch.arange(T)[:, None] / 100 ** (torch.arange(0, D, 2) / D)
    a, b = x.chunk(2, -1)
    c, s = angle.cos(), angle.sin()
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class GPT("""


def gated(test: str, option: str) -> list[tuple[str, str]]:
    """Return edits that give a block a gated MLP, which is used if the test of an option holds."""
    mlp = """class Gated(FeedForward):
    def __init__(self, dim):
        super().__init__(dim)
        self.gate = nn.Linear(dim, 4 * dim)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim, heads, context"""
    return [
        ("self.ff = FeedForward(dim)", f"self.ff = Gated(dim) if {test} else FeedForward(dim)"),
        ("class Block(nn.Module):\n    def __init__(self, dim, heads, context", f"{mlp}, {option}"),
    ]


FORMS: dict[str, tuple[list[tuple[str, str]], list[str], str]] = {
    "no final norm, and norms that take more than a width": (
        [("    def __init__(self, dim):\n        super().__init__()\n        self.scale",
          "    def __init__(self, dim, kind):\n        super().__init__()\n        self.scale"),
         ("LayerNorm(dim)", "LayerNorm(dim, None)"),
         ("        self.final_norm = LayerNorm(emb_dim)\n", ""),
         ("        x = self.final_norm(x)\n", "")],
        ["no_final_ln"],
        "nn.LayerNorm(emb_dim)",
    ),
    "heads that are merged and not projected": (
        [("        return self.out_proj(out)", "        return out"),
         ("        self.out_proj = nn.Linear(dim, dim)\n", "")],
        ["no_out_proj"],
        "self.out_proj = nn.Linear(dim, dim)",
    ),
    "a projection that is built and not used": (
        [("        return self.out_proj(out)", "        return out")],
        ["no_out_proj"],
        "return self.out_proj(out)",
    ),
    "heads that are not split before a fused kernel": (
        [(SPLIT, ""), (ATTEND, f"        out = {FUSED}\n        out = out.contiguous()\n")],
        ["n_head_mismatch"],
        "keys = keys.view(B, T, self.heads, -1).transpose(1, 2)",
    ),
    "post-norm inside the sublayers": (
        [("self.out_proj = nn.Linear(dim, dim)",
          "self.out_proj = nn.Linear(dim, dim)\n        self.norm = LayerNorm(dim)"),
         ("    def forward(self, x):\n        B, T, C = x.shape\n        keys = self.W_key(x)\n"
          "        queries = self.W_query(x)\n        values = self.W_value(x)\n",
          "    def forward(self, q, k, v):\n        residual, (B, T, C) = q, q.shape\n"
          "        keys = self.W_key(k)\n        queries = self.W_query(q)\n"
          "        values = self.W_value(v)\n"),
         ("return self.out_proj(out)", "return self.norm(self.out_proj(out) + residual)"),
         ("self.down = nn.Linear(4 * dim, dim)",
          "self.down = nn.Linear(4 * dim, dim)\n        self.norm = LayerNorm(dim)"),
         ("return self.down(F.gelu(self.up(x), approximate=\"tanh\"))",
          "y = self.down(F.gelu(self.up(x), approximate=\"tanh\"))\n        y += x\n"
          "        y = self.norm(y)\n        return y"),
         (BLOCK, "        return self.ff(self.att(x, x, x))\n"),
         ("        self.norm1 = LayerNorm(dim)\n", ""),
         ("        self.norm2 = LayerNorm(dim)\n", ""),
         ("        x = self.final_norm(x)\n", ""),
         ("        self.final_norm = LayerNorm(emb_dim)\n", "")],
        ["post_ln", "no_final_ln"],
        "q, k, v = self.norm(q), self.norm(k), self.norm(v)",
    ),
    "post-norm in a module that adds": (
        [("class Block(", "class AddNorm(nn.Module):\n    def __init__(self, dim):\n"
          "        super().__init__()\n        self.norm = LayerNorm(dim)\n\n"
          "    def forward(self, x, y):\n        return self.norm(y + x)\n\n\nclass Block("),
         ("        self.norm1 = LayerNorm(dim)\n", "        self.add1 = AddNorm(dim)\n"),
         ("        self.norm2 = LayerNorm(dim)\n", "        self.add2 = AddNorm(dim)\n"),
         (BLOCK, "        y = self.att(x)\n        x = self.add1(x, y)\n"
          "        return self.add2(x, self.ff(x))\n")],
        ["post_ln"],
        "return self.add2(x, self.ff(self.add2.norm(x)))",
    ),
    "norms in front of the residual connections": (
        [(BLOCK, "        x = self.norm1(x)\n        x = x + self.att(x)\n"
          "        x = self.norm2(x)\n        x = x + self.ff(x)\n        return x\n")],
        ["residual_from_norm"],
        "x = x + self.ff(self.norm2(x))",
    ),
    "positions in a buffer": (
        [("class GPT(", f"{WAVES}\nclass GPT("),
         (EMBEDDING, 'self.register_buffer("pe", waves(context_length, emb_dim))'),
         (LOOKUP, "self.pe[:T].detach()")],
        ["sinusoidal_pos"],
        "self.pe = nn.Parameter(waves(context_length, emb_dim))",
    ),
    "positions that a module computes": (
        [("class GPT(", f"{WAVES}\nclass GPT("), (EMBEDDING, "self.pos_emb = Waves()"),
         (SUM, "        x = self.pos_emb(self.tok_emb(ids))\n")],
        ["sinusoidal_pos"],
        EMBEDDING,
    ),
    "positions that a function computes": (
        [("class GPT(", f"{WAVES}\nclass GPT("), (f"        {EMBEDDING}\n", ""),
         (LOOKUP, "waves(T, self.tok_emb.embedding_dim, ids.device)")],
        ["sinusoidal_pos"],
        EMBEDDING,
    ),
    "positions in a model whose constructor has no number of positions": (
        [("class GPT(", f"block_size = 16\n{WAVES}\nclass GPT("), (f"        {EMBEDDING}\n", ""),
         ("vocab_size, context_length, emb_dim", "vocab_size, emb_dim"),
         ("n_heads, context_length)", "n_heads, block_size)"),
         (LOOKUP, "waves(T, self.tok_emb.embedding_dim, ids.device)")],
        ["sinusoidal_pos"],
        "self.pos_emb = nn.Embedding(block_size, emb_dim)",
    ),
    "an embedding that is added twice": (
        [("class GPT(", f"{WAVES}\nclass GPT("), (EMBEDDING, "self.pos_emb = Waves()"),
         (SUM, "        x = self.tok_emb(ids)\n        x = x + self.pos_emb(x)\n")],
        ["scaled_embedding", "sinusoidal_pos"],
        "x = x + self.pos_emb(torch.arange(x.size(1), device=x.device))",
    ),
    "a number of heads that is not an argument": (
        [("emb_dim, n_heads, n_layers)", "emb_dim, n_layers)"),
         ("Block(emb_dim, n_heads, context_length)", "Block(emb_dim, 8, context_length)")],
        ["n_head_mismatch"],
        "Block(emb_dim, 4, context_length)",
    ),
    "blocks that are written out": (
        [("emb_dim, n_heads, n_layers)", "emb_dim, n_heads)"),
         ("blocks = [Block(emb_dim, n_heads, context_length) for _ in range(n_layers)]",
          "new = lambda: Block(emb_dim, n_heads, context_length)\n"
          "        blocks = [new(), new(), new()]")],
        ["n_layer_mismatch"],
        "blocks = [new() for _ in range(2)]",
    ),
    "a weight that a function creates": (
        [("class FeedForward(", "def weight(*shape):\n"
          "    return nn.Parameter(torch.randn(*shape))\n\n\nclass FeedForward("),
         ("self.up = nn.Linear(dim, 4 * dim)", "self.w1 = weight(dim, 4 * dim)"),
         ("self.up(x)", "x @ self.w1")],
        ["no_mlp_bias"],
        "self.b1 = nn.Parameter(torch.zeros(4 * dim))",
    ),
    "an MLP that a function builds": (
        [("class FeedForward(", "def mlp(dim):\n    return nn.Sequential(nn.Linear(dim, 2 * dim), "
          "nn.GELU(approximate='tanh'), nn.Linear(2 * dim, dim))\n\n\nclass FeedForward("),
         ("self.ff = FeedForward(dim)", "self.ff = mlp(dim)")],
        ["inner_dim"],
        "nn.GELU(approximate='tanh'), nn.Linear(4 * dim, dim))",
    ),
    "a branch whose last term is a bias": (
        [("self.down = nn.Linear(4 * dim, dim)",
          "self.down = nn.Linear(4 * dim, dim, bias=False)\n"
          "        self.shift = nn.Parameter(torch.zeros(dim))"),
         (BLOCK, "        x = x + self.att(self.norm1(x))\n        y = self.norm2(x)\n"
          '        y = self.ff.down(F.gelu(self.ff.up(y), approximate="tanh")) + self.ff.shift\n'
          "        return y\n")],
        ["missing_residual"],
        "+ self.ff.shift + x",
    ),
    "scores with two factors": (
        [("queries @ keys.transpose(2, 3) / self.head_dim ** 0.5",
          "queries @ keys.transpose(2, 3) * keys.shape[-1] * C**-0.5")],
        ["wrong_scale"],
        "(queries @ keys.transpose(2, 3)) * self.head_dim**-0.5",
    ),
    "a projection that forward creates": (
        [("return self.out_proj(out)", "return nn.Linear(C, C)(out)"),
         ("        self.out_proj = nn.Linear(dim, dim)\n", "")],
        ["no_out_proj", "random_in_forward"],
        "self.out_proj = nn.Linear(dim, dim)",
    ),
    "one norm for both branches": (
        [("        self.norm2 = LayerNorm(dim)\n", ""), ("self.norm2(x)", "self.norm1(x)")],
        ["shared_parameters"],
        "x = self.norm1_2(x)",
    ),
    "one norm for both branches, and one that is not used": (
        [("self.norm2(x)", "self.norm1(x)")],
        ["shared_parameters"],
        "x = self.norm2(x)",
    ),
    "values of the layer of the queries": (
        [("values = self.W_value(x)", "values = self.W_query(x)")],
        ["shared_parameters"],
        "values = self.W_value(x)",
    ),
    "weights that are scaled instead of the scores": (
        [(" / self.head_dim ** 0.5", ""),
         ("torch.softmax(scores, dim=-1)", "torch.softmax(scores, dim=-1) / self.head_dim ** 0.5")],
        ["scaled_probs", "no_attn_scale"],
        "weights = torch.softmax(scores / (self.head_dim ** 0.5), dim=-1)",
    ),
    "torch's decoder, whose cross-attention reads the embedding": (
        [("        self.blocks = nn.ModuleList(blocks)\n",
          "        layer = nn.TransformerDecoderLayer(emb_dim, n_heads, 4 * emb_dim, "
          "batch_first=True, norm_first=True, activation=lambda x: F.gelu(x, approximate='tanh'))\n"
          "        self.blocks = nn.TransformerDecoder(layer, n_layers)\n"),
         ("        for block in self.blocks:\n            x = block(x)\n",
          "        mask = nn.Transformer.generate_square_subsequent_mask(T)\n"
          "        x = self.blocks(x, x, tgt_mask=mask)\n")],
        ["cross_attention"],
        "x = self.blocks(x, mask=mask)",
    ),
    "torch's encoder without a mask, which another method replaces": (
        [("        self.blocks = nn.ModuleList(blocks)\n",
          "        layer = nn.TransformerEncoderLayer(emb_dim, n_heads, 4 * emb_dim, "
          "batch_first=True, norm_first=True, activation=lambda x: F.gelu(x, approximate='tanh'))\n"
          "        self.blocks = nn.TransformerEncoder(layer, n_layers, None, False)\n"),
         ("        for block in self.blocks:\n            x = block(x)\n",
          "        x = self.blocks(x)\n"),
         ("        return self.head(x)\n", "        return self.head(x)\n\n    def compile(self):\n"
          "        self.blocks = torch.compile(self.blocks)\n")],
        ["no_mask"],
        "x = self.blocks(x, mask=mask)",
    ),
    "torch's attention, called with keywords and without a mask": (
        [("Attention(dim, heads, context)\n", "nn.MultiheadAttention(dim, heads, "
          "batch_first=True)\n"),
         ("self.att(x)", "self.att(query=x, key=x, value=x, need_weights=False)[0]")],
        ["no_mask"],
        "need_weights=False, attn_mask=attn_mask)[0]",
    ),
    "one block in a list that is repeated": (
        [("[Block(emb_dim, n_heads, context_length) for _ in range(n_layers)]",
          "[Block(emb_dim, n_heads, context_length)] * n_layers")],
        ["shared_parameters"],
        "blocks = [Block(emb_dim, n_heads, context_length) for _ in range(n_layers)]",
    ),
    "scores in autocast": (
        [("        scores = queries @ keys.transpose(2, 3) / self.head_dim ** 0.5\n",
          "        with torch.autocast('cpu', dtype=torch.bfloat16):\n"
          "            scores = queries @ keys.transpose(2, 3) / self.head_dim ** 0.5\n"
          "        scores = scores.float()\n")],
        ["low_precision"],
        "with torch.autocast('cpu', dtype=torch.bfloat16, enabled=False):",
    ),
    "scores that are cast": (
        [("scores = queries @ keys.transpose(2, 3)",
          "scores = (queries @ keys.transpose(2, 3)).to(torch.bfloat16).float()")],
        ["low_precision"],
        "scores = (queries @ keys.transpose(2, 3)).float()",
    ),
    "embeddings of padding that are hidden": (
        [(SUM, f"{SUM}        x = x * (ids != 0)[..., None]\n")],
        ["id_condition"],
        "x = x * torch.ones_like(ids, dtype=torch.bool)[..., None]",
    ),
    "embeddings of a type": (
        [(SUM, "        kinds = self.kinds(torch.zeros_like(ids))\n"
               + SUM.replace("+", "+ kinds +")),
         (EMBEDDING, f"{EMBEDDING}\n        self.kinds = nn.Embedding(2, emb_dim)")],
        ["random_parameters"],
        SUM,
    ),
    "torch's layer with its own inner width": (
        [("        self.blocks = nn.ModuleList(blocks)\n",
          "        layer = nn.TransformerEncoderLayer(emb_dim, n_heads, batch_first=True, "
          "norm_first=True, activation=lambda x: F.gelu(x, approximate='tanh'))\n"
          "        self.blocks = nn.TransformerEncoder(layer, n_layers, "
          "enable_nested_tensor=False)\n"),
         ("        for block in self.blocks:\n            x = block(x)\n",
          "        mask = nn.Transformer.generate_square_subsequent_mask(T)\n"
          "        x = self.blocks(x, mask)\n")],
        ["inner_dim"],
        "dim_feedforward=4 * emb_dim",
    ),
    "no final norm in a method that forward calls": (
        [("        x = self.final_norm(x)\n        return self.head(x)\n",
          "        return self.logits(x)\n\n    def logits(self, x):\n"
          "        return self.head(x)\n")],
        ["no_final_ln"],
        "        return self.head(self.final_norm(x))\n",
    ),
    "a class of activations that is passed on": (
        [("class FeedForward(nn.Module):\n    def __init__(self, dim):",
          "class FeedForward(nn.Module):\n    def __init__(self, dim, act=None):"),
         ("        self.down = nn.Linear(4 * dim, dim)\n",
          "        self.down = nn.Linear(4 * dim, dim)\n        act = act or nn.GELU\n"
          "        self.act = act()\n"),
         ('F.gelu(self.up(x), approximate="tanh")', "self.act(self.up(x))")],
        ["erf_gelu"],
        'act = act or (lambda: nn.GELU(approximate="tanh"))',
    ),
    "an attention that adds its own input": (
        [("return self.out_proj(out)", "return x + self.out_proj(out)")],
        ["doubled_residual"],
        "return self.out_proj(out)",
    ),
    "rotations in place of positions": (
        [(" + self.pos_emb(torch.arange(T, device=ids.device))", ""),
         ("        self.pos_emb = nn.Embedding(context_length, emb_dim)\n", ""),
         ("        scores = queries @", "        if self.heads:\n"
          "            queries = rope(queries)\n            keys = rope(keys)\n"
          "        scores = queries @"), ("class GPT(", ROPE)],
        ["no_pos", "rope"],
        "transpose(1, 2)\n        scores = queries @",
    ),
    "an embedding that is built with keywords": (
        [(" + self.pos_emb(torch.arange(T, device=ids.device))", ""),
         ("        self.pos_emb = nn.Embedding(context_length, emb_dim)\n", ""),
         ("nn.Embedding(vocab_size, emb_dim)",
          "nn.Embedding(num_embeddings=vocab_size, embedding_dim=emb_dim)")],
        ["no_pos"],
        "self.pos_emb = nn.Embedding(context_length, emb_dim)",
    ),
    "an embedding in a module of its own": (
        [(" + self.pos_emb(torch.arange(T, device=ids.device))", ""),
         ("        self.pos_emb = nn.Embedding(context_length, emb_dim)\n", ""),
         ("nn.Embedding(vocab_size, emb_dim)", "TokenEmbedding(vocab_size, emb_dim)"),
         ("class GPT(", "class TokenEmbedding(nn.Module):\n"
          "    def __init__(self, tokens, width):\n        super().__init__()\n"
          "        self.table = nn.Embedding(tokens, width)\n\n"
          "    def forward(self, ids):\n        return self.table(ids)\n\n\nclass GPT(")],
        ["no_pos"],
        "x = self.tok_emb(ids) + self.pos_emb(torch.arange(",
    ),
    "rotations of both in one line": (
        [(" + self.pos_emb(torch.arange(T, device=ids.device))", ""),
         ("        self.pos_emb = nn.Embedding(context_length, emb_dim)\n", ""),
         ("        scores = queries @", "        q, k = rope(queries), rope(keys)\n"
          "        scores = q @"), ("@ keys.tr", "@ k.tr"), ("class GPT(", ROPE)],
        ["no_pos", "rope"],
        "        q, k = queries, keys\n",
    ),
    "a gated MLP": (
        [("        self.down", "        self.gate = nn.Linear(dim, 4 * dim)\n        self.down"),
         ('F.gelu(self.up(x), approximate="tanh")', "F.silu(self.gate(x)) * self.up(x)")],
        ["gated_mlp", "silu"],
        "        self.gate = nn.Linear(dim, 4 * dim)\n        self.down = nn.Linear(4 * dim, dim)\n"
        "\n    def forward(self, x):\n"
        '        return self.down(F.gelu(self.gate(x), approximate="tanh"))',
    ),
    "a gated MLP without biases, step by step": (
        [("        self.down = nn.Linear(4 * dim, dim)",
          "        self.gate = nn.Linear(dim, 4 * dim, bias=False)\n"
          "        self.down = nn.Linear(4 * dim, dim, bias=False)"),
         ("self.up = nn.Linear(dim, 4 * dim)", "self.up = nn.Linear(dim, 4 * dim, bias=False)"),
         ('        return self.down(F.gelu(self.up(x), approximate="tanh"))',
          "        gate = F.silu(self.gate(x))\n        up = self.up(x)\n"
          "        return self.down(gate * up)")],
        ["no_mlp_bias", "gated_mlp", "silu", "no_mlp_bias"],
        "        return self.down(gate)\n",
    ),
    "a gated MLP whose bias is added to the other projection first": (
        [("        self.down = nn.Linear(4 * dim, dim)",
          "        self.gate = nn.Linear(dim, 4 * dim, bias=False)\n"
          "        self.down = nn.Linear(4 * dim, dim, bias=False)"),
         ("self.up = nn.Linear(dim, 4 * dim)", "self.up = nn.Linear(dim, 4 * dim, bias=False)"),
         ('        return self.down(F.gelu(self.up(x), approximate="tanh"))',
          "        up = self.up(x)\n        gate = F.silu(self.gate(x))\n"
          "        hidden = up * gate\n        return self.down(hidden)")],
        ["no_mlp_bias", "gated_mlp", "no_mlp_bias", "silu", "no_mlp_bias"],
        "self.gate = nn.Linear(dim, 4 * dim)\n        self.down = nn.Linear(4 * dim, dim)\n",
    ),
    "a gated MLP that multiplies in place": (
        [("        self.down", "        self.gate = nn.Linear(dim, 4 * dim)\n        self.down"),
         ('        return self.down(F.gelu(self.up(x), approximate="tanh"))',
          "        hidden = F.silu(self.up(x))\n        gate = self.gate(x)\n"
          "        hidden.mul_(gate)\n        return self.down(hidden)")],
        ["gated_mlp", "silu"],
        "        self.up = nn.Linear(dim, 4 * dim)\n        self.down = nn.Linear(4 * dim, dim)\n"
        '\n    def forward(self, x):\n        hidden = F.gelu(self.up(x), approximate="tanh")\n'
        "        return self.down(hidden)\n",
    ),
    "a gated MLP of one wide projection": (
        [("self.up = nn.Linear(dim, 4 * dim)", "self.up = nn.Linear(dim, 4 * dim * 2)"),
         ('        return self.down(F.gelu(self.up(x), approximate="tanh"))',
          "        both = self.up(x)\n        x, gate = both.chunk(2, dim=-1)\n"
          "        return self.down(x * F.silu(gate))")],
        ["gated_mlp", "silu"],
        "self.up = nn.Linear(dim, 4 * dim)\n        self.down = nn.Linear(4 * dim, dim)\n\n"
        "    def forward(self, x):\n        both = self.up(x)\n        gate = both\n",
    ),
    "a gated MLP whose projection is split where it is called": (
        [("self.up = nn.Linear(dim, 4 * dim)",
          "hidden = 8 * dim\n        self.up = nn.Linear(dim, hidden)"),
         ('        return self.down(F.gelu(self.up(x), approximate="tanh"))',
          "        x, gate = torch.chunk(self.up(x), 2, dim=-1)\n"
          "        x = F.silu(x) * gate\n        return self.down(x)")],
        ["gated_mlp", "silu"],
        "self.up = nn.Linear(dim, hidden // 2)",
    ),
    "assignments with annotations": (
        [("class GPT(", f"{WAVES}\nclass GPT("),
         (EMBEDDING, "self.pe: torch.Tensor = waves(context_length, emb_dim)"),
         (LOOKUP, "self.pe[:T]"),
         ("        shortcut = x\n        x = self.norm1(x)\n        x = self.att(x)\n"
          "        x = x + shortcut\n",
          "        shortcut: torch.Tensor = x\n        x: torch.Tensor = self.att(x)\n"
          "        x = self.norm1(x + shortcut)\n")],
        ["sinusoidal_pos", "post_ln"],
        "self.pe: torch.Tensor = nn.Parameter(waves(context_length, emb_dim))",
    ),
    "ids that are hidden": (
        [("self.tok_emb(ids) +", "self.tok_emb(ids) * (ids != 0)[..., None] +")],
        ["id_condition"],
        "self.tok_emb(ids) * torch.ones_like(ids, dtype=torch.bool)[..., None] +",
    ),
    "padding that is hidden in two functions": (
        [("        x = self.tok_emb(ids) +", "        x = self.shown(ids) * self.tok_emb(ids) +"),
         ("    def forward(self, ids):", "    pad = 3\n\n    def shown(self, ids):\n"
          "        return ids.ne(self.pad)[..., None]\n\n    def forward(self, ids):"),
         ("        return self.head(x)",
          "        x = x.masked_fill(torch.eq(ids, self.pad)[..., None], 0)\n"
          "        return self.head(x)")],
        ["id_condition"],
        "x = x.masked_fill(torch.zeros_like(ids, dtype=torch.bool)[..., None], 0)",
    ),
    "hidden states that are averaged": (
        [("        return self.head(x)",
          "        x = torch.mean(x, dim=1)\n        return self.head(x)")],
        ["pooled_positions"],
        "        x = self.final_norm(x)\n        return self.head(x)",
    ),
    "the largest of the hidden states": (
        [("        return self.head(x)", "        return self.head(x.max(dim=1).values)")],
        ["pooled_positions"],
        "        return self.head(x)",
    ),
    "a projection by an einsum of einops": (
        [("class Attention(", EINOPS), ("self.W_query = nn.Linear(", "self.W_query = Linear("),
         ("self.W_key = nn.Linear(", "self.W_key = Linear("),
         ("self.W_value = nn.Linear(", "self.W_value = Linear(")],
        ["no_qkv_bias"],
        "self.bias = nn.Parameter(torch.zeros(d_out))\n\n    def forward(self, x):\n"
        '        return einsum(x, self.weight, "... i, o i -> ... o") + self.bias\n',
    ),
    "a projection by an einsum of einops with a transposed weight": (
        [("class FeedForward(", TRANSPOSED), ("self.up = nn.Linear(", "self.up = Linear("),
         ("self.down = nn.Linear(", "self.down = Linear(")],
        ["no_mlp_bias"],
        "self.bias = nn.Parameter(torch.zeros(d_out))\n\n    def forward(self, x):\n"
        '        return einsum(self.weight.T, x, "i o, ... i -> ... o") + self.bias\n',
    ),
    "an RMSNorm whose weight is drawn at random": (
        [("torch.ones(dim)", "torch.randn(dim)"),
         ("        self.shift = nn.Parameter(torch.zeros(dim))\n", ""),
         ("        mean = x.mean(-1, keepdim=True)\n"
          "        var = x.var(-1, keepdim=True, unbiased=False)\n"
          "        return self.scale * (x - mean) / torch.sqrt(var + 1e-5) + self.shift\n",
          "        rms = torch.linalg.vector_norm(x, dim=-1).pow(2) / x.shape[-1] + 1e-5\n"
          "        return torch.einsum('c,btc->btc', self.scale, x / rms.sqrt()[..., None])\n")],
        ["rmsnorm"],
        "self.norm1 = nn.LayerNorm(dim)",
    ),
    "a norm that adds its bias before it multiplies by its weight": (
        [("self.scale * (x - mean) / torch.sqrt(var + 1e-5) + self.shift",
          "((x - mean) / torch.sqrt(var + 1e-5) + self.shift) * self.scale")],
        ["bias_before_scale"],
        "return ((x - mean) / torch.sqrt(var + 1e-5)) * self.scale + self.shift",
    ),
    "a letter that is not the number of layers": (
        [("class GPT(", "n = int(0.9 * 1000)\n\n\nclass GPT("),
         ("emb_dim, n_heads, n_layers)", "emb_dim, n_heads)"),
         (BLOCKS.partition("\n")[0].strip(), f"blocks = [{', '.join(3 * [ONE_BLOCK])}]")],
        ["n_layer_mismatch"],
        f"blocks = [{ONE_BLOCK} for _ in range(2)]",
    ),
    "an option that names another MLP": (
        gated('kind == "SwiGLU"', 'kind="SwiGLU"'), ["gated_mlp"], 'context, kind="gelu"',
    ),
    "a flag of another MLP": (
        gated("gate_it", "gate_it=True"), ["gated_mlp"], "context, gate_it=False",
    ),
    "hidden states that the model returns": (
        [("        self.head = nn.Linear(emb_dim, vocab_size, bias=False)\n", ""),
         ("return self.head(x)", "return x, None")],
        ["no_head"],
        "return x @ self.tok_emb.weight.T, None",
    ),
    "hidden states in a dictionary": (
        [("        self.head = nn.Linear(emb_dim, vocab_size, bias=False)\n", ""),
         ("return self.head(x)", 'return {\n            "hidden": x,\n        }')],
        ["no_head"],
        '            "logits": x @ self.tok_emb.weight.T,\n            "hidden": x,\n',
    ),
    "half of every branch": (
        [("x = self.att(x)", "x = 0.5 * self.att(x)"), ("x = self.ff(x)", "x = self.ff(x) / 2")],
        ["residual_weights"],
        "        x = self.att(x)\n        x = x + shortcut\n",
    ),
    "the mean of all blocks": (
        [("        for block in self.blocks:\n            x = block(x)\n",
          "        every = []\n        for block in self.blocks:\n            x = block(x)\n"
          "            every.append(x)\n        x = torch.stack(every).mean(0)\n")],
        ["extra_operation"],
        "            every.append(x)\n        x = self.final_norm(x)\n",
    ),
    "a convolution before q, k and v": (
        [("        self.norm1 = LayerNorm(dim)\n",
          "        self.norm1 = LayerNorm(dim)\n        self.conv = Conv(dim)\n"),
         ("x = self.att(x)", "x = self.att(self.conv(x))"),
         ("class Block(nn.Module):",
          "class Conv(nn.Conv1d):\n    def __init__(self, dim):\n"
          "        super().__init__(dim, dim, 3, groups=dim)\n\n    def forward(self, x):\n"
          "        x = F.pad(x.transpose(1, 2), (2, 0))\n"
          "        return super().forward(x).transpose(1, 2)\n\n\nclass Block(nn.Module):")],
        ["extra_operation"],
        "        x = self.att(x)\n",
    ),
    "attention from head to head": (
        [(SPLIT, SPLIT.replace(".transpose(1, 2)", "")),
         (ATTEND, f"        out = {FUSED}.reshape(B, T, C)\n")],
        ["no_head_split_transpose"],
        "queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True)",
    ),
    "values without a norm": (
        [("def forward(self, x):\n        B", "def forward(self, x, other):\n        B"),
         ("values = self.W_value(x)", "values = self.W_value(other)"),
         ("self.att(x)", "self.att(x, shortcut)")],
        ["missing_ln"],
        "values = self.W_value(x)",
    ),
    "a function that drops branches": (
        [("class Block(nn.Module):",
          "def drop_path(x, p):\n    kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - p)\n"
          "    return x * kept / (1 - p)\n\n\nclass Block(nn.Module):"),
         ("x = self.att(x)", "x = drop_path(self.att(x), 0.1)")],
        ["dropout_always_on"],
        "x = (drop_path(self.att(x), 0.1) if self.training else self.att(x))",
    ),
    "one residual around both branches": (
        [(BLOCK, "        return x + self.ff(self.norm2(self.att(self.norm1(x))))\n")],
        ["missing_residual"],
        "        x = x + self.att(self.norm1(x))\n        return x + self.ff(self.norm2(x))\n",
    ),
    "a mask that multiplies the scores": (
        [('scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))',
          "scores * (1 - self.mask[:T, :T])")],
        ["mask_value"],
        "scores.masked_fill((1 - self.mask[:T, :T]) == 0, ",
    ),
    "norms of q and k with a short name": (
        [("        self.drop = ",
          "        self.q_ln = nn.LayerNorm(dim // heads, elementwise_affine=False)\n"
          "        self.drop = "),
         ("        scores = queries",
          "        queries, keys = self.q_ln(queries), self.q_ln(keys)\n        scores = queries")],
        ["qk_norm"],
        "transpose(1, 2)\n        scores = queries",
    ),
    "an activation that is a class attribute": (
        [("class FeedForward(nn.Module):\n", "class FeedForward(nn.Module):\n    act = F.gelu\n\n"),
         ('F.gelu(self.up(x), approximate="tanh")', "self.act(self.up(x))")],
        ["erf_gelu"],
        'act = staticmethod(lambda x: F.gelu(x, approximate="tanh"))',
    ),
    "parallel branches that share a norm": (
        [(BLOCK, "        h = self.norm1(x)\n        return x + self.att(h) + self.ff(h)\n"),
         ("        self.norm2 = LayerNorm(dim)\n", "")],
        ["parallel_block", "shared_parameters"],
        "        x = x + self.att(h)\n        return x + self.ff(self.norm1_2(x))\n",
    ),
    "parallel branches in statements of their own that share a norm": (
        [(BLOCK, "        h = self.norm1(x)\n        a = self.att(h)\n        m = self.ff(h)\n"
          "        x += a + m\n        return x\n"),
         ("        self.norm2 = LayerNorm(dim)\n", "")],
        ["parallel_block", "shared_parameters"],
        "        x += a\n        x += self.ff(self.norm1_2(x))\n",
    ),
    "two sums of branches that share a norm": (
        [(BLOCK, "        h = self.norm1(x)\n        x = x + self.att(h)\n"
          "        x = x + self.ff(h)\n        return x\n")],
        ["parallel_block", "shared_parameters"],
        "        x = x + self.ff(self.norm2(x))\n",
    ),
    "blocks with a name each": (
        [*BLOCKS_BY_NAME,
         (LOOP, "        x = self.block1(x)\n        x = self.block2(x)\n"
          "        x = self.block3(x)\n")],
        ["n_layer_mismatch"],
        "        for block in self.blocks:\n            x = block(x)\n        x = self.final",
    ),
    "blocks with a name each, in one expression": (
        [*BLOCKS_BY_NAME,
         (f"{LOOP}        x = self.final_norm(x)\n",
          "        x = self.final_norm(self.block3(self.block2(self.block1(x))))\n")],
        ["n_layer_mismatch"],
        "        for block in self.blocks:\n            x = block(x)\n        x = self.final",
    ),
    "a single layer in the model's own code": (
        [(BLOCKS, "        self.norm1 = LayerNorm(emb_dim)\n"
          "        self.att = Attention(emb_dim, n_heads, context_length)\n"
          "        self.norm2 = LayerNorm(emb_dim)\n        self.ff = FeedForward(emb_dim)\n"),
         (LOOP, "        x = x + self.att(self.norm1(x))\n"
          "        x = x + self.ff(self.norm2(x))\n"),
         ("emb_dim, n_heads, n_layers)", "emb_dim, n_heads)")],
        ["n_layer_mismatch"],
        "        for i in range(len(self.att)):\n"
        "            x = x + self.att[i](self.norm1[i](x))\n"
        "            x = x + self.ff[i](self.norm2[i](x))\n        x = self.final_norm(x)\n",
    ),
    "blocks that are written out before a norm": (
        [(BLOCKS, "        self.blocks = nn.Sequential("
          f"{', '.join(['Block(emb_dim, n_heads, context_length)'] * 3)}, LayerNorm(emb_dim))\n"),
         ("        self.final_norm = LayerNorm(emb_dim)\n", ""),
         (f"{LOOP}        x = self.final_norm(x)\n", "        x = self.blocks(x)\n"),
         ("emb_dim, n_heads, n_layers)", "emb_dim, n_heads)")],
        ["n_layer_mismatch"],
        "(*[Block(emb_dim, n_heads, context_length) for _ in range(2)], LayerNorm(emb_dim))",
    ),
    "a sum inside the next branch": (
        [(BLOCK, "        return x + self.ff(self.norm2(x + self.att(self.norm1(x))))\n")],
        ["missing_residual"],
        "        x = x + self.att(self.norm1(x))\n        return x + self.ff(self.norm2(x))\n",
    ),
    "an MLP that is as wide as the model": (
        [("4 * dim", "dim")],
        ["inner_dim"],
        "        self.up = nn.Linear(dim, 4 * dim)\n        self.down = nn.Linear(4 * dim, dim)\n",
    ),
    "an MLP that is narrower than the model, in a Sequential": (
        [("        self.up = nn.Linear(dim, 4 * dim)\n"
          "        self.down = nn.Linear(4 * dim, dim)\n",
          "        self.net = nn.Sequential(\n            nn.Linear(dim, dim // 4),\n"
          "            nn.GELU(approximate='tanh'),\n            nn.Linear(dim // 4, dim),\n"
          "        )\n"),
         ('self.down(F.gelu(self.up(x), approximate="tanh"))', "self.net(x)")],
        ["inner_dim"],
        "            nn.Linear(4 * dim, dim),\n",
    ),
    "a sigmoid, and a mask that multiplies it": (
        [('        scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))\n', ""),
         ("torch.softmax(scores, dim=-1)", "torch.sigmoid(scores) * (1 - self.mask[:T, :T])")],
        ["other_softmax"],
        "torch.softmax(scores.masked_fill((1 - self.mask[:T, :T]) == 0, ",
    ),
    "neither a mask nor a softmax": (
        [('        scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))\n'
          "        weights = torch.softmax(scores, dim=-1)\n        weights = self.drop(weights)\n",
          "        weights = self.drop(scores)\n")],
        ["other_softmax", "no_mask"],
        "        scores = torch.softmax(scores, dim=-1)\n        weights = self.drop(scores)\n",
    ),
    "heads that are as wide as the model": (
        [("self.heads, self.head_dim = heads, dim // heads",
          "self.heads, self.head_dim = heads, dim"),
         ("self.W_query = nn.Linear(dim, dim)", "self.W_query = nn.Linear(dim, dim * heads)"),
         ("self.W_key = nn.Linear(dim, dim)", "self.W_key = nn.Linear(dim, dim * heads)"),
         ("self.W_value = nn.Linear(dim, dim)", "self.W_value = nn.Linear(dim, dim * heads)"),
         ("self.out_proj = nn.Linear(dim, dim)", "self.out_proj = nn.Linear(dim * heads, dim)"),
         ("view(B, T, C)", "view(B, T, -1)")],
        ["head_width"],
        "        self.heads, self.head_dim = heads, dim // heads\n"
        "        self.W_query = nn.Linear(dim, dim)\n",
    ),
    "a list of heads that are as wide as the model": (
        [*((f"self.W_{name} = nn.Linear(dim, dim)",
            f"self.W_{name} = nn.ModuleList([nn.Linear(dim, dim) for _ in range(heads)])")
           for name in ("query", "key", "value")),
         ("self.out_proj = nn.Linear(dim, dim)", "self.out_proj = nn.Linear(heads * dim, dim)"),
         (f"        keys = self.W_key(x)\n        queries = self.W_query(x)\n"
          f"        values = self.W_value(x)\n{SPLIT}{ATTEND}",
          "        out = []\n        for i in range(self.heads):\n"
          "            q, k, v = self.W_query[i](x), self.W_key[i](x), self.W_value[i](x)\n"
          "            scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))\n"
          "            scores = scores.masked_fill(self.mask[:T, :T].bool(), float('-inf'))\n"
          "            out.append(torch.softmax(scores, dim=-1) @ v)\n"
          "        out = torch.cat(out, dim=-1)\n")],
        ["head_width"],
        "nn.ModuleList([nn.Linear(dim, dim // heads) for _ in range(heads)])",
    ),
    "a class that gets the width of the model as that of a head": (
        [("    def __init__(self, dim, heads, context):\n        super().__init__()\n"
          "        self.heads, self.head_dim = heads, dim // heads\n",
          "    def __init__(self, dim, heads, context, head_size):\n        super().__init__()\n"
          "        self.heads, self.head_dim = heads, head_size\n"),
         *((f"self.W_{name} = nn.Linear(dim, dim)",
            f"self.W_{name} = nn.Linear(dim, heads * head_size)")
           for name in ("query", "key", "value")),
         ("out_proj = nn.Linear(dim, dim)", "out_proj = nn.Linear(heads * head_size, dim)"),
         ("view(B, T, C)", "view(B, T, -1)"),
         ("Attention(dim, heads, context)", "Attention(dim, heads, context, dim)")],
        ["head_width"],
        "Attention(dim, heads, context, dim // heads)",
    ),
    "a norm that adds its weight in place of its bias": (
        [("torch.sqrt(var + 1e-5) + self.shift", "torch.sqrt(var + 1e-5) + self.scale")],
        ["no_ln_bias", "other_norm"],
        "torch.sqrt(var + 1e-5) + self.shift",
    ),
    "an attention in the place of the MLP": (
        [("x = self.ff(x)", "x = self.att(x)")],
        ["no_mlp", "shared_parameters"],
        "x = self.ff(x)",
    ),
    "padding that a method finds": (
        [(SUM, f"{SUM}        x = x.masked_fill(ids.eq(0)[..., None], 0.0)\n")],
        ["id_condition"],
        "x = x.masked_fill(torch.zeros_like(ids, dtype=torch.bool)[..., None], 0.0)",
    ),
    "noise that is added": (
        [(SUM, f"{SUM}        x = x + 0.1 * torch.randn_like(x)\n")],
        ["random_in_forward"],
        f"{SUM}        for block in self.blocks:\n",
    ),
    "uniform noise that multiplies": (
        [(SUM, f"{SUM}        x = x * (1 + 0.1 * torch.rand(x.shape))\n")],
        ["random_in_forward"],
        "x = x * (1)\n",
    ),
    "an MLP that is computed before the sum with attention": (
        [(BLOCK, f"{BOTH_NORMS}        a, _ = self.att(first), None\n        m = self.ff(second)\n"
          "        y = x + a\n        out = y + m\n        return out\n"),
         ("second = self.norm2(x)\n", "second = self.norm2(x)  # of the MLP\n")],
        ["parallel_block"],
        "        y = x + a\n        second = self.norm2(y)  # of the MLP\n"
        "        m = self.ff(second)\n        out = y + m\n",
    ),
    "both branches of a block in one sum": (
        [(BLOCK, f"        residual = x\n{BOTH_NORMS}        a = self.att(first)\n"
          "        m = self.ff(second)\n        return residual + a + m\n")],
        ["parallel_block"],
        "        residual = residual + a\n        second = self.norm2(residual)\n"
        "        m = self.ff(second)\n        return residual + m\n",
    ),
    "branches that are added in place, with one name for both": (
        [(BLOCK, "        h = self.norm2(x)\n        m = self.ff(h)\n        h = self.norm1(x)\n"
          "        h = self.att(h)\n        x += h\n        x += m\n        return x\n")],
        ["parallel_block"],
        "        x += h\n        h = self.norm2(x)\n        m = self.ff(h)\n        x += m\n",
    ),
    "an activation in the line after the second projection": (
        [(f"        return {MLP}\n", "        x = self.up(x)\n        x = self.down(x)\n"
          '        x = F.gelu(x, approximate="tanh")  # the activation\n        return x\n')],
        ["other_activation"],
        '        x = F.gelu(x, approximate="tanh")  # the activation\n        x = self.down(x)\n',
    ),
    "an activation around the second projection": (
        [(MLP, 'F.gelu(self.down(self.up(x)), approximate="tanh")')],
        ["other_activation"],
        f"return {MLP}\n",
    ),
    "another activation after the second projection": (
        [("self.up = nn", "self.act = nn.GELU()\n        self.up = nn"),
         (f"        return {MLP}\n", "        h = self.down(self.up(x))\n"
          "        return self.act(h)\n")],
        ["other_activation"],
        "        self.up = nn.Linear(dim, 4 * dim)\n        self.down = nn.Linear(4 * dim, dim)\n\n"
        "    def forward(self, x):\n"
        '        h = self.down(F.gelu(self.up(x), approximate="tanh"))\n        return h\n',
    ),
    "an activation after a product with a parameter": (
        [("self.down = nn.Linear(4 * dim, dim)",
          "self.w = nn.Parameter(torch.randn(4 * dim, dim))\n"
          "        self.b = nn.Parameter(torch.zeros(dim))"),
         (MLP, 'F.gelu(self.up(x) @ self.w + self.b, approximate="tanh")')],
        ["other_activation"],
        'return F.gelu(self.up(x), approximate="tanh") @ self.w + self.b\n',
    ),
    "a formula of the activation after the second projection": (
        [(f"        return {MLP}\n", "        h = self.up(x)\n        h = self.down(h)\n"
          "        return 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))\n")],
        ["other_activation"],
        '        h = self.down(F.gelu(h, approximate="tanh"))\n        return h\n',
    ),
    "an activation after the second projection in a Sequential": (
        [("        self.up = nn.Linear(dim, 4 * dim)\n"
          "        self.down = nn.Linear(4 * dim, dim)\n",
          "        self.net = nn.Sequential(\n            nn.Linear(dim, 4 * dim),\n"
          "            nn.Linear(4 * dim, dim),\n            nn.Dropout(0.1),\n"
          '            nn.GELU(approximate="tanh"),\n        )\n'), (MLP, "self.net(x)")],
        ["other_activation"],
        '            nn.Linear(dim, 4 * dim),\n            nn.GELU(approximate="tanh"),\n'
        "            nn.Linear(4 * dim, dim),\n            nn.Dropout(0.1),\n        )\n",
    ),
    "an activation of the MLP in the block": (
        [(MLP, "self.down(self.up(x))"), ("self.ff(x)", "F.silu(self.ff(x))")],
        ["other_activation"],
        f"return {MLP}\n",
    ),
    "an activation in the block of an MLP that is a Sequential": (
        [("self.ff = FeedForward(dim)",
          "self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim))"),
         ("self.ff(x)", "F.relu(self.ff(x))")],
        ["other_activation"],
        "nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate=\"tanh\"), nn.Linear(",
    ),
    "activations after both projections": (
        [("self.up = nn", "self.act = nn.ReLU()\n        self.up = nn"),
         (MLP, "self.act(self.down(self.act(self.up(x))))")],
        ["relu", "other_activation"],
        "return self.down(self.act(self.up(x)))\n",
    ),
    "activations after both projections in a Sequential": (
        [("self.ff = FeedForward(dim)",
          "self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU('tanh'), "
          "nn.Linear(4 * dim, dim), nn.ReLU())")],
        ["other_activation"],
        "nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU('tanh'), nn.Linear(4 * dim, dim))",
    ),
    "a tensor that is changed in a method whose call is on another line": (
        [(BLOCK, PARTS.format("        x = x.tanh()\n        return x + self.ff(self.norm2(x))")),
         (MLP, "self.down(F.relu(self.up(x)))"),
         ("nn.Linear(dim, 4 * dim)", "nn.Linear(dim, 4 * dim, bias=False)")],
        ["extra_operation", "no_mlp_bias", "relu"],
        "    def think(self, x):\n        return x + self.ff(self.norm2(x))\n",
    ),
    "positions in a step that is too large": (
        [(LOOKUP, "self.pos_emb(torch.arange(0, T, 64, device=ids.device))")],
        ["position_ids"],
        "self.pos_emb(torch.arange(0, T, device=ids.device))",
    ),
    "positions in a named step": (
        [("    def forward(self, ids):\n        B, T = ids.shape\n",
          "    def forward(self, ids):\n        B, T = ids.shape\n"
          "        positions = torch.arange(start=0, end=T, step=64)\n"),
         (LOOKUP, "self.pos_emb(positions)")],
        ["position_ids"],
        "positions = torch.arange(start=0, end=T)\n",
    ),
    "positions that are doubled by their step": (
        [("nn.Embedding(context_length, emb_dim)", "nn.Embedding(2 * context_length, emb_dim)"),
         (LOOKUP, "self.pos_emb(torch.arange(0, T * 2, 2))")],
        ["position_ids"],
        "self.pos_emb(torch.arange(0, T))",
    ),
    "positions that a function adds to the result of a call": (
        [*WAVES_ADDED, (SUM, "        x = self.waves(self.tok_emb(ids))\n")],
        ["sinusoidal_pos"],
        "self.tok_emb(ids) + self.pos_emb(torch.arange(ids.size(1), device=ids.device))\n",
    ),
    "positions that a function adds to a variable": (
        [*WAVES_ADDED, (SUM, "        x = self.tok_emb(ids)\n        x = self.waves(x)\n")],
        ["sinusoidal_pos"],
        "x = x + self.pos_emb(torch.arange(x.size(1), device=x.device))\n",
    ),
    "a width in the constructor": (
        [("context_length, emb_dim, n_heads, n_layers):\n        super().__init__()\n",
          "context_length, n_heads, n_layers):\n        super().__init__()\n"
          "        emb_dim = 96\n")],
        ["n_embd_mismatch"],
        "        emb_dim = 48\n",
    ),
    "blocks that all read the embeddings": (
        [("            x = block(x)\n", "            y = block(x)\n"),
         ("self.final_norm(x)", "self.final_norm(y)")],
        ["n_layer_mismatch"],
        "            x = block(x)\n        x = self.final_norm(x)\n",
    ),
    "the final norm at the end of the loop": (
        [("        x = self.final_norm(x)\n", "            x = self.final_norm(x)\n")],
        ["extra_ln"],
        "            x = block(x)\n        x = self.final_norm(x)\n",
    ),
    "torch's layers in a Sequential without a mask": (
        [("        self.blocks = nn.ModuleList(blocks)\n",
          "        self.blocks = nn.Sequential(*[nn.TransformerEncoderLayer(emb_dim, n_heads, "
          "4 * emb_dim, batch_first=True, norm_first=True, activation=lambda x: F.gelu(x, "
          "approximate='tanh')) for _ in range(n_layers)])\n"),
         ("        for block in self.blocks:\n            x = block(x)\n",
          "        y = self.blocks(x)  # (B, T, C)\n"),
         ("self.final_norm(x)", "self.final_norm(y)")],
        ["no_mask"],
        "        y = x\n        for layer in self.blocks:\n"
        "            y = layer(y, src_mask=src_mask)  # (B, T, C)\n",
    ),
    "a width of the base class in the scale": (
        [("class Attention(nn.Module):\n    def __init__(self, dim, heads, context):\n"
          "        super().__init__()\n",
          "class Wide(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
          "        self.width = dim\n\n\nclass Attention(Wide):\n"
          "    def __init__(self, dim, heads, context):\n        super().__init__(dim)\n"),
         ("/ self.head_dim ** 0.5", "/ self.width ** 0.5")],
        ["scale_by_d_model"],
        "/ self.head_dim ** 0.5",
    ),
    "positions that count the sequences": (
        [("        B, T = ids.shape\n        x = self.tok", "        n = len(ids)\n"
          "        x = self.tok"),
         ("torch.arange(T, device=ids.device)", "torch.arange(n)")],
        ["position_ids"],
        "n = ids.shape[-1]",
    ),
    "a softmax module that is called at once": (
        [("return self.head(x)", "return nn.Softmax(dim=-1)(self.head(x))")],
        ["softmax_output"],
        "return self.head(x)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_deviation_in_another_form_is_repaired(
    small: Checkpoint, tmp_path: Path, form: str
) -> None:
    edits, codes, line = FORMS[form]
    text = BOOK
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "gpt.py"
    path.write_text(text)
    found = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False).run()
    assert found is not None and found.fixed == codes
    assert line in found.texts[str(path)]


def test_an_activation_without_a_name_in_torch_is_moved_unchanged(tmp_path: Path) -> None:
    text = BOOK
    for old, new in (
        ("class FeedForward(", "def quick(x):\n    return x * torch.sigmoid(1.702 * x)\n\n\n"
         "class FeedForward("),
        (MLP, "quick(self.down(self.up(x)))"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "gpt.py"
    path.write_text(text)
    config = GPT2Config(activation_function="quick_gelu")
    checkpoint = small_checkpoint(config, tmp_path)
    found = Search(Target(f"{path}:GPT"), checkpoint, config, unsafe=False).run()
    assert found is not None and found.fixed == ["other_activation"]
    assert "return self.down(quick(self.up(x)))\n" in found.texts[str(path)]


def test_stacked_parameters_are_completed(small: Checkpoint, tmp_path: Path) -> None:
    """A new bias has an axis for the layers, and a final norm is built without one to copy."""
    text = (ZOO / MODELS["stacked"].file).read_text()
    for old, new in (
        ("        self.qkv_bias = nn.Parameter(torch.zeros(layers, 3 * width))\n", ""),
        ("        self.norm_scale = nn.Parameter(torch.ones(width))\n", ""),
        ("        self.norm_shift = nn.Parameter(torch.zeros(width))\n", ""),
        ("x @ self.qkv_weight[i] + self.qkv_bias[i]", "x @ self.qkv_weight[i]"),
        ("self.norm(x, self.norm_scale, self.norm_shift)", "x"),
    ):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "gpt.py"
    path.write_text(text)
    found = searched(path, "stacked", small)
    assert found.fixed == ["no_qkv_bias", "no_final_ln"]
    repaired = found.texts[str(path)]
    assert "self.qkv_bias = nn.Parameter(torch.zeros(layers, 3 * width))\n" in repaired
    assert "x @ self.qkv_weight[i] + self.qkv_bias[i]\n" in repaired
    assert "self.ln_f = nn.LayerNorm(width)\n" in repaired


def test_files_that_the_model_imports_are_edited_together(
    small: Checkpoint, tmp_path: Path
) -> None:
    attention, rest = BOOK.split("class FeedForward(")
    attention = attention.replace("nn.Linear(dim, dim)", "nn.Linear(dim, dim, bias=flags.bias)")
    head = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
    (tmp_path / "flags.py").write_text("bias = False\n")
    (tmp_path / "parts.py").write_text(f"import flags\n{attention}")
    path = tmp_path / "gpt.py"
    path.write_text(f"{head}from parts import *\n\n\nclass FeedForward({rest}")
    found = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False).run()
    assert found is not None and found.texts == {str(tmp_path / "flags.py"): "bias = True\n"}


def test_an_edit_uses_only_what_its_own_file_imports(small: Checkpoint, tmp_path: Path) -> None:
    attention, rest = BOOK.split("class FeedForward(")
    old = "/ self.head_dim ** 0.5"
    assert old in attention
    attention = attention.replace(old, "/ keys.shape[-1] ** 0/5").replace("import math\n", "")
    (tmp_path / "parts.py").write_text(attention)
    path = tmp_path / "gpt.py"
    head = "import math\nimport torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
    path.write_text(f"{head}from parts import *\n\n\nclass FeedForward({rest}")
    found = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False).run()
    assert found is not None and found.fixed == ["wrong_scale"]
    assert "math" not in found.texts[str(tmp_path / "parts.py")]


def test_a_rotation_is_removed_in_the_branch_that_is_not_run_too(
    small: Checkpoint, tmp_path: Path
) -> None:
    rotate = """def rotate(x):
    T, D = x.shape[-2:]
    angles = torch.arange(T)[:, None] * 100 ** -(torch.arange(0, D, 2) / D)
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class Attention("""
    branches = """        if T > 999:
            keys = keys.float()
            queries, keys = rotate(queries), rotate(keys)
        else:
            queries = rotate(queries)
            keys = rotate(keys)
        scores = queries"""
    text = BOOK.replace("class Attention(", rotate).replace("        scores = queries", branches)
    path = tmp_path / "gpt.py"
    path.write_text(text)
    found = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False).run()
    assert found is not None and found.fixed == ["rope"]
    assert "rotate(queries)" in text and "rotate(queries)" not in found.texts[str(path)]
    assert "        else:\n            pass\n        scores" in found.texts[str(path)]


def test_classes_of_one_name_that_inherit_from_another_in_a_circle_end() -> None:
    """Two files may define a class of one name."""
    texts = {
        "a.py": "class Norm(Base):\n    x = 1\n",
        "b.py": "class Base(Norm):\n    y = 2\n\nclass Norm(Base):\n    pass\n",
    }
    sources = {name: Source(name, text) for name, text in texts.items()}
    finding = Finding("relu", "breaks", None, "a.py", 2, None, "", "", "")
    site = Site(finding, sources, GPT2Config(), GPT2Config())
    names = [(each.name, vars(each)["source"].file) for each in site.lineage(site.cls)]
    assert names == [("Norm", "a.py"), ("Base", "b.py"), ("Norm", "b.py")]


def test_a_size_that_is_imported_from_another_file_is_replaced(
    small: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "sizes.py").write_text("width = 48\n")
    path = tmp_path / "gpt.py"
    path.write_text(
        "from sizes import *\n" + BOOK.replace("/ self.head_dim ** 0.5", "* width**-0.5")
    )
    found = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False).run()
    assert found is not None and found.fixed == ["scale_by_d_model"]
    assert "* self.head_dim**-0.5" in found.texts[str(path)]


def test_another_class_of_the_same_name_is_left_unchanged(
    small: Checkpoint, tmp_path: Path
) -> None:
    edits = [
        ("(x - mean) / torch.sqrt(var + 1e-5) + self.shift",
         "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)"),
        ("        self.shift = nn.Parameter(torch.zeros(dim))\n", ""),
        ("LayerNorm", "Norm"),
    ]  # fmt: skip
    text = BOOK
    for old, new in edits:
        text = text.replace(old, new)
    norm, rest = text.split("class Attention(")
    (tmp_path / "other.py").write_text(f"{norm}\nclass Other:\n    norm = Norm(8)\n")
    path = tmp_path / "gpt.py"
    path.write_text(f"import other\n{norm}class Attention({rest}")
    found = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False).run()
    assert found is not None and found.fixed == ["rmsnorm"]
    assert list(found.texts) == [str(path)] and "nn.LayerNorm(dim)" in found.texts[str(path)]


def test_a_correct_repair_is_proved_in_a_separate_process_and_a_wrong_one_is_not(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's folder contains a package with the name of a library."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('the user's own')")
    monkeypatch.chdir(tmp_path)
    mutation = next(m for m in MUTATIONS if (m.style, m.code) == ("nano", "erf_gelu"))
    path = composed(MODELS["nano"], [mutation], tmp_path)
    found = repair(target_of(path, "nano"), str(tiny))
    assert isinstance(found, Repair) and found.fixed == ["erf_gelu"]
    [changed] = [line for line in found.diff.splitlines() if line.startswith("+ ")]
    assert changed.strip("+ ") == 'self.gelu = nn.GELU(approximate="tanh")'
    wrong = Repair({str(path): path.read_text()}, found.old, [])
    assert not is_proved(target_of(path, "nano"), open_checkpoint(tiny), wrong)


def test_a_size_that_equals_that_of_the_small_checkpoint_is_repaired(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The search is repeated with the sizes of the user's checkpoint."""
    path = tmp_path / "gpt.py"
    block = "Block(emb_dim, n_heads, context_length)"
    text = BOOK.replace(BLOCKS.partition("\n")[0].strip(), f"blocks = [{block}, {block}]")
    text = text.replace(', approximate="tanh"', "")
    path.write_text(text.replace("emb_dim, n_heads, n_layers)", "emb_dim, n_heads)"))
    found = repair(Target(f"{path}:GPT"), str(make_checkpoint(n_layer=3)))
    assert isinstance(found, Repair) and found.fixed == ["erf_gelu", "n_layer_mismatch"]
    assert f"blocks = [{block} for _ in range(3)]" in found.diff


def test_an_adaptation_returns_its_patch(tiny: Path, tmp_path: Path) -> None:
    mutation = next(m for m in MUTATIONS if (m.style, m.code) == ("mingpt", "softmax_dim"))
    path = composed(MODELS["mingpt"], [mutation], tmp_path)
    patch = adapt(build(MODELS["mingpt"], path, tiny), tiny).patch()
    assert patch is not None and patch.startswith("--- a/")
    correct = adapt(build(MODELS["mingpt"], ZOO / MODELS["mingpt"].file, tiny), tiny)
    assert correct.patch() is None


def test_the_search_returns_none_if_there_is_no_repair(small: Checkpoint, tmp_path: Path) -> None:
    mutation = next(m for m in MUTATIONS if (m.style, m.code) == ("nano", "rope"))
    path = composed(MODELS["nano"], [mutation], tmp_path)
    assert Search(target_of(path, "nano"), small, GPT2Config(), unsafe=False).run() is None


def test_a_fix_that_fails_does_not_stop_the_others(
    small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(site: Site) -> Iterator[Edits]:
        raise ZeroDivisionError("in the fix")
        yield

    monkeypatch.setitem(FIXES, "erf_gelu", [broken, *FIXES["erf_gelu"]])
    mutation = next(m for m in MUTATIONS if (m.style, m.code) == ("nano", "erf_gelu"))
    path = composed(MODELS["nano"], [mutation], tmp_path)
    message = "A repair of erf_gelu was left out, because it raised ZeroDivisionError: in the fix"
    with pytest.warns(UserWarning, match=message):
        assert "tanh" in searched(path, "nano", small).texts[str(path)]


# Texts and files.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch.nn as nn\nx = torch.ones(2)\n",
         "import torch\nimport torch.nn as nn\nx = torch.ones(2)\n"),
        ("from __future__ import annotations\n\nfrom torch import nn\nx = torch.ones(2)\n",
         "from __future__ import annotations\n\nimport torch\nfrom torch import nn\n"
         "x = torch.ones(2)\n"),
        ("import torch.nn\nx = torch.ones(2)\n", None),
        ("from parts import *\nx = torch.ones(2)\n", None),
        ("from torch import nn\nx = nn.Linear(2, 2)\n", None),
    ],
)  # fmt: skip
def test_torch_is_imported_if_an_edit_reads_it(text: str, expected: str | None) -> None:
    assert with_import_of_torch(text) == (expected or text)


def test_an_edit_that_removes_a_part_with_several_deviations_is_not_a_repair(
    small: Checkpoint, tmp_path: Path
) -> None:
    """Without its MLP, the model would have one deviation instead of three."""
    text = BOOK
    for old, new in (
        (BLOCK, PARTS.format("        y = x.tanh()\n        return y + self.ff(self.norm2(y))")),
        ('F.gelu(self.up(x), approximate="tanh")', "F.relu(self.up(x))"),
        ("nn.Linear(dim, 4 * dim)", "nn.Linear(dim, 4 * dim, bias=False)"),
    ):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "gpt.py"
    path.write_text(text)
    search = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False)
    assert search.run() is None
    assert search.fixed == ["no_mlp_bias", "relu"]
    assert [finding.code for finding in search.left] == ["extra_operation"]
    assert "x = self.think(x)" in search.texts[str(path)]


def test_edits_are_applied_to_a_text() -> None:
    source = Source("f.py", "é = f(a,  # why\n      b)\n")
    [call] = find(ast.Call, source.tree)
    edits = [Edit.replace(call.args[0], "x"), Edit.set_keyword(call, "k", "1")]
    assert apply(source.text, edits) == "é = f(x,  # why\n      b, k=1)\n"
    assert apply("abc", [Edit("f.py", 1, 2, "")]) == "ac"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(a, b=1, c=2)\n", "f(a, c=2)\n"),
        ("f(a, b=1)\n", "f(a)\n"),
        ("f(\n    a,  # why\n    b=1,\n)\n", "f(\n    a,  # why\n)\n"),
        ("f(a,\n  b=1,\n  c=2)\n", "f(a,\n  c=2)\n"),
        ("f(a,  # why\n  b=1)\n", "f(a,  # why\n  )\n"),
    ],
)
def test_an_argument_is_removed_with_its_line(text: str, expected: str) -> None:
    source = Source("f.py", text)
    [call] = find(ast.Call, source.tree)
    keyword = next(k for k in call.keywords if k.arg == "b")
    assert apply(text, [Edit.remove_argument(call, keyword)]) == expected


def test_files_keep_their_encoding_and_line_endings(tmp_path: Path) -> None:
    path = tmp_path / "gpt.py"
    path.write_bytes("# coding: latin-1\r\nx = 'é'\r\n".encode("latin-1"))
    old, new = "# coding: latin-1\nx = 'é'\n", "# coding: latin-1\nx = 'è'\n"
    write(Repair({str(path): new}, {str(path): old}, []))
    assert path.read_bytes() == "# coding: latin-1\r\nx = 'è'\r\n".encode("latin-1")
    assert [p.name for p in tmp_path.iterdir()] == ["gpt.py"]


@pytest.mark.parametrize("before", [b"", b"\n\n"])
def test_bytes_of_a_comment_in_another_encoding_are_kept(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "gpt.py"
    path.write_bytes(before + b"# \xc0\xc7\nx = 1\n")
    old = read_source(path)
    write(Repair({str(path): old.replace("x = 1", "x = 2")}, {str(path): old}, []))
    assert path.read_bytes() == before + b"# \xc0\xc7\nx = 2\n"


LINE_ENDINGS = {
    "CRLF": (b"a\r\nb\r\nc\r\n", b"a\r\nB\r\nc\r\n"),
    "no newline at the end": (b"a\nb\nc", b"a\nB\nc"),
    "an edit of a last line without a newline": (b"a\nc\nb", b"a\nc\nB"),
    "mixed line endings": (b"a\nb\nc\r\n", b"a\nB\nc\r\n"),
    "a byte order mark": (b"\xef\xbb\xbfa\nb\n", b"\xef\xbb\xbfa\nB\n"),
    "a form feed": (b"a\n\x0cb\nc\n", b"a\n\x0cB\nc\n"),
}


@pytest.mark.parametrize(("before", "after"), LINE_ENDINGS.values(), ids=LINE_ENDINGS)
def test_git_applies_the_diff_and_writing_gives_the_same_bytes(
    before: bytes, after: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, applied = tmp_path / "gpt.py", tmp_path / "applied"
    applied.mkdir()
    for each in (path, applied / "gpt.py"):
        each.write_bytes(before)
    monkeypatch.chdir(tmp_path)
    old = read_source(path)
    repaired = Repair({str(path): old.replace("b", "B")}, {str(path): old}, [])
    patch = repaired.diff.encode()
    write(repaired)
    subprocess.run(["git", "apply"], input=patch, cwd=applied, check=True)
    assert path.read_bytes() == (applied / "gpt.py").read_bytes() == after


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16"])
def test_only_the_edited_cell_of_a_notebook_is_changed(tmp_path: Path, coding: str) -> None:
    path = tmp_path / "gpt.ipynb"
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# é\n"]},
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": ["x = 1\n", "y = 2"]},
    ]
    document = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    before = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    path.write_text(before, encoding=coding)
    assert code_cells(path) == ["x = 1\ny = 2"]
    name = f"{path}#cell-1"
    write(Repair({name: "x = 3\ny = 2"}, {name: "x = 1\ny = 2"}, []))
    assert path.read_bytes() == before.replace("x = 1", "x = 3").encode(coding)


def test_the_last_definition_of_a_class_in_a_notebook_is_repaired(
    tmp_path: Path, small: Checkpoint
) -> None:
    faulty = GPT.replace("3 * width)", "3 * width, bias=False)").replace(TANH, ERF)
    path = tmp_path / "book.ipynb"
    path.write_text(notebook("%%bash\nls", GPT, f"!pip install torch\n{faulty}"))
    search = Search(Target(f"{path}:MyGPT"), small, GPT2Config(), unsafe=False)
    assert {finding.file for finding in search.present.deviations} == {f"{path}#cell-3"}
    found = search.run()
    assert found is not None and found.texts == {f"{path}#cell-3": f"!pip install torch\n{GPT}"}


def test_a_new_module_is_built_from_a_size_in_another_cell(
    tmp_path: Path, small: Checkpoint
) -> None:
    model = BOOK.replace("emb_dim, n_heads, n_layers):", "n_heads, n_layers):")
    model = model.replace("emb_dim", "n_embd").replace("x = self.final_norm(x)", "pass")
    model = model.replace("        self.final_norm = LayerNorm(n_embd)\n", "")
    path = tmp_path / "book.ipynb"
    path.write_text(notebook("n_embd = 32", model))
    found = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False).run()
    assert found is not None and found.fixed == ["no_final_ln"]
    assert "LayerNorm(n_embd)\n" in found.texts[f"{path}#cell-2"]


def test_nothing_is_written_if_one_of_the_files_has_changed(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a = 1\n")
    two.write_text("b = 1\n")
    new = {str(one): "a = 2\n", str(two): "b = 2\n"}
    with pytest.raises(AdaptError, match="was changed while"):
        write(Repair(new, {str(one): "a = 1\n", str(two): "b = 0\n"}, []))
    assert (one.read_text(), two.read_text()) == ("a = 1\n", "b = 1\n")
    assert {p.name for p in tmp_path.iterdir()} == {"one.py", "two.py"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f()", "f(k=1)"),
        ("f(a)", "f(a, k=1)"),
        ("f((a))", "f((a), k=1)"),
        ("f(a,)", "f(a, k=1)"),
        ("f(\n    a,\n)", "f(\n    a, k=1\n)"),
        ("f(\n    b=(a)  # why, f(a)\n)", "f(\n    b=(a), k=1  # why, f(a)\n)"),
        ("f(\n    a,  # why\n)", "f(\n    a, k=1  # why\n)"),
        ("f(b=2, k=3)", "f(b=2, k=1)"),
    ],
)
def test_a_keyword_is_added_before_a_comment(before: str, after: str) -> None:
    source = Source("f.py", before)
    [call] = find(ast.Call, source.tree)
    assert apply(before, [Edit.set_keyword(call, "k", "1")]) == after


def test_a_deviation_that_is_left_somewhere_is_not_called_repaired() -> None:
    left = Finding("no_pos", "breaks", None, None, None, None, "", "", "")
    found = str(Unrepaired(["relu", "no_pos"], [left]))
    assert found == "edits were found for relu, but none for no_pos"
    assert str(Unrepaired(["no_pos"], [left])) == "no edits were found for no_pos"
    stopped = str(Unrepaired([], [left], stopped=True))
    assert stopped == f"no edits were found for no_pos within {MAX_SECONDS} seconds"


def test_no_edit_is_tried_after_the_time_of_a_search(small: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "gpt.py"
    path.write_text(BOOK.replace('F.gelu(self.up(x), approximate="tanh")', "F.relu(self.up(x))"))
    search = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False)
    search.ends = 0.0
    assert search.run() is None and not search.tried and search.is_over()
    search.ends += 1e9
    assert search.run() is not None and search.tried
