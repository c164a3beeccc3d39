"""Arguments with ambiguous names are found by building small models, or are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from compat import AdaptError, GPT2Config
from compat.user_models import construct, load_target
from compat.user_models.trials import _distance
from tests.user_models.own_file import CONFIG, described

# A GPT-2 with the right number of parameters; how they are used does not matter in these tests.
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.Linear(inner, width))

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg, width = cfg, cfg.WIDTH
        self.tok, self.pos = nn.Embedding(cfg.vocab_size, width), None
        if cfg.kind_of_pos not in ["rotary", "alibi"]:
            self.pos = nn.Embedding(cfg.block_size, width)
        self.blocks = nn.ModuleList(Block(width, INNER) for _ in range(cfg.n_layer))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, cfg.vocab_size, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        return self.head(x if self.cfg.quick else x + 1)
"""


# Without an entry whose value is unknown.
KNOWN = MODEL.replace("cfg.kind_of_pos", "'learned'").replace("self.cfg.quick", "True")


def built(
    tmp_path: Path, model: str, inner: str = "4 * width", width: str = "n_embd"
) -> tuple[Any, str]:
    """Return the model whose blocks are as wide as `inner`, and the call that built it."""
    return described(tmp_path, model.replace("WIDTH", width).replace("INNER", inner))


SMALL_SIZES = "vocab_size: int = 5; block_size: int = 5; n_embd: int = 6; n_layer: int = 1"


def with_config(model: str, fields: str) -> str:
    """Return the source of a model whose config is a data class, with these fields."""
    lines = "\n    ".join(fields.split("; "))
    config = f"from dataclasses import dataclass\n\n@dataclass\nclass Config:\n    {lines}\n"
    return config + model.replace("__init__(self, cfg)", "__init__(self, cfg: Config)")


@pytest.mark.parametrize("value", [96, 4])
def test_a_width_that_is_multiplied_by_the_models_is_a_ratio(tmp_path: Path, value: int) -> None:
    inner = "cfg.d_ff * cfg.n_embd" if value == 4 else "cfg.d_ff"
    model, _ = built(tmp_path, KNOWN, inner)
    assert model.cfg.d_ff == value
    assert model.blocks[0].mlp[0].out_features == 96


@pytest.mark.parametrize(
    ("inner", "value"), [("cfg.factor * width", 4), ("cfg.factor", 96)], ids=["ratio", "width"]
)
def test_an_unknown_size_has_the_value_of_gpt2(tmp_path: Path, inner: str, value: int) -> None:
    model, call = built(tmp_path, MODEL, inner)
    assert model.blocks[0].mlp[0].out_features == 96
    assert model.pos is not None  # its kind is neither of those that the code names
    assert model.cfg.quick is False  # only forward reads it
    assert f"; found by trying: cfg.kind_of_pos='learned', cfg.factor={value}" in call


@pytest.mark.parametrize("width", ["n_embd", "n_hidden"])
def test_an_ambiguous_name_has_the_value_that_fits(tmp_path: Path, width: str) -> None:
    """Next to `n_embd`, `n_hidden` is usually the MLP's width, but here it may be the model's."""
    check = "assert cfg.n_embd == cfg.n_hidden or 'WIDTH' == 'n_embd'"
    source = KNOWN.replace("self.cfg, width", f"{check}\n        self.cfg, width")
    inner = "4 * width" if width == "n_hidden" else "cfg.n_hidden"
    model, _ = built(tmp_path, source, inner, width)
    assert model.tok.embedding_dim == 24
    assert model.cfg.n_hidden == (24 if width == "n_hidden" else 96)


def test_an_unknown_size_and_an_ambiguous_name_are_both_found(tmp_path: Path) -> None:
    """The vocabulary is searched for again after `wide` was found to be the width of the heads."""
    source = KNOWN.replace("cfg.vocab_size", "cfg.words_known").replace(
        "self.tok(ids)", "self.tok(ids) + 0 * self.pos(ids * 0)"
    )
    source = source.replace(
        "3 * width), nn.Linear(width, width)", "3 * wide), nn.Linear(wide, width)"
    )
    source = source.replace("(self, width, inner)", "(self, width, wide, inner)")
    source = source.replace(
        "Block(width, INNER)", "Block(width, cfg.n_head * cfg.hidden_size, 4 * width)"
    )
    model, call = built(tmp_path, source, "")
    assert model.tok.num_embeddings == 97
    assert model.blocks[0].out.in_features == 24
    assert "cfg.hidden_size=6" in call and "cfg.words_known=97" in call


