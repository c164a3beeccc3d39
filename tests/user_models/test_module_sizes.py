"""Module-level sizes are the checkpoint's while a model is built or run, and then restored."""

from __future__ import annotations

import ast
import copy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compat import AdaptError, GPT2Config
from compat.user_models import construct, load_target, resized
from compat.user_models.usage import assigned
from tests.adapt_project import GPT
from tests.command_line import Cli
from tests.user_models.own_file import CONFIG, build, described, loaded

SIZES = """
n_layer = 5
SIZES = {"vocab_size": 7}


class Config:
    n_ctx = 9


class WidthConfig:
    n_embd = 10


width = WidthConfig()
"""
MODEL = (
    GPT.replace("self.heads, -1", "n_head, -1")
    + """
from own_package import sizes
from own_package.sizes import Config, SIZES, width

n_head = 3


class Own(MyGPT):
    def __init__(self, fails=False):
        n_embd, vocab_size, n_ctx, n_layer = (
            width.n_embd, SIZES["vocab_size"], Config.n_ctx, sizes.n_layer
        )
        super().__init__(vocab_size, n_ctx, n_embd, n_head, n_layer)
        self.built_for = vocab_size, n_ctx, n_embd, n_layer, n_head
        if fails:
            raise ValueError("by the user's code")


class Raising(Own):
    def forward(self, ids):
        raise ValueError(f"by the user's code, {n_head} heads")
"""
)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    """A user's package, which other code of the process also uses."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text(SIZES)
    (package / "models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    load_target("own_package.models:Own")
    names = ["own_package", "own_package.models", "own_package.sizes"]
    yield [sys.modules[name] for name in names]
    for name in names:
        del sys.modules[name]


def state(modules: list[ModuleType]) -> list[Any]:
    """Return the plain values of the modules, and of the classes and instances in them."""
    found: list[Any] = []
    for module in modules:
        for name, value in sorted(vars(module).items()):
            owned = {k: v for k, v in getattr(value, "__dict__", {}).items() if k[0] != "_"}
            kept = owned if getattr(value, "__module__", "").startswith("own_package") else value
            if isinstance(value, int | dict) or kept is owned:
                found.append((module.__name__, name, copy.copy(kept)))
    return [entry for entry in found if entry[1] != "__builtins__"]


def test_modules_are_restored_after_the_model_is_built(modules: list[ModuleType]) -> None:
    before = state(modules)
    assert construct(load_target("own_package.models:Own"), CONFIG).built_for == (97, 32, 24, 3, 4)
    assert state(modules) == before
    with pytest.raises(AdaptError, match="by the user's code"):
        construct(load_target("own_package.models:Own"), CONFIG, kwargs={"fails": True})
    assert state(modules) == before


def test_the_model_runs_with_the_sizes_for_which_it_was_built(modules: list[ModuleType]) -> None:
    before = state(modules)
    model = construct(load_target("own_package.models:Own"), CONFIG)
    with resized(type(model), CONFIG):
        assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 97)
        with resized(type(model), CONFIG):
            pass
        assert vars(modules[1])["n_head"] == 4
    assert state(modules) == before


@pytest.mark.parametrize(("name", "code"), [("Own", 0), ("Raising", 1)])
def test_adapt_restores_modules(
    modules: list[ModuleType], cli: Cli, tiny: Path, name: str, code: int
) -> None:
    before = state(modules)
    done = cli("adapt", f"own_package.models:{name}", "--model", tiny)
    assert (done.code, "by the user's code, 4 heads" in done.out) == (code, code == 1)
    assert state(modules) == before


def test_values_that_are_computed_from_sizes_are_updated(tmp_path: Path) -> None:
    """Defaults are computed when a function is defined, and globals when they are assigned."""
    text = """
n_embd, n_head = 10, 2
n_layer = 6
fused = 3 * n_embd
named = len("fixed")


