"""Repairs that change the signature of a constructor are tried only with `--unsafe-fixes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import GPT2Config, adapt
from compat.adaptation.repair.repair import Search, Target, small_checkpoint
from compat.checkpoint import Checkpoint, open_checkpoint
from compat.user_models import construct, load_target
from tests.adaptation.test_mistakes import GPT
from tests.adaptation.test_repair import ATTEND, SPLIT
from tests.command_line import Cli

pytestmark = pytest.mark.usefixtures("shared_reference")

Edits = list[tuple[str, str]]

NO_TABLE: Edits = [
    ('        self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))\n',
     ""),
    ("self.mask[:T, :T].bool()", "torch.triu(torch.ones(T, T), diagonal=1).bool()"),
    ("dim, heads, context)", "dim, heads)"),
    ("Block(emb_dim, n_heads, context_length)", "Block(emb_dim, n_heads)"),
    ("vocab_size, context_length, emb_dim", "vocab_size, emb_dim"),
    ("        self.pos_emb = nn.Embedding(context_length, emb_dim)\n", ""),
    (" + self.pos_emb(torch.arange(T, device=ids.device))", ""),
]  # fmt: skip
NO_PARAMETERS: Edits = [
    ("    def __init__(self, dim):\n        super().__init__()\n"
     "        self.scale = nn.Parameter(torch.ones(dim))\n"
     "        self.shift = nn.Parameter(torch.zeros(dim))\n\n", ""),
    ("return self.scale * (x - mean) / torch.sqrt(var + 1e-5) + self.shift",
     "return (x - mean) / torch.sqrt(var + 1e-5)"),
    ("LayerNorm(dim)", "LayerNorm()"),
    ("LayerNorm(emb_dim)", "LayerNorm()"),
]  # fmt: skip
SIGNATURE = "def __init__(self, vocab_size, emb_dim, n_heads, n_layers):"
EMBEDDINGS = """class Embeddings(nn.Module):
    def __init__(self, vocab_size, dim, dropout=0.1):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids):
        return self.drop(self.tok_emb(ids))