@pytest.mark.parametrize(
    ("entry", "more"),
    [("cfg.pos_kind", ""), ("cfg.kind", "def check(kind: PosKind): return kind\n")],
    ids=["name", "annotation"],
)
def test_a_member_of_an_enumeration_is_found(tmp_path: Path, entry: str, more: str) -> None:
    enum = f"from enum import Enum\nclass PosKind(Enum):\n    ROTARY = 1\n    LEARNED = 2\n{more}"
    source = MODEL.replace("self.cfg.quick", "True").replace("cfg.kind_of_pos", entry)
    source = source.replace('not in ["rotary", "alibi"]', "== PosKind.LEARNED")
    source = source.replace("self.tok(ids)", "self.tok(ids) + self.pos(ids * 0)")
    model, call = built(tmp_path, enum + source)
    assert model.pos.num_embeddings == 32
    assert f"{entry}=<PosKind.LEARNED: 2>" in call


def test_an_implementation_of_an_interface_is_built(tmp_path: Path) -> None:
    """Of those without arguments, the one with the most usual name is built."""
    interface = """
from abc import ABC, abstractmethod
import torch

class Scores(torch.nn.Module, ABC):
    @abstractmethod
    def weights(self, x): ...

class Sparse(Scores):
    def weights(self, x): return x.relu()

class VanillaSoftmax(Scores):
    def weights(self, x): return x.softmax(-1)

class Config:
    def __init__(self, vocab_size, block_size, n_layer, WIDTH, scores: Scores):
        vars(self).update(locals())
"""
    source = KNOWN.replace("self.cfg, width = cfg", "self.scores, width = cfg.scores")
    source = interface + source.replace("= self.tok(ids)", "= self.scores.weights(self.tok(ids))")
    assert "cfg.scores=VanillaSoftmax()" in built(tmp_path, source)[1]


def test_an_implementation_of_an_interface_is_found_in_a_file_beside_it(tmp_path: Path) -> None:
    """It is passed as a class to an argument whose name says so."""
    package = tmp_path / "own_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "interface.py").write_text("""
from abc import ABC, abstractmethod
import torch

class Router(torch.nn.Module, ABC):
    def __init__(self, width):
        super().__init__()

    @abstractmethod
    def forward(self, x): ...
""")
    (package / "routers.py").write_text("""
from own_parts.interface import Router

class Same(Router):
    def forward(self, x): return x
""")
    (tmp_path / "own_gpt.py").write_text("""
import torch
from own_parts.interface import Router

class GPT(torch.nn.Module):
    def __init__(self, vocab_size, n_embd, router_class: Router):
        super().__init__()
        self.tok = torch.nn.Embedding(vocab_size, n_embd)
        self.router = router_class(n_embd)

    def forward(self, ids):
        return self.router(self.tok(ids)) @ self.tok.weight.T
""")
    model = construct(load_target(f"{tmp_path / 'own_gpt.py'}:GPT"), CONFIG)
    assert type(model.router).__name__ == "Same"


def test_an_entry_is_missing_only_in_the_config_it_is_read_from(tmp_path: Path) -> None:
    """The tokenizer is read like a config, too."""
    source = KNOWN.replace("def __init__(self, cfg):", "def __init__(self, cfg, tokenizer):")
    source = source.replace("cfg.vocab_size", "len(tokenizer.vocab)")
    assert "; found by trying: cfg.factor=4" in built(tmp_path, source, "cfg.factor * width")[1]


def test_the_classes_of_a_language_model_are_its_tokens(tmp_path: Path) -> None:
    """Also if another model of the author's is a classifier."""
    source = KNOWN.replace(
        "def __init__(self, cfg):", "def __init__(self, cfg, internal, num_classes):"
    )
    source = source.replace("nn.Linear(width, cfg.vocab_size,", "nn.Linear(width, num_classes,")
    source = source.replace("nn.Linear(width, 3 * width), nn.Linear(width, width)", "None, None")
    source = source.replace("self.head(x if True else x + 1)", "[self.head(x)]")
    for text in (source, source + "\n\nclassifier = dict(num_classes=3)\n"):
        model, _ = built(tmp_path, text, "internal")
        assert model.head.out_features == 97


def test_a_model_that_runs_with_no_value_is_refused(tmp_path: Path) -> None:
    source = MODEL.replace("x = self.tok(ids)", "x = self.tok(ids) @ 'no tensor'")
    with pytest.raises(AdaptError, match=r"needs the argument cfg\.kind_of_pos"):
        built(tmp_path, source, "cfg.factor")