class Part(MyGPT):
    def __init__(self, width=n_embd, each=n_embd // n_head, depth=n_layer, *, most=2 * n_layer):
        self.built_for = width, each, depth, most, fused, named
        super().__init__(5, 5, 8, 2, 1)


class Own(MyGPT):
    def __init__(self):
        super().__init__(5, 5, 8, 2, 1)
        self.part = Part()
"""
    cls = loaded(tmp_path, GPT + text, "Own")
    assert cls().part.built_for == (10, 5, 6, 12, 30, 5)
    assert construct(cls, CONFIG).part.built_for == (24, 6, 3, 6, 72, 5)
    assert cls().part.built_for == (10, 5, 6, 12, 30, 5)


def test_a_size_that_is_computed_from_sizes_alone_has_no_role_by_its_name(tmp_path: Path) -> None:
    """Without underscores, `head_s` is a number of heads."""
    text = """
n_embd, n_head = 10, 2
head_s = n_embd // n_head


class Own(MyGPT):
    def __init__(self):
        self.built_for = n_embd, n_head, head_s
        super().__init__(5, 5, 8, 2, 1)
"""
    assert construct(loaded(tmp_path, GPT + text, "Own"), CONFIG).built_for == (24, 4, 6)


@pytest.mark.parametrize(
    ("statement", "pairs"),
    [
        ("a = x", "a=x"),
        ("a: int = x", "a=x"),
        ("a, b = x, y", "a=x b=y"),
        ("a, *b = x, y, z", "a=x"),
        ("*a, b = x, y, z", ""),
        ("a: int", ""),
    ],
)
def test_targets_of_an_assignment_are_paired_with_their_values(statement: str, pairs: str) -> None:
    [node] = ast.parse(statement).body
    found = [f"{ast.unparse(target)}={ast.unparse(value)}" for target, value in assigned(node)]
    assert found == pairs.split()


def test_annotated_values_that_are_computed_from_sizes_are_updated(tmp_path: Path) -> None:
    text = """
from torch import nn

n_embd: int = 10
fused: int = 3 * n_embd

class GPT(nn.Linear):
    def __init__(self):
        super().__init__(n_embd, fused)
"""
    assert build(tmp_path, text).weight.shape == (72, 24)


def test_a_size_that_equals_another_one_has_its_role(tmp_path: Path) -> None:
    """Here, `head_size` is the width, and the module with the sizes contains only numbers."""
    (tmp_path / "sizes_as_numbers.py").write_text("n_embd = 10\nhead_size = n_embd\n")
    text = """
from sizes_as_numbers import *


class Own(MyGPT):
    def __init__(self):
        super().__init__(5, 5, 8, 2, 1)
        self.built_for = n_embd, head_size
"""
    cls = loaded(tmp_path, GPT + text, "Own")
    assert construct(cls, CONFIG).built_for == (24, 24)
    assert cls().built_for == (10, 10)


@pytest.mark.parametrize(("words", "expected"), [(5, 24), (600, 10)])
def test_a_vocabulary_is_not_a_config(tmp_path: Path, words: int, expected: int) -> None:
    text = f"""
TABLE = {{"n_embd": 10, **{{f"word{{i}}": i for i in range({words})}}}}


class Own(MyGPT):
    def __init__(self):
        super().__init__(5, 5, 8, 2, 1)
        self.built_for = TABLE["n_embd"]
"""
    assert build(tmp_path, GPT + text, "Own").built_for == expected


def test_a_meaningless_name_has_the_role_of_the_parameter_to_which_it_is_passed(
    tmp_path: Path,
) -> None:
    """`a2` is passed as `n_head`, `b6` as the second parameter, and `c7` as two different ones.

    `d3`, `e1` and `f2` are computed from another one.
    """
    text = """
a2, b6, c7 = 2, 6, 7
n_embd = 5
d3 = n_embd // 5 * 3
e1, f2 = n_embd, 2 * n_embd


class Part:
    def __init__(self, width, n_layer, n_head, n_embd=0):
        self.built_for = width, n_layer, n_head, n_embd


class Own(MyGPT):
    def __init__(self):
        super().__init__(5, 5, 8, 2, 1)
        self.parts = Part(c7, b6, n_head=a2), Part(1, c7, d3, n_embd=c7)
        self.pair = e1, f2
"""
    model = build(tmp_path, GPT + text, "Own")
    first, second = model.parts
    assert model.pair == (24, 48)
    assert first.built_for == (7, 3, 4, 0) and second.built_for == (1, 7, 12, 7)


@pytest.mark.parametrize(("argument", "expected"), [("block_size", 8), ("text", 32)])
def test_a_window_in_addition_to_the_context_length_is_not_a_size(
    tmp_path: Path, argument: str, expected: int
) -> None:
    text = f"""
from torch import nn

WINDOW = 8


class Own(nn.Module):
    def __init__(self, vocab_size, {argument}=5):
        super().__init__()
        self.window, self.table = WINDOW, nn.Embedding(vocab_size, 3)
"""
    assert build(tmp_path, text, "Own").window == expected


@pytest.mark.parametrize(("own", "expected"), [(256, 24), (32, 6)])
def test_a_head_size_that_equals_the_width_is_that_of_all_heads(
    tmp_path: Path, own: int, expected: int
) -> None:
    text = f"""
from torch import nn

n_emb, n_heads, head_size = 256, 8, {own}

class GPT(nn.Linear):
    def __init__(self):
        super().__init__(n_emb, head_size)
"""
    assert build(tmp_path, text).out_features == expected


def test_a_size_that_a_global_dictionary_lacks_is_added(tmp_path: Path) -> None:
    """A script would add it before it builds the model."""
    text = """
from torch import nn

PARAMS = {"embd": 384, "n_layers": 6}

class GPT(nn.Embedding):
    def __init__(self):
        super().__init__(PARAMS["vocab_size"], PARAMS["embd"])
"""
    model, call = described(tmp_path, text)
    assert (model.num_embeddings, model.embedding_dim) == (97, 24)
    assert call.endswith('does not define, so compat set PARAMS["vocab_size"]=97')
    assert vars(sys.modules[type(model).__module__])["PARAMS"] == {"embd": 384, "n_layers": 6}


def test_the_attributes_that_a_global_object_lacks_are_added(tmp_path: Path) -> None:
    """A script would set them before it builds the model, as in `config.set(n_embd=384)`."""
    text = """
from torch import nn

class Config:
    def __init__(self):
        self.epochs = 3

    def set(self, **values):
        vars(self).update(values)

config = Config()

class GPT(nn.Embedding):
    def __init__(self, vocab_size):
        super().__init__(vocab_size, config.n_embd)
        self.sizes = config.n_layer, config.n_head, config.device, config.epochs
"""
    model, call = described(tmp_path, text)
    assert (model.num_embeddings, model.embedding_dim) == (97, 24)
    assert model.sizes == (CONFIG.n_layer, CONFIG.n_head, "cpu", 3)
    assert "compat set config.device='cpu', config.n_embd=24, config.n_head=" in call
    assert vars(vars(sys.modules[type(model).__module__])["config"]) == {"epochs": 3}


def test_uncommon_names_of_the_rows_and_the_width_of_embeddings_are_recognized(
    tmp_path: Path,
) -> None:
    """Here, `token_size` is the context length, and the vocabulary comes from missing data."""
    text = """
import torch
from torch import nn

symbols_there = len(set(open("no such file").read()))
token_size, per_symbol = 256, 384

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbol_table = nn.Embedding(symbols_there, per_symbol)
        self.position_table = nn.Embedding(token_size, per_symbol)

    def forward(self, ids):
        x = self.symbol_table(ids) + self.position_table(torch.arange(ids.shape[1]))
        return x @ self.symbol_table.weight.T
"""
    model = build(tmp_path, text)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {
        "symbol_table.weight": (97, 24), "position_table.weight": (32, 24),
    }  # fmt: skip


def test_threads_can_build_models_of_different_sizes(modules: list[ModuleType]) -> None:
    before = state(modules)
    cls, built = load_target("own_package.models:Own"), {}

    def build(layers: int) -> None:
        config = GPT2Config(vocab_size=97, n_positions=32, n_embd=24, n_layer=layers, n_head=4)
        for _ in range(20):
            built.setdefault(layers, set()).add(construct(cls, config).built_for)

    threads = [threading.Thread(target=build, args=(layers,)) for layers in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == {layers: {(97, 32, 24, layers, 4)} for layers in (1, 2, 3)}
    assert state(modules) == before


def test_the_number_of_layers_of_a_config_that_the_constructor_makes_is_found(
    tmp_path: Path,
) -> None:
    """No other number is repeated, or else none is taken for it."""
    text = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Sizes:
    n_vocab: int = 5
    n_ctx: int = 6
    width: int = 8
    copies: int = 2
    more: int = 2

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = c = Sizes()
        self.wte, self.wpe = nn.Embedding(c.n_vocab, c.width), nn.Embedding(c.n_ctx, c.width)
        self.layers = nn.ModuleList([nn.Linear(c.width, c.width) for _ in range(c.copies)])

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        return x @ self.wte.weight.T
"""
    model = build(tmp_path, text)
    assert len(model.layers) == 3 and model.c.more == 2
    several = text.replace(" for _ in range(c.copies)]", " for _ in range(c.copies)] + "
                           "[nn.Linear(1, 1) for _ in range(c.more)]")  # fmt: skip
    assert len(build(tmp_path, several).layers) == 4
    as_global = text.replace(
        "    copies: int = 2\n    more: int = 2\n", "\nwidth, n_ctx, copies = 8, 6, 2\n"
    )
    as_global = as_global.replace("c.copies", "copies")
    assert len(build(tmp_path, as_global).layers) == 3


def test_a_size_of_an_embedding_may_have_the_name_of_another(tmp_path: Path) -> None:
    """The characters are called channels, and the width has another name."""
    source = """
from torch import nn

CHANNELS, EMB_DIM = 65, 384

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(CHANNELS, EMB_DIM)
        self.sizes = CHANNELS, EMB_DIM
"""
    assert build(tmp_path, source).sizes == (CONFIG.vocab_size, CONFIG.n_embd)


def test_the_number_of_heads_may_be_called_a_head_size(tmp_path: Path) -> None:
    """The same name is an argument elsewhere."""
    source = """
from torch import nn

n_embd, head_size = 384, 8

class Head(nn.Module):
    def __init__(self, head_size):
        super().__init__()

class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        head_size = n_embd // n_head
        self.sizes = n_embd, n_head
        self.heads = [Head(head_size) for _ in range(n_head)]

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = Block(n_embd, head_size).sizes
"""
    assert build(tmp_path, source).sizes == (CONFIG.n_embd, CONFIG.n_head)
    own = source.replace("Block(n_embd, head_size)", "Block(n_embd, n_embd // head_size)")
    assert build(tmp_path, own).sizes == (CONFIG.n_embd, CONFIG.n_head)


def test_a_module_of_a_layer_is_not_a_size_of_the_config(tmp_path: Path) -> None:
    """The width of the MLP is `hidden_dim`, which would be that of the model beside another one."""
    source = """
from torch import nn

class Config:
    def __init__(self, dim=512, n_layers=8, hidden_dim: int = None):
        self.dim, self.n_layers, self.hidden_dim = dim, n_layers, hidden_dim

class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.sizes = config.dim, config.hidden_dim

class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.feed_forward = FeedForward(config)

class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        blocks = [layer.feed_forward for layer in self.layers]
        self.sizes = blocks[0].sizes
"""
    assert build(tmp_path, source).sizes == (CONFIG.n_embd, 4 * CONFIG.n_embd)


def test_a_flag_of_a_missing_library_has_the_checkpoints_value(tmp_path: Path) -> None:
    source = """
from no_such_library import flags
import torch
from torch import nn

_BLOCK_SIZE = flags.DEFINE_integer("block_size", 8, "Context length")
_N_EMBD = flags.DEFINE_integer("n_embd", 6, "Width")


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, _N_EMBD.value)
        self.wpe = nn.Embedding(_BLOCK_SIZE.value, _N_EMBD.value)
"""
    model = build(tmp_path, source)
    assert model.wpe.weight.shape == (CONFIG.n_positions, CONFIG.n_embd)


@pytest.mark.parametrize("end", ["", "1 / 0  # so only what the model needs is executed"])
@pytest.mark.parametrize("config", ["no_such_library.config", "run.config"])
def test_a_config_that_is_passed_to_a_missing_library_is_read_from_it(
    tmp_path: Path, config: str, end: str
) -> None:
    """Libraries for logging keep it."""
    source = f"""
import no_such_library
from torch import nn

run = no_such_library.init(project="gpt", config={{"n_embd": 6, "block_size": 8}})
config = {config}


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)


{end}
"""
    if "run" not in config:
        source = source.replace("run = ", "")
    model = build(tmp_path, source)
    assert model.wpe.weight.shape == (CONFIG.n_positions, CONFIG.n_embd)