class GPT(nn.Module)"""
DATACLASS = """@dataclass
class Config:
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class LayerNorm"""
DICTIONARY = """CONFIG = {"vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768}


class LayerNorm"""
WAVES = """class Positions(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        position = torch.arange(x.size(1)).unsqueeze(1)
        rate = torch.exp(torch.arange(0, self.dim, 2) * (-math.log(10000.0) / self.dim))
        table = torch.zeros(x.size(1), self.dim)
        table[:, 0::2] = torch.sin(position * rate)
        table[:, 1::2] = torch.cos(position * rate)
        return x + table


class LayerNorm(nn.Module)"""


def config_of(definition: str, read: str) -> Edits:
    """Return edits for a model with a config: the code of the config, and how it is read."""
    names = {"n_layers": "n_layer", "n_heads": "n_head", "emb_dim": "n_embd"}
    edits = [(SIGNATURE, "def __init__(self, config):"), ("class LayerNorm", definition)]
    for old in ("nn.Embedding(vocab_size, emb_dim)", "Block(emb_dim, n_heads)", "range(n_layers)",
                "LayerNorm(emb_dim)", "nn.Linear(emb_dim, vocab_size"):  # fmt: skip
        new = old
        for name in (*names, "vocab_size"):
            new = new.replace(name, read.format(names.get(name, name)))
        edits.append((old, new))
    return edits


# The edits of a correct file, the codes, and lines of the repaired file.
FORMS: dict[str, tuple[Edits, list[str], list[str]]] = {
    "an argument for the context length": (
        NO_TABLE,
        ["no_pos"],
        ["    def __init__(self, vocab_size, emb_dim, n_heads, n_layers, context_length=768):\n",
         "        self.pos_emb = nn.Embedding(context_length, emb_dim)\n"],
    ),
    "one on a line of its own, with a type": (
        [*NO_TABLE,
         (SIGNATURE, "def __init__(\n        self, vocab_size: int, emb_dim: int, n_heads: int,\n"
          "        n_layers: int = 12,  # blocks\n    ) -> None:")],
        ["no_pos"],
        ["n_layers: int = 12,  # blocks\n        context_length: int = 768,\n    ) -> None:"],
    ),
    "one before arguments that are keywords": (
        [*NO_TABLE,
         (SIGNATURE, "def __init__(self, vocab_size=9, emb_dim=768, *, n_heads=12, n_layers=12):")],
        ["no_pos"],
        ["vocab_size=9, emb_dim=768, context_length=768, *, n_heads=12, n_layers=12):\n"],
    ),
    "one that is passed on to a module": (
        [*NO_TABLE, ("class GPT(nn.Module)", EMBEDDINGS), ("x = self.tok_emb(", "x = self.emb("),
         ("        self.tok_emb = nn.Embedding(vocab_size, emb_dim)\n",
          "        self.emb = Embeddings(vocab_size, emb_dim, 0.1)\n")],
        ["no_pos"],
        ["    def __init__(self, vocab_size, dim, context_length, dropout=0.1):\n",
         "Embeddings(vocab_size, emb_dim, context_length, 0.1)\n",
         "n_layers, context_length=768):\n"],
    ),
    "a field of a dataclass": (
        [*NO_TABLE,
         *config_of(DATACLASS, "config.{}"),
         ("import math\n", "import math\nfrom dataclasses import dataclass\n")],
        ["no_pos"],
        ["    n_embd: int = 768\n    n_positions: int = 768\n",
         "nn.Embedding(config.n_positions, config.n_embd)\n"],
    ),
    "an entry of a dictionary": (
        [*NO_TABLE,
         *config_of(DICTIONARY, 'config["{}"]')],
        ["no_pos"],
        ['"n_embd": 768, "n_positions": 768}\n',
         'nn.Embedding(config["n_positions"], config["n_embd"])\n'],
    ),
    "an argument for a table in place of sines": (
        [*NO_TABLE, ("class LayerNorm(nn.Module)", WAVES),
         ("self.tok_emb(ids)", "self.pos(self.tok_emb(ids))"),
         ("        blocks = [", "        self.pos = Positions(emb_dim)\n        blocks = [")],
        ["sinusoidal_pos"],
        ["n_layers, context_length=768):\n",
         "        self.pos = nn.Embedding(context_length, emb_dim)\n"],
    ),
    "a constructor for a norm without one": (
        NO_PARAMETERS,
        ["no_ln_bias", "no_ln_weight"],
        ["    def __init__(self, dim):\n        super().__init__()\n"
         "        self.weight = nn.Parameter(torch.ones(dim))\n",
         "self.norm1 = LayerNorm(dim)\n", "self.final_norm = LayerNorm(emb_dim)\n"],
    ),
    "the width of a norm before its eps": (
        [(NO_PARAMETERS[0][0],
          "    def __init__(self, eps=1e-5):\n        super().__init__()\n"
          "        self.eps = eps\n\n"),
         (NO_PARAMETERS[1][0], "return (x - mean) / torch.sqrt(var + self.eps)"),
         ("LayerNorm(dim)", "LayerNorm(1e-5)"), ("LayerNorm(emb_dim)", "LayerNorm(eps=1e-5)")],
        ["no_ln_bias", "no_ln_weight"],
        ["    def __init__(self, dim, eps=1e-5):\n", "self.norm1 = LayerNorm(dim, 1e-5)\n",
         "self.final_norm = LayerNorm(eps=1e-5, dim=emb_dim)\n"],
    ),
    "a number of heads": (
        [("        self.heads, self.head_dim = heads, dim // heads\n", ""),
         ("dim, heads, context)", "dim, context)"),
         ("Block(emb_dim, n_heads, context_length)", "Block(emb_dim, context_length)"),
         ("emb_dim, n_heads, n_layers", "emb_dim, n_layers"),
         (SPLIT, ""),
         (ATTEND,
          "        scores = queries @ keys.transpose(1, 2) / math.sqrt(C)\n"
          '        scores = scores.masked_fill(self.mask[:T, :T].bool(), float("-inf"))\n'
          "        out = torch.softmax(scores, dim=-1) @ values\n")],
        ["n_head_mismatch"],
        ["    def __init__(self, dim, context, n_heads):\n",
         "        keys = keys.view(B, T, self.n_heads, -1).transpose(1, 2)\n",
         "queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])\n",
         "context_length, emb_dim, n_layers, n_heads=12):\n"],
    ),
    "the width of an attention that gets its projections": (
        [("    def __init__(self, dim, heads, context):\n        super().__init__()\n"
          "        self.heads, self.head_dim = heads, dim // heads\n",
          "    def __init__(self, qkv, heads, context):\n        super().__init__()\n"
          "        self.heads, self.qkv = heads, qkv\n"),
         ("        self.W_query = nn.Linear(dim, dim)\n        self.W_key = nn.Linear(dim, dim)\n"
          "        self.W_value = nn.Linear(dim, dim)\n"
          "        self.out_proj = nn.Linear(dim, dim)\n", ""),
         ("        keys = self.W_key(x)\n        queries = self.W_query(x)\n"
          "        values = self.W_value(x)\n",
          "        queries, keys, values = self.qkv(x).chunk(3, dim=-1)\n"
          "        self.head_dim = C // self.heads\n"),
         ("return self.out_proj(out)", "return out"),
         ("Attention(dim, heads, context)", "Attention(nn.Linear(dim, 3 * dim), heads, context)")],
        ["no_out_proj"],
        ["    def __init__(self, qkv, heads, context, dim):\n",
         "        self.proj = nn.Linear(dim, dim)\n",
         "Attention(nn.Linear(dim, 3 * dim), heads, context, dim)\n"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return small_checkpoint(GPT2Config(), tmp_path_factory.mktemp("small"))


def write_form(folder: Path, form: str) -> Path:
    """Write the model in this form, and return the path of its file."""
    text = GPT
    for old, new in FORMS[form][0]:
        assert old in text
        text = text.replace(old, new)
    path = folder / "gpt.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_size_is_added_only_if_unsafe_edits_are_allowed(
    small: Checkpoint, tmp_path: Path, form: str
) -> None:
    path = write_form(tmp_path, form)
    user_config = GPT2Config(n_positions=768)  # the small checkpoint has 32 positions
    safe = Search(Target(f"{path}:GPT"), small, user_config, unsafe=False)
    assert safe.run() is None and safe.has_untried_edits()
    unsafe = Search(Target(f"{path}:GPT"), small, user_config, unsafe=True)
    found = unsafe.run()
    assert found is not None and found.fixed == FORMS[form][1]
    for lines in FORMS[form][2]:
        assert lines in found.texts[str(path)]


def test_no_argument_is_added_to_a_constructor_with_keyword_arguments(
    small: Checkpoint, tmp_path: Path
) -> None:
    path = write_form(tmp_path, "an argument for the context length")
    path.write_text(path.read_text().replace(SIGNATURE, f"{SIGNATURE[:-2]}, **options):"))
    search = Search(Target(f"{path}:GPT"), small, GPT2Config(), unsafe=False)
    assert search.run() is None and not search.has_untried_edits()
    assert [finding.code for finding in search.left] == ["no_pos"]


def test_the_command_writes_such_edits_only_with_the_option(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_form(tmp_path, "an argument for the context length")
    before = path.read_text()
    command = ("adapt", "gpt.py:GPT", "--model", tiny)
    refused = cli(*command, "--fix")
    assert refused.code == 1 and path.read_text() == before
    assert "no edits were found for no_pos (--unsafe-fixes also tries" in " ".join(
        refused.err.split()
    )
    done = cli(*command, "--fix", "--unsafe-fixes")
    assert done.code == 0 and "repaired no_pos in gpt.py" in done.err
    positions = open_checkpoint(tiny).config.n_positions
    assert f"n_layers, context_length={positions}):" in path.read_text()
    assert cli(*command).code == 0
    assert cli(*command, "--unsafe-fixes").code == 2  # it requires --diff or --fix


def test_patch_changes_constructors_only_with_unsafe(tiny: Path, tmp_path: Path) -> None:
    path = write_form(tmp_path, "a constructor for a norm without one")
    config = open_checkpoint(tiny).config
    adaptation = adapt(construct(load_target(f"{path}:GPT"), config), tiny)
    assert adaptation.patch() is None
    patch = adaptation.patch(unsafe=True)
    assert patch is not None and "+    def __init__(self, dim):\n" in patch