def test_a_number_of_layers_is_not_a_switch(tmp_path: Path) -> None:
    source = KNOWN.replace("range(cfg.n_layer)", "range(cfg.repetitions)")
    assert "cfg.repetitions=3" in built(tmp_path, source)[1]


def test_a_number_named_head_is_the_number_of_heads(tmp_path: Path) -> None:
    """The number of parameters does not depend on it."""
    own = MODEL.replace("def __init__(self, cfg)", "def __init__(self, head, cfg)")
    own = own.replace("        self.cfg, width", "        self.each = 24 // head\n"
                      "        self.cfg, width")  # fmt: skip
    model, call = built(tmp_path, own)
    assert model.each == 6 and "head=4" in call


def test_a_number_in_arithmetic_is_not_a_switch(tmp_path: Path) -> None:
    source = KNOWN.replace("range(cfg.n_layer)", "range(cfg.n_layer * cfg.sharing)")
    assert "cfg.sharing=1" in built(tmp_path, source)[1]


def test_a_model_that_is_much_too_large_is_not_built_completely() -> None:
    layers: list[nn.Module] = []

    def run(sizes: GPT2Config, more: Mapping[str, Any]) -> tuple[nn.Module, bool]:
        for _ in range(more["layers"]):
            layers.append(nn.Linear(sizes.n_embd, 4 * sizes.n_embd))
        return nn.ModuleList(layers), True

    assert _distance(run, CONFIG, {"layers": lambda config: 1000}) == (None, [])
    assert 50 < len(layers) < 1000
    layers.clear()
    distance, _ = _distance(run, CONFIG, {"layers": lambda config: 50})
    assert distance is not None and len(layers) == 50


@pytest.mark.parametrize("size", ["vector", "n_vectors"], ids=["one entry", "two entries"])
def test_the_entry_of_the_users_config_that_is_the_width_is_found(
    tmp_path: Path, size: str
) -> None:
    """Its name is meaningless, and another entry may have the same value."""
    own = f"CONFIG = dict(vocab_size=65, block_size=16, n_layer=2, vector=512, {size}=512)\n"
    source = own + KNOWN
    for name in ("vocab_size", "block_size", "n_layer", "WIDTH"):
        source = source.replace(f"cfg.{name}", f'cfg["{name}"]')
    model, call = built(tmp_path, source, "4 * width", "vector")
    assert model.tok.embedding_dim == 24
    assert re.search(r"; found by trying: .*\bcfg\.vector=24", call)


@pytest.mark.parametrize(
    "arguments",
    ["parole, contesto, larghezza=64, strati=8", "parole=65, contesto=16, larghezza=64, strati=8"],
)
def test_sizes_with_names_in_another_language_are_found(tmp_path: Path, arguments: str) -> None:
    """They are found by trial, with or without defaults."""
    source = KNOWN.replace("self, cfg)", f"self, {arguments})").replace(
        "self.cfg, width = cfg,", "width ="
    )
    own = {"vocab_size": "parole", "block_size": "contesto", "n_layer": "strati"}
    for name, size in {**own, "WIDTH": "larghezza"}.items():
        source = source.replace(f"cfg.{name}", size)
    model, _ = built(tmp_path, source, "4 * width", "")
    assert model.tok.weight.shape == (97, 24)
    assert model.pos.weight.shape == (32, 24)
    assert len(model.blocks) == 3


@pytest.mark.parametrize("more", ["nn.Identity()", "nn.Linear(width, width)"])
def test_the_only_size_without_a_role_has_the_only_remaining_role(
    tmp_path: Path, more: str
) -> None:
    """128 is a usual default, but not divisible by three heads, unlike the width 24."""
    source = KNOWN.replace("self, cfg)", "self, vocab, context, heads, depth, big=128)")
    source = source.replace("self.cfg, width = cfg,", f"width = big\n        self.more = {more}\n"
                            "        assert width % heads == 0\n        unused =")  # fmt: skip
    own = {"vocab_size": "vocab", "block_size": "context", "n_layer": "depth", "WIDTH": "big"}
    for name, size in own.items():
        source = source.replace(f"cfg.{name}", size)
    model, _ = built(tmp_path, source, "4 * width", "")
    assert model.tok.weight.shape == (97, 24)


HEADS = """
import torch
from torch import nn

class Words:
    count = COUNT

class Attention(nn.Module):
    def __init__(self, width, n_hc):
        super().__init__()
        heads = range(n_hc)
        self.heads = nn.ModuleList(nn.Linear(width, 3 * (width // n_hc)) for _ in heads)

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1).sum(-1, keepdim=True) + x

class GPT(nn.Module):
    def __init__(self, width, n_hc, n_layer, n_ctx):
        super().__init__()
        self.tok, self.pos = nn.Embedding(Words.count, width), nn.Embedding(n_ctx, width)
        self.blocks = nn.ModuleList(Attention(width, n_hc) for i in range(n_layer))
        self.head = nn.Linear(width, Words.count, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


@pytest.mark.parametrize("words", ["int('300')", "97"])
def test_the_size_that_no_other_argument_has_is_found(tmp_path: Path, words: str) -> None:
    """The vocabulary may be that of a tokenizer; a loop runs over the layers or the heads."""
    model, call = described(tmp_path, HEADS.replace("COUNT", words))
    assert len(model.blocks[0].heads) == 4
    assert model.tok.num_embeddings == (300 if "300" in words else 97)
    assert "found by trying: n_hc=4" in call


NEEDS_LIBRARY = """
import torch
from torch import nn
from own_missing_rope import Rotary

class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, fuzzy: int):
        super().__init__()
        self.tok, self.head = nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size)
        self.rope = ROPE

    def forward(self, ids):
        return self.head(self.tok(ids))
"""


def test_a_missing_library_is_named_instead_of_the_argument(tmp_path: Path) -> None:
    missing = r"ModuleNotFoundError: No module named 'own_missing_rope'"
    with pytest.raises(AdaptError, match=missing):
        described(tmp_path, NEEDS_LIBRARY.replace("ROPE", "Rotary(fuzzy)"))
    source = NEEDS_LIBRARY.replace("ROPE", "fuzzy and Rotary(fuzzy)")  # needed unless 0
    _, call = described(tmp_path, source)
    assert "found by trying: fuzzy=None" in call


@pytest.mark.parametrize(
    ("signature", "value"), [("reach_window: int", 32), ("scaling: float", 1.0)]
)
def test_values_that_fit_an_annotation_or_a_name_are_found(
    tmp_path: Path, signature: str, value: float
) -> None:
    name = signature.partition(":")[0]
    source = NEEDS_LIBRARY.replace("fuzzy: int", f"{signature}, block_size")
    _, call = described(tmp_path, source.replace("ROPE", f"[0.0] * int(2 * {name})"))
    assert f"found by trying: {name}={value}" in call


def test_switches_that_remove_a_part_without_a_replacement_stay_off(tmp_path: Path) -> None:
    """Without its RMSNorms and rotations, this model would have no norms and no positions."""
    source = """
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_layer, remove_rmsnorm=False, no_rope=False):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        kinds = [nn.Identity] if remove_rmsnorm else [nn.RMSNorm]
        self.norms = nn.ModuleList([kinds[0](n_embd) for _ in range(n_layer)])
        self.no_rope = no_rope

    def forward(self, ids):
        x = self.tokens(ids)
        for norm in self.norms:
            x = norm(x)
        return x @ self.tokens.weight.T
"""
    model, call = described(tmp_path, source)
    assert isinstance(model.norms[0], nn.RMSNorm)
    assert "remove_rmsnorm=False" in call and "no_rope=False" in call


@pytest.mark.parametrize(
    ("width", "inner", "more"), [("n_embd", "cfg.hidden_dim", 9), ("hidden_size", "4 * width", 60)]
)
def test_an_ambiguous_name_whose_role_the_code_shows(
    tmp_path: Path, width: str, inner: str, more: int
) -> None:
    """Additional matrices elsewhere do not change what a name stands for."""
    source = KNOWN.replace(
        "nn.Embedding(cfg.vocab_size, width)", "nn.Embedding(cfg.vocab_size, cfg.WIDTH)"
    )
    source = source.replace(
        "nn.LayerNorm(width)]",
        f"nn.LayerNorm(width)] + [nn.Linear(width, width) for _ in range({more})]",
    )
    model, _ = built(tmp_path, source, inner, width)
    assert model.tok.embedding_dim == 24
    assert model.blocks[0].mlp[0].out_features == 96


def test_a_config_whose_name_is_that_of_heads_is_no_number_of_heads(tmp_path: Path) -> None:
    """Of a model that does not run, other numbers of heads are tried."""
    source = """
from dataclasses import dataclass, field
from torch import nn

@dataclass
class Heads:
    n_heads: int = 2

@dataclass
class Config:
    vocab_size: int = 5
    n_embd: int = 6
    heads: Heads = field(default_factory=Heads)

class GPT(nn.Module):
    def __init__(self, heads_config: Config):
        super().__init__()
        self.wte = nn.Embedding(heads_config.vocab_size, heads_config.n_embd)

    def forward(self, ids):
        raise ValueError("it does not run")
"""
    model, _ = described(tmp_path, source)
    assert model.wte.embedding_dim == CONFIG.n_embd


def test_a_vocabulary_that_the_code_needs_is_the_users(tmp_path: Path) -> None:
    """GPT-2's is smaller than the padded one, of which an id is written in the code."""
    source = KNOWN.replace("cfg.vocab_size, width)", "cfg.vocab_size, width, padding_idx=191)")
    source += """
class Config:
    vocab_size: int = 192
"""
    model, call = built(tmp_path, source)
    assert model.tok.num_embeddings == 192
    assert "; your code only runs with cfg.vocab_size=192" in call


@pytest.mark.parametrize("entry", ["n_kv_heads", "dtype"])
def test_another_value_of_an_entry_is_tried_if_the_model_does_not_run(
    tmp_path: Path, entry: str
) -> None:
    """A size is None where only a script sets it, or the code casts to the type of its weights."""
    config = """
from dataclasses import dataclass
import torch

@dataclass
class Config:
    vocab_size: int = 5
    n_embd: int = 6
    n_head: int = 2
    n_layer: int = 1
    n_kv_heads: int = None
    dtype: torch.dtype = torch.float32
"""
    source = KNOWN.replace("cfg.block_size", "32")
    if entry == "dtype":
        source = source.replace("bias=False)", "bias=False, dtype=cfg.dtype)")
        source = source.replace("self.head(x if", "self.head(x.to(torch.bfloat16) if")
    else:
        source = source.replace(
            "self.cfg, width", "cfg.group = cfg.n_embd // cfg.n_kv_heads; self.cfg, width"
        )
    model, call = built(tmp_path, config + source)
    assert f"; your code only runs with cfg.{entry}=" in call
    assert model.cfg.n_kv_heads == (4 if entry == "n_kv_heads" else None)


@pytest.mark.parametrize(
    "elsewhere",
    [
        "DEFAULTS = {'quick': 'fast'}",
        "class Other:\n    quick: str = 'fast'",
        "quick = 'fast'",
        "import os\nquick = os.environ.get('QUICK', 'fast')",
    ],
)
def test_an_unknown_entry_has_the_value_that_the_users_code_gives_its_name(
    tmp_path: Path, elsewhere: str
) -> None:
    source = MODEL.replace("'learned'", "").replace("cfg.kind_of_pos not in", "'learned' not in")
    source = source.replace("x if self.cfg.quick else", "x if self.cfg.quick.upper() else")
    model, _ = built(tmp_path, f"{source}\n\n{elsewhere}\n")
    assert model.cfg.quick == "fast"
    model, _ = built(tmp_path, source)
    assert "quick" not in model.cfg


FIELDS = """
from dataclasses import dataclass
from typing import Optional

@dataclass
class Config:
    vocab_size: int = 5
    block_size: int = 8
    n_embd: int = 6
    n_head: int = 8
    n_kv_heads: int = 2
    n_layer: int = 1
    hidden_dim: Optional[int] = None
    gradient_checkpointing: bool = True
    sparse_heads: bool = True
    padding_idx: int = 50_257
"""
LATE = "self.cfg, width"  # the first statement of a constructor in `KNOWN`


@pytest.mark.parametrize(
    ("statement", "entry", "value"),
    [
        ("assert cfg.n_kv_heads < cfg.n_head", "n_kv_heads", 2),
        ("assert cfg.hidden_dim is None", "hidden_dim", None),
        ("assert not cfg.gradient_checkpointing", "gradient_checkpointing", False),
        ("assert not cfg.sparse_heads", "sparse_heads", False),
        ("nn.Embedding(cfg.vocab_size, 1, padding_idx=cfg.padding_idx)", "padding_idx", -1),
    ],
)
def test_a_value_with_which_the_code_runs_is_found(
    tmp_path: Path, statement: str, entry: str, value: object
) -> None:
    source = KNOWN.replace(LATE, f"{statement}; {LATE}")
    model, call = built(tmp_path, FIELDS + source)
    assert getattr(model.cfg, entry) == value and model.cfg.n_embd == 24
    assert (f"; your code only runs with cfg.{entry}={value}" in call) == (entry != "padding_idx")
    assert built(tmp_path, FIELDS + KNOWN)[0].cfg.n_kv_heads == 4


def test_a_setting_for_which_a_config_class_has_keywords_may_be_refused(tmp_path: Path) -> None:
    config = """
class Config:
    def __init__(self, vocab_size=5, n_embd=6, n_head=2, n_layer=1, dropout=0.3, **more):
        assert dropout == 0.3 and "bias" not in more
        self.vocab_size, self.n_embd, self.n_layer = vocab_size, n_embd, n_layer

    block_size, bias = 8, False
"""
    source = KNOWN.replace("cfg):", "cfg: Config):").replace(LATE, f"cfg.bias; {LATE}")
    model, _ = built(tmp_path, config + source)
    assert model.cfg.n_embd == 24


@pytest.mark.parametrize("name", ["hide", "later"])
def test_an_unknown_switch_hides_later_tokens(tmp_path: Path, name: str) -> None:
    """The number of parameters does not depend on it."""
    hidden = f"(self.{name} is {name == 'hide'})"
    source = KNOWN.replace("def __init__(self, cfg)", f"def __init__(self, {name}: bool, cfg)")
    source = source.replace(LATE, f"self.{name} = {name}; {LATE}")
    source = source.replace(
        "self.head(x", f"self.head(x.cumsum(1) if {hidden} else x + x.mean(1, True)"
    )
    model, _ = built(tmp_path, source.replace("if True else x + 1", ""))
    assert getattr(model, name) is (name == "hide")


def test_a_seed_is_not_a_width(tmp_path: Path) -> None:
    source = KNOWN.replace(
        LATE, f"assert f'{{cfg.n_embd}}' == '123'; torch.manual_seed(123); {LATE}"
    )
    with pytest.raises(AdaptError, match="assert"):
        built(tmp_path, source)
    model, call = built(tmp_path, source.replace("manual_seed", "arange"))
    assert model.tok.embedding_dim == 123 and "your code runs in width 123" in call


def test_attributes_that_the_body_of_a_config_class_computes_follow(tmp_path: Path) -> None:
    more = "\n    same = n_embd\n    double = 2 * n_embd\n    other = n_embd if n_embd else 1\n"
    source = KNOWN.replace("def __init__(self, cfg)", "def __init__(self, cfg: Config)")
    source = source.replace(LATE, f"cfg.same; {LATE}")
    model, _ = built(tmp_path, FIELDS.rstrip() + more + source)
    assert (model.cfg.same, model.cfg.double, model.cfg.other) == (24, 48, 6)


# A GPT whose argument `units` has a value of its own and a name that denotes no size.
UNITS = """
import torch
from torch import nn

class Heads(nn.Module):
    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

class GPT(nn.Module):
    def __init__(self, {sizes}, units=7):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.units = {units}
        self.attn = nn.ModuleList({attention} for _ in range(n_layer))
        self.up = nn.ModuleList(nn.Linear(n_embd, {inner}) for _ in range(n_layer))
        self.gate = {gate}
        self.norm, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, ids):
        return self.head(self.tok(ids))
"""
NAMES = ("vocab_size", "block_size", "n_embd", "n_layer")


def units(tmp_path: Path, name: str = "", **code: str) -> int:
    """Return the value of the argument `units`, which is in the place of the size `name`."""
    sizes = ", ".join(each for each in NAMES if each != name)
    usual = {"attention": "Heads(n_embd, 4)", "inner": "4 * n_embd", "gate": "None"}
    source = UNITS.format(**{"sizes": sizes, "units": "units", **usual, **code})
    if name:
        source = source.replace("units=7):", f"units=7):\n        {name} = units + 0")
    model, _ = described(tmp_path, source)
    return int(model.units)


@pytest.mark.parametrize(
    "code",
    [
        {"attention": "Heads(n_embd, num_heads=units)"},
        {"attention": "Heads(n_embd, units)"},
        {"units": "units + 0 * (n_embd // units)"},
    ],
    ids=["keyword", "position", "divisor"],
)
def test_what_the_code_makes_of_an_argument_tells_its_role(
    tmp_path: Path, code: dict[str, str]
) -> None:
    """The number of heads changes the shape of no parameter, and 7 heads do not fit the width."""
    assert units(tmp_path, **code) == CONFIG.n_head


def test_an_argument_whose_role_another_one_has_keeps_its_value(tmp_path: Path) -> None:
    code = {"attention": "Heads(n_embd, 4)", "units": "units + 0 * (n_embd // units)"}
    assert units(tmp_path, sizes="vocab_size, block_size, n_embd, n_layer, n_head", **code) == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_embd", CONFIG.n_embd), ("block_size", CONFIG.n_positions), ("n_layer", CONFIG.n_layer)],
)
def test_the_shapes_of_parameters_tell_the_role_of_an_argument(
    tmp_path: Path, name: str, value: int
) -> None:
    """The missing output projections, norms and biases hide it from the number of parameters."""
    assert units(tmp_path, name) == value


def test_the_shapes_of_parameters_tell_the_width_of_the_mlp(tmp_path: Path) -> None:
    assert units(tmp_path, inner="units + 0") == CONFIG.d_inner


def test_a_size_that_gpt2_lacks_keeps_its_value(tmp_path: Path) -> None:
    """The model has all sizes of GPT-2, but fewer parameters than GPT-2."""
    assert units(tmp_path, gate="nn.Linear(n_embd, units + 0)") == 7


def test_a_comment_reads_no_entry_of_a_config(tmp_path: Path) -> None:
    """Because of `e`, which denotes the width, `units` could not be the width."""
    source = MODEL.replace("cfg.kind_of_pos", "'learned'").replace("self.cfg.quick", "True")
    source = source.replace(
        "class GPT(",
        '''class Config:
    def __init__(self, vocab_size=9, block_size=9, n_layer=9, units=9):
        """Set the sizes, i.e those below."""
        self.vocab_size, self.block_size = vocab_size, block_size  # i.e of the vocabulary
        self.n_layer, self.units = n_layer, units

class GPT(''',
    ).replace("__init__(self, cfg)", "__init__(self, cfg: Config)")
    model, _ = built(tmp_path, source, width="units")
    assert model.cfg.units == CONFIG.n_embd


@pytest.mark.parametrize("default", ["swiglu", "relu"])
def test_a_gated_mlp_is_replaced_by_that_of_gpt2(tmp_path: Path, default: str) -> None:
    """A kind that has the parameters of GPT-2's is the author's choice."""
    source = KNOWN.replace(
        "self.cfg, width", "kind = cfg.mlp_type == 'gelu'\n        self.cfg, width"
    )
    fields = f"{SMALL_SIZES}; mlp_type: str = '{default}'"
    model, _ = built(tmp_path, with_config(source, fields))
    assert model.cfg.mlp_type == ("gelu" if default == "swiglu" else default)


def test_a_module_that_is_imported_is_no_entry_of_a_config(tmp_path: Path) -> None:
    """With `feedforward`, the width of the MLP, `hidden_dim` would be that of the stream."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "feedforward.py").write_text("size = 3\n")
    source = KNOWN.replace(
        "from torch import nn", "from torch import nn\nfrom parts.feedforward import size", 1
    )
    model, _ = built(tmp_path, source, "cfg.hidden_dim", "embedding_dim")
    assert model.cfg.hidden_dim == CONFIG.d_inner and model.cfg.embedding_dim == CONFIG.n_embd


@pytest.mark.parametrize(
    ("test", "value"),
    [
        ("cfg.flavor == 'fast' or cfg.flavor[0] == 'L'", "L"),  # a part of it is compared
        ("cfg.flavor not in ('fast', 'sparse')", "default"),  # the code has no branch for it
    ],
)
def test_a_string_with_which_the_code_runs_is_found(tmp_path: Path, test: str, value: str) -> None:
    source = KNOWN.replace(LATE, f"assert cfg.flavor != 'fast' and ({test}); {LATE}")
    fields = "vocab_size: int; block_size: int; n_embd: int; n_layer: int; flavor: str"
    model, call = built(tmp_path, with_config(source, fields))
    assert model.cfg.flavor == value and f"cfg.flavor='{value}'" in call


def test_of_several_kinds_that_of_gpt2_is_chosen(tmp_path: Path) -> None:
    test = "assert cfg.norm_kind == 'rms' or cfg.norm_kind == 'layer_norm'"
    model, call = built(tmp_path, KNOWN.replace(LATE, f"{test}; {LATE}"))
    assert model.cfg.norm_kind == "layer_norm" and "norm_kind='layer_norm'" in call


def test_further_heads_that_are_off_stay_off(tmp_path: Path) -> None:
    source = KNOWN.replace("self, cfg)", "self, vocab_size, n_embd, n_head, n_layer, more_heads=0)")
    source = source.replace("cfg.WIDTH", "n_embd").replace("cfg.block_size", "32")
    source = source.replace("self.cfg, width = cfg,", "self.more, width = more_heads,")
    model, _ = built(tmp_path, source.replace("cfg.", ""))
    assert model.more == 0


@pytest.mark.parametrize("condition", ["<= 0.0", "is not None and cfg.softcap <= 0.0"])
def test_a_cap_of_the_logits_that_must_be_positive(tmp_path: Path, condition: str) -> None:
    """GPT-2 has none. Code that compares it with 0 needs a number unless it tests for None."""
    source = KNOWN.replace(LATE, f"assert not (cfg.softcap {condition}); {LATE}")
    setting = "import os; softcap = float(os.environ.get('CAP', '30'))"
    model, _ = built(tmp_path, f"{source}\n{setting}\n")
    assert model.cfg.softcap == (30.0 if condition == "<= 0.0" else None)


def test_a_switch_that_gpt2_has_stays_on(tmp_path: Path) -> None:
    """The MLP has more parameters than GPT-2's, so that without biases it would have fewer."""
    source = KNOWN.replace("nn.Linear(width, inner)", "nn.Linear(width, inner, bias=BIAS)")
    source = source.replace("class Block", "BIAS = True\n\nclass Block")
    source = source.replace(LATE, f"global BIAS; BIAS = cfg.use_bias; {LATE}")
    source = with_config(source, f"{SMALL_SIZES}; use_bias: bool = True; use_more: bool = True")
    model, _ = built(tmp_path, source, "(5 if cfg.use_more else 4) * width")
    assert model.cfg.use_bias and not model.cfg.use_more
    assert model.blocks[0].mlp[0].bias is not None


def test_the_size_of_a_part_that_is_off_stays_zero(tmp_path: Path) -> None:
    """With the part, the model would have as many parameters as GPT-2."""
    source = KNOWN.replace("self, cfg)", "self, vocab_size, n_embd, n_layer, extra_rows=0)")
    source = source.replace("cfg.WIDTH", "n_embd").replace(
        "nn.Embedding(cfg.block_size, width)", "nn.Embedding(extra_rows, width)"
    )
    source = source.replace("self.cfg, width = cfg,", "self.rows, width = extra_rows,")
    model, _ = built(tmp_path, source.replace("cfg.", ""))
    assert model.rows == 0
    model, _ = built(tmp_path, source.replace("cfg.", "").replace("=0)", "=9)"))
    assert model.rows == CONFIG.n_positions


def test_a_number_of_logits_is_the_vocabulary(tmp_path: Path) -> None:
    """The author's model adds numbers modulo p, and has an id for the sign as well."""
    source = KNOWN.replace("nn.Linear(width, cfg.vocab_size", "nn.Linear(width, cfg.p")
    model, call = built(tmp_path, with_config(source, f"p: int = 7; {SMALL_SIZES}"))
    assert model.cfg.p == CONFIG.vocab_size and f"cfg.p={CONFIG.vocab_size}" in call


def test_an_attention_width_that_the_code_multiplies_by_the_heads_is_that_of_one_head(
    tmp_path: Path,
) -> None:
    source = KNOWN.replace("(self, width, inner)", "(self, width, inner, wide)")
    source = source.replace(
        "3 * width), nn.Linear(width, width)", "3 * wide), nn.Linear(wide, width)"
    )
    source = source.replace("INNER)", "INNER, cfg.attention_inner_dim * cfg.n_head)")
    fields = f"{SMALL_SIZES}; n_head: int = 3; attention_inner_dim: int = 64"
    source = with_config(source, fields)
    model, _ = built(tmp_path, source)
    assert model.cfg.attention_inner_dim == CONFIG.d_head
    model, _ = built(tmp_path, source.replace(" * cfg.n_head)", ")"))
    assert model.cfg.attention_inner_dim == CONFIG.n_embd


def test_the_width_of_one_head_is_found_in_a_section_of_a_config(tmp_path: Path) -> None:
    """The entries of a section are not tried, so that the code has to tell the role."""
    section = """
from dataclasses import dataclass

@dataclass
class Attention:
    n_head: int = 3
    attention_inner_dim: int = 64

"""
    source = KNOWN.replace(LATE, f"all = cfg.part.attention_inner_dim * cfg.part.n_head; {LATE}")
    source = section + with_config(source, f"part: Attention; {SMALL_SIZES}")
    model, _ = built(tmp_path, source)
    assert model.cfg.part.attention_inner_dim == CONFIG.d_head
    model, _ = built(tmp_path, source.replace(" * cfg.part.n_head", ""))
    assert model.cfg.part.attention_inner_dim == CONFIG.n_embd
