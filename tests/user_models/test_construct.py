"""construct passes the checkpoint's sizes as arguments and configs, and calls functions."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
import torch
import transformers
from torch import Tensor, nn

from compat import AdaptError, GPT2Config
from compat.user_models import construct, construct_with_call
from compat.user_models.eval_mode import ModelState, eval_mode
from tests.user_models import own_file
from tests.user_models.constructors import CORE, DATACLASS, READ, STYLES, gpt
from tests.user_models.own_file import CONFIG, loaded

SIZES = (97, 32, 24, 3, 4)
NOTHING = "1, 2, 3, 4, 5"


def build(tmp_path: Path, source: str, config: GPT2Config = CONFIG, **how: Any) -> Any:
    return own_file.build(tmp_path, CORE + source, config=config, **how)


def described(tmp_path: Path, source: str, **how: Any) -> tuple[Any, str]:
    return own_file.described(tmp_path, CORE + source, **how)


@pytest.mark.parametrize("style", STYLES)
def test_sizes_are_passed_in_every_style(tmp_path: Path, style: str) -> None:
    assert build(tmp_path, STYLES[style]).sizes == SIZES


def test_a_dictionary_has_exactly_the_keys_that_the_classes_read(tmp_path: Path) -> None:
    source = """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c["emb_dim"], eps=c["norm_eps"])
        self.heads, self.qkv_bias = c["n_heads"], c["qkv_bias"]

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(cfg["n_layers"])])
        self.drop = nn.Dropout(cfg["drop_rate"])

    def forward(self, ids):
        return ids[:, -self.cfg["context_length"]:]

    def train_it(self):
        return self.cfg["learning_speed"]
"""
    model = build(tmp_path, source, dataclasses.replace(CONFIG, resid_pdrop=0.3))
    assert model.cfg == {
        "n_layers": 3, "drop_rate": 0.3, "emb_dim": 24, "norm_eps": 1e-5, "n_heads": 4,
        "qkv_bias": True, "context_length": 32,
    }  # fmt: skip
    assert type(model.cfg) is dict and len(model.blocks) == 3 and model.blocks[0].heads == 4


def test_dropout_eps_biases_and_tying_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    names = (
        "attn_pdrop resid_pdrop embd_pdrop dropout ln_eps tie_weights qkv_bias head_dim mlp_ratio "
        "d_ff device"
    ).split()
    source = gpt(", " + ", ".join(names), "1, 2, 3, 4, 5, (" + ", ".join(names) + ")")
    config = dataclasses.replace(
        CONFIG, attn_pdrop=0.5, resid_pdrop=0.25, embd_pdrop=0.125, layer_norm_epsilon=1e-3,
        tie_word_embeddings=False, qkv_bias=False, n_inner=72,
    )  # fmt: skip
    got = build(tmp_path, source, config).extra
    assert got == (0.5, 0.25, 0.125, 0.25, 1e-3, False, False, 6, 3, 72, "cpu")


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("hidden_size, heads", 24),
        ("hidden_size, intermediate_size", 24),
        ("d_model, hidden_size", 96),
        ("hidden_dim, emb_dim", 96),
        ("hidden_dim, hidden_size", 96),
        ("hidden_size, hidden_dim", 24),
        ("d_hid, heads", 24),
        ("d_model, d_hid", 96),
        ("d_model, hidden_ff", 96),
    ],
)
def test_hidden_size_is_the_mlp_width_only_if_there_is_another_width(
    tmp_path: Path, signature: str, expected: int
) -> None:
    name = next(n for n in signature.split(", ") if "hid" in n)
    assert build(tmp_path, gpt(f", {signature}", f"0, 0, 0, 0, 0, {name}")).extra == expected


def test_switches_that_deviate_from_gpt2_are_off(tmp_path: Path) -> None:
    source = gpt(", use_rmsnorm=True, pre_norm=False", f"{NOTHING}, (use_rmsnorm, pre_norm)")
    assert build(tmp_path, source).extra == (False, True)


def test_the_score_of_masked_tokens_is_very_low(tmp_path: Path) -> None:
    source = gpt(", masking_minus_inf", f"{NOTHING}, masking_minus_inf")
    assert build(tmp_path, source).extra == -1e9


def test_no_preset_of_a_table_is_selected(tmp_path: Path) -> None:
    """The checkpoint's sizes are passed instead."""
    sizes = ", ".join(f'c["{n}"]' for n in "vocab_size ctx n_embd n_layer n_head models".split())
    before = "assert c['model_type'] not in c['models']"
    model = build(tmp_path, gpt(", c", sizes, before))
    assert (model.sizes[2:], model.extra) == ((24, 3, 4), {})


def test_defaults_without_a_role_or_of_another_type_are_kept(tmp_path: Path) -> None:
    source = gpt(
        ", vocab_size, magic=3, activation='swish', mlp=None, dropout=nn.Dropout, n_inner=None",
        "vocab_size, 0, 0, 0, 0, (magic, activation, mlp, dropout, n_inner)",
    )
    assert build(tmp_path, source).extra == (3, "swish", None, nn.Dropout, 96)
    model = build(tmp_path, DATACLASS + gpt(", c: GPTConfig", READ, "self.c = c"))
    assert (model.c.flash, model.c.activation, model.c.dropout) == ("auto", "tanh-gelu", 0.1)


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ("{'gelu': 1, 'gelu_new': 2}[act]", 2),
        ("{'relu': 0, 'gelu': 1}[act]", 1),
        ("{'gelu': nn.GELU(), 'tanh': nn.Tanh(), 'relu': 0} and {'gelu': 1, 'tanh': 0}[act]", 1),
        ("dict(gelu=nn.GELU(approximate='tanh')) and {'relu': 0, 'gelu': 1}[act]", 1),
        ("{'ReLU': 0, 'GeLU': 1}[act]", 1),
        ("{'relu': 0, 'silu': 1}[act] if act == 'relu' or act == 'silu' else None", 0),
    ],
)
def test_the_activation_has_a_name_that_the_code_knows(
    tmp_path: Path, reads: str, expected: int
) -> None:
    assert build(tmp_path, gpt(", act", f"0, 0, 0, 0, 0, {reads}")).extra == expected


@pytest.mark.parametrize(
    ("load", "size"),
    [
        ("transformers.AutoTokenizer.from_pretrained", "vocab_size"),
        ("transformers.GPT2Tokenizer.from_pretrained", "vocab_size"),
        ("tiktoken.get_encoding", "n_vocab"),
    ],
)
@pytest.mark.parametrize("fails", [True, False])
def test_a_tokenizer_that_cannot_be_downloaded_has_the_size_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str, size: str, fails: bool
) -> None:
    """Without the files, the function raises an OSError, or returns an empty tokenizer."""

    def loaded(*_: object) -> object:
        if fails:
            raise OSError("no network")
        return SimpleNamespace(vocab_size=0, n_vocab=0)

    owner: Any = {
        "AutoTokenizer": transformers.AutoTokenizer,
        "GPT2Tokenizer": transformers.PreTrainedTokenizerBase,
    }.get(load.split(".")[1], tiktoken)
    function = load.split(".")[-1]
    monkeypatch.setattr(owner, function, loaded if owner is tiktoken else classmethod(loaded))
    before = f"import tiktoken, transformers; tokenizer = {load}('gpt2')"
    source = gpt(", d", f"tokenizer.{size}, 0, 0, 0, 0, len(tokenizer)", before)
    model = build(tmp_path, source)
    assert model.sizes[0] == model.extra == CONFIG.vocab_size


def test_a_tokenizer_that_cannot_be_downloaded_has_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> object:
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", fails)
    special = "tiktoken.get_encoding('gpt2')._special_tokens['<|endoftext|>']"
    source = gpt(", n_vocab", f"n_vocab, 0, 0, 0, 0, {special}", "import tiktoken")
    assert build(tmp_path, source).extra == CONFIG.vocab_size - 1


@pytest.mark.parametrize(
    ("test", "expected"),
    [("ffn == 'gelu'", "gelu"), ("ffn.lower() in ('relu', 'gelu')", "gelu"), ("ffn == 8", 96)],
)
def test_an_argument_that_is_compared_with_a_string_is_not_a_size(
    tmp_path: Path, test: str, expected: object
) -> None:
    """How the argument is used counts more than its name, which is that of an MLP width."""
    before = f"assert {test} or not isinstance(ffn, str)"
    assert build(tmp_path, gpt(", ffn", "0, 0, 0, 0, 0, ffn", before)).extra == expected


def test_a_class_inside_a_function_with_sizes_is_built_by_the_function(tmp_path: Path) -> None:
    source = """
from dataclasses import dataclass

@dataclass
class TrainConfig:
    data_dir: str
    embed_dim: int = 8
    n_layers: int = 2
    n_heads: int = 2

def train(config):
    return open(config.data_dir)

def build_gpt(torch, nn, vocab_size, max_len, config: TrainConfig):
    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocab_size, config.embed_dim)
            self.pos = nn.Embedding(max_len, config.embed_dim)
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(config.embed_dim,
                config.n_heads) for _ in range(config.n_layers))

        def forward(self, ids):
            return self.embed(ids)

    return GPT()
"""
    target = loaded(tmp_path, CORE + source, None)
    assert target.__name__ == "build_gpt"
    model, call = construct_with_call(target, CONFIG)
    assert (len(model.blocks), model.pos.num_embeddings) == (3, 32)  # type: ignore[arg-type,union-attr]
    assert call.startswith("build_gpt(torch=torch, nn=torch.nn, vocab_size=97, max_len=32, config=")


@pytest.mark.parametrize("head", ["_head", ""])
def test_a_head_is_divided_into_a_part_that_is_rotated_and_the_rest(
    tmp_path: Path, head: str
) -> None:
    names = "n_vocab, ctx, width, depth, heads"
    parts = f"rope{head}_dim, qk_nope{head}_dim"
    model = build(tmp_path, gpt(f", {names}, {parts}", f"{names}, ({parts})"))
    assert model.extra == (3, 3)
    assert build(tmp_path, gpt(f", {names}, rope_head_dim", f"{names}, rope_head_dim")).extra == 6


def test_an_argument_whose_length_is_used_is_a_vocabulary(tmp_path: Path) -> None:
    counted = gpt(", vocab", "len(vocab), 0, 0, 0, 0, vocab")
    model = build(tmp_path, counted)
    assert model.sizes[0] == len(set(model.extra)) == 97
    assert build(tmp_path, counted.replace("len(vocab)", "vocab")).extra == 97
    of_class = (
        "class Encoder:\n    def __init__(self, chars):\n        self.n_vocab = len(set(chars))\n"
        + gpt(", encoder: Encoder", "encoder.n_vocab, 0, 0, 0, 0")
    )
    assert build(tmp_path, of_class).sizes[0] == 97
    by_method = gpt(", tokenizer", "tokenizer.len(), 0, 0, 0, 0")
    assert build(tmp_path, by_method).sizes[0] == 97


def test_an_argument_that_is_annotated_as_a_string_is_not_a_size(tmp_path: Path) -> None:
    for annotation, expected in ((": int", 96), (": str = None", None)):
        model = build(tmp_path, gpt(f", ffn{annotation}", "0, 0, 0, 0, 0, ffn"))
        assert model.extra == expected


def test_only_globals_of_sibling_modules_are_set(tmp_path: Path) -> None:
    (tmp_path / "sizes_here.py").write_text("n_embd = 8\nbatch_size = 5\nn_layer = 2\n")
    source = "import sizes_here\nfrom sizes_here import n_embd, batch_size\n"
    source += "n_head = 9\nunused = n_ctx = 1\nT = True\n"
    use = "batch_size, sizes_here.n_embd, n_embd, sizes_here.n_layer, n_head, T"
    model = build(tmp_path, source + gpt("", use))
    assert (model.sizes, model.extra) == ((5, 24, 24, 3, 4), True)
    assert vars(sys.modules[type(model).__module__])["n_ctx"] == 1


@pytest.mark.parametrize("config", ["", DATACLASS], ids=["namespace", "dataclass"])
def test_a_config_can_be_exported_like_those_of_transformers(tmp_path: Path, config: str) -> None:
    annotation = ", c: GPTConfig" if config else ", config"
    read = READ if config else READ.replace("c.", "config.")
    saved = "self.saved = c.to_dict()" if config else "self.saved = config.to_dict()"
    model = build(tmp_path, config + gpt(annotation, read, saved))
    assert model.sizes == SIZES
    assert set(SIZES) <= set(model.saved.values()) and "to_dict" not in model.saved


def test_embeddings_may_come_from_a_model_of_transformers(tmp_path: Path) -> None:
    sizes = "b.config.vocab_size, b.wpe.num_embeddings, b.wte.embedding_dim, depth, heads"
    model = build(tmp_path, gpt(", b, depth, heads", sizes, "wte = b.wte"))
    assert model.sizes == SIZES


def test_a_config_class_of_an_imported_module_is_used(tmp_path: Path) -> None:
    """The class is used because it fits, although the model's module does not name it."""
    text = f"from dataclasses import dataclass\n{DATACLASS}"
    (tmp_path / "own_settings.py").write_text(text)
    (tmp_path / "own_parts.py").write_text("from own_settings import GPTConfig\nPART = 1\n")
    sizes = f"{READ}, c.flash".replace("c.", "config.")
    model = build(tmp_path, f"import own_parts\n{gpt(', config', sizes)}")
    assert (model.sizes, model.extra) == (SIZES, "auto")


def test_globals_are_restored_if_the_constructor_raises(tmp_path: Path) -> None:
    sizes = "n_embd = 384\nHP = {'n_head': 7}\n"
    cls = loaded(tmp_path, CORE + sizes + gpt("", "", "raise ValueError(n_embd, HP['n_head'])"))
    with pytest.raises(AdaptError, match=r"ValueError: \(24, 4\)"):
        construct(cls, CONFIG)
    module = vars(sys.modules[cls.__module__])
    assert (module["n_embd"], module["HP"]) == (384, {"n_head": 7})


def test_a_built_model_can_be_run(tmp_path: Path) -> None:
    source = """
n_head = 2

class Block(nn.Module):
    def __init__(self, n_embd, block_size):
        super().__init__()
        self.ln = nn.LayerNorm(n_embd)
        self.attn = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
        self.register_buffer("mask", torch.ones(block_size, block_size).triu(1).bool())

    def forward(self, x):
        y, T = self.ln(x), x.shape[1]
        return x + self.attn(y, y, y, attn_mask=self.mask[:T, :T], need_weights=False)[0]

class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, block_size, n_layer):
        super().__init__()
        print("building")
        self.tok, self.pos = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, block_size) for _ in range(n_layer)])
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, ids):
        return self.head(self.blocks(self.tok(ids) + self.pos(torch.arange(ids.shape[1]))))
"""
    model = build(tmp_path, source)
    assert model(torch.zeros(2, 13, dtype=torch.long)).shape == (2, 13, 97)
    assert [model.pos.num_embeddings, len(model.blocks), model.blocks[0].attn.num_heads] == [
        32,
        3,
        4,
    ]


def test_construct_does_not_redirect_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the command line redirects it; the library must not change the process's stdout."""
    build(tmp_path, "print('importing')\n" + gpt("", NOTHING, "print('building')"))
    assert capsys.readouterr() == ("importing\nbuilding\n", "")


# Functions

MAKE = "\nn_layer = 8\n\ndef make_model({}):\n    return Core({})\n"


@pytest.mark.parametrize(
    ("signature", "sizes", "kwargs", "expected"),
    [
        ("", "1, 2, 3, n_layer, 5", {}, (1, 2, 3, 8, 5)),
        ("it", "it.vocab_size, it.n_positions, it.n_embd, it.n_layer, it.n_head", {}, SIZES),
        ("config=None", "1, 2, config.n_embd, 4, 5", {}, (1, 2, 24, 4, 5)),
        ("width=3", "1, 2, width, 4, 5", {}, (1, 2, 3, 4, 5)),
        ("cfg, width=3", "1, 2, width, cfg.n_layer, 5", {"width": 6}, (1, 2, 6, 3, 5)),
    ],
)
def test_a_function_with_a_config_argument_receives_the_config(
    tmp_path: Path, signature: str, sizes: str, kwargs: dict[str, Any], expected: tuple[int, ...]
) -> None:
    source = MAKE.format(signature, sizes)
    assert build(tmp_path, source, name="make_model", kwargs=kwargs).sizes == expected


@pytest.mark.parametrize(
    ("source", "fragment"),
    [
        (MAKE.format("config, other", NOTHING), "make_model needs the argument other"),
        (
            "\ndef make_model():\n    return {}\n",
            "make_model returns dict; it must return an nn.Mod",
        ),
        (MAKE.format("", "1 / 0"), "ZeroDivisionError: division by zero\n  at "),
    ],
)
def test_a_function_that_does_not_return_a_model_is_refused(
    tmp_path: Path, source: str, fragment: str
) -> None:
    with pytest.raises(AdaptError) as caught:
        build(tmp_path, source, name="make_model")
    assert fragment in str(caught.value)


def test_a_config_that_is_copied_to_self_has_the_entries_that_are_read_there(
    tmp_path: Path,
) -> None:
    source = """
class GPT(Core):
    def __init__(self, config):
        nn.Module.__init__(self)
        for name, value in config.items():
            setattr(self, name, value)
        self.register_buffer("bias", torch.zeros(self.block_size))
        self.n_head = self.n_head // 1
        self.sizes = (self.vocab_size, self.block_size, self.n_embd, self.n_layer, self.n_head)
        self.norm = nn.LayerNorm(self.sizes[2])
"""
    assert build(tmp_path, source).sizes == SIZES


def test_keywords_that_a_constructor_ignores_are_not_those_of_its_base(tmp_path: Path) -> None:
    source = """
class Base(Core):
    def __init__(self, Embedder, vocab_size, n_embd):
        super().__init__(vocab_size, 0, n_embd, 0, 0, Embedder)

class GPT(Base):
    def __init__(self, vocab_size, n_embd, **kwargs):
        super().__init__(None, vocab_size, n_embd)
"""
    model = build(tmp_path, source)
    assert model.extra is None and model.sizes[::2] == (SIZES[0], SIZES[2], 0)


def test_names_of_libraries_are_not_config_entries(tmp_path: Path) -> None:
    source = gpt(", c", READ, "self.kept = c, nn.Embedding, torch.zeros(2, 2).T")
    assert "Embedding" not in vars(build(tmp_path, source).kept[0])
    assert "T" not in vars(build(tmp_path, source).kept[0])


def test_a_limit_of_rows_exceeds_the_batches_of_the_proof(tmp_path: Path) -> None:
    source = gpt(", vocab_size, max_batch=1", "vocab_size, 0, 0, 0, 0, max_batch")
    assert build(tmp_path, source).extra == 66
    assert build(tmp_path, source, GPT2Config()).extra == 16  # its cache would be too large


# Arguments of the caller


def test_kwargs_replace_the_determined_arguments(tmp_path: Path) -> None:
    source = gpt(", vocab_size, n_layer, magic", "vocab_size, 0, 0, n_layer, 0, magic")
    model = build(tmp_path, source, kwargs={"n_layer": 7, "magic": [1]})
    assert (model.sizes, model.extra) == ((97, 0, 0, 7, 0), [1])


@pytest.mark.parametrize(
    "style", ["dict", "attributes", "annotated dataclass", "dataclass by name"]
)
def test_a_dictionary_for_the_config_argument_is_merged(tmp_path: Path, style: str) -> None:
    source = STYLES[style]
    name = source.rpartition("__init__(self, ")[2].partition(")")[0].partition(":")[0]
    layers = "n_layers" if style == "dict" else "n_layer"
    assert build(tmp_path, source, kwargs={name: {layers: 7}}).sizes == (97, 32, 24, 7, 4)


def test_a_named_config_is_passed_unchanged(tmp_path: Path) -> None:
    source = "\nMINE = SimpleNamespace(vocab_size=1, block_size=2, n_embd=3, n_layer=4, n_head=5)\n"
    source += gpt(", c, magic=0", f"{READ}, magic")
    model = build(tmp_path, source, config_name="MINE", kwargs={"magic": 6})
    assert (model.sizes, model.extra) == ((1, 2, 3, 4, 5), 6)
    changed = build(tmp_path, source, config_name="MINE", kwargs={"c": {"n_head": 9}})
    assert changed.sizes == (1, 2, 3, 4, 9)
    mine = vars(sys.modules[type(changed).__module__])["MINE"]
    assert isinstance(mine, SimpleNamespace) and mine.n_head == 5
    source = "\nMINE = {'n': 1, 'm': 2}\n" + gpt(", cfg", f"{NOTHING}, (cfg['n'], cfg['m'])")
    changed = build(tmp_path, source, config_name="MINE", kwargs={"cfg": {"m": 3}})
    module = vars(sys.modules[type(changed).__module__])
    assert (changed.extra, module["MINE"]) == ((1, 3), {"n": 1, "m": 2})


# Errors

ERRORS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "argument": (
        gpt(", vocab_size, foo, bar", NOTHING),
        {},
        ["GPT needs the arguments foo and bar",
         "vocab_size 97, n_positions 32, n_embd 24, n_layer 3",
         """--kwargs '{"foo": ..., "bar": ...}'"""],
    ),
    "key": (
        gpt(", cfg", '1, cfg["n_embd"], 3, 4, 5, cfg["foo"]'),
        {},
        ["the argument cfg.foo", """--kwargs '{"cfg": {"foo": ...}}'"""],
    ),
    "attribute": (gpt(", c", "c.n_embd, c.foo, 3, 4, 5"), {}, ["the argument c.foo"]),
    "field": (
        DATACLASS.replace("block_size: int = 1024", "foo: str")
        + gpt(", x: GPTConfig", "1, 2, 3, 4, x.foo"),
        {},
        ["the argument x.foo"],
    ),
    "config that raises": (
        f"{DATACLASS}    def __post_init__(self):\n        raise ValueError('not so')\n"
        + gpt(", x: GPTConfig", NOTHING),
        {},
        ["the arguments of GPT cannot be determined: ValueError: not so", "own.py:24: raise"],
    ),
    "unknown kwarg": (
        gpt(", vocab_size", NOTHING),
        {"kwargs": {"foo": 1}},
        ["GPT has no argument foo; it has vocab_size"],
    ),
    "no config argument": (gpt("", NOTHING), {"config_name": "X"}, ["has no argument that"]),
    "no such config": (
        "\nMINE = {}\n" + gpt(", c", NOTHING),
        {"config_name": "YOURS"},
        ["no config 'YOURS' in ", "own.py; it has MINE"],
    ),
    "raising": (
        gpt(", vocab_size", NOTHING, "torch.zeros(2) @ torch.zeros(vocab_size)"),
        {},
        ["GPT(vocab_size=97) cannot be built: RuntimeError: ", "own.py:15: torch.zeros(2) @"],
    ),
    "exiting": (gpt("", NOTHING, "raise SystemExit(3)"), {}, ["SystemExit: 3\n  at ", "own.py:15"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_state_the_fault_and_the_next_step(tmp_path: Path, case: str) -> None:
    source, how, fragments = ERRORS[case]
    with pytest.raises(AdaptError) as caught:
        build(tmp_path, source, **how)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("case", ["argument", "key", "field", "no config argument", "raising"])
def test_errors_recommend_a_function_first(tmp_path: Path, case: str) -> None:
    source, how, _ = ERRORS[case]
    with pytest.raises(AdaptError) as caught:
        build(tmp_path, source, **how)
    before, advice, _ = str(caught.value).partition("pass FILE.py:make_model")
    assert advice
    assert "--kwargs" not in before


def test_keyboard_interrupt_is_not_caught(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, gpt("", NOTHING, "raise KeyboardInterrupt"))


def test_the_described_call_has_the_settings_of_the_users_config(tmp_path: Path) -> None:
    source = """
CONFIG = {"emb_dim": 768, "n_layers": 12, "qkv_bias": False, "drop_rate": 0.5}

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.linear = nn.Linear(cfg["emb_dim"], cfg["n_layers"], bias=cfg["qkv_bias"])
        self.drop = nn.Dropout(cfg["drop_rate"])
"""
    call, own = described(tmp_path, source)[1].split("; ")
    assert call == "GPT(cfg={'emb_dim': 24, 'n_layers': 3, 'qkv_bias': True, 'drop_rate': 0.1})"
    assert own == "your CONFIG has qkv_bias=False"
    sizes = {"emb_dim": 24, "n_layers": 3, "qkv_bias": True, "drop_rate": 0.1}
    kwargs = {"cfg": {**sizes, "notes": "long " * 50}}
    call = described(tmp_path, source, kwargs=kwargs)[1].split(";")[0]
    assert call.startswith("GPT(cfg={'emb_dim': 24, ") and len(call) < 212
    assert call.endswith("long long …)")
    assert ";" not in described(tmp_path, source.replace("False", "True"))[1]


def test_the_described_call_has_the_changed_defaults(tmp_path: Path) -> None:
    """Sizes and dropout, which are always the checkpoint's, are not described."""
    source = """
class GPT(nn.Module):
    def __init__(self, n_embd=768, n_layer=12, qkv_bias=False, dropout=0.5, eps=1e-6):
        super().__init__()
        self.linear = nn.Linear(n_embd, n_layer, bias=qkv_bias)
        self.norm, self.drop = nn.LayerNorm(n_embd, eps=eps), nn.Dropout(dropout)
"""
    call, own = described(tmp_path, source)[1].split("; ")
    assert call == "GPT(n_embd=24, n_layer=3, qkv_bias=True, dropout=0.1, eps=1e-05)"
    assert own == "your default is qkv_bias=False and eps=1e-06"


def test_a_model_that_runs_only_with_a_hardcoded_width_is_built_with_it(tmp_path: Path) -> None:
    """The described call states the width."""
    source = """
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, block_size=99):
        super().__init__()
        self.sizes = n_embd, n_head
        self.wte, self.ln_f = nn.Embedding(vocab_size, n_embd), nn.LayerNorm(40)
    def forward(self, ids):
        return self.ln_f(self.wte(ids)) @ self.wte.weight.T
"""
    model, call = own_file.described(tmp_path, source)
    assert model.sizes == (40, 4)
    assert call.endswith("; your code runs in width 40 and not in 24")
    wide = dataclasses.replace(CONFIG, n_embd=40)
    model, call = own_file.described(tmp_path, source, wide)
    assert model.sizes == (40, 4) and "width" not in call
    source = source.replace("LayerNorm(40)", "LayerNorm(block_size + 1)")
    model, call = own_file.described(tmp_path, source)  # raises in other widths
    assert model.sizes == (24, 4) and "width" not in call


@pytest.mark.parametrize("broken", [False, True])
def test_sizes_with_names_that_usually_have_another_meaning_are_found(
    broken: bool, tmp_path: Path
) -> None:
    """Here, `head_size` is the number of heads. Code that never runs is built by its names."""
    source = """
class GPT(nn.Module):
    def __init__(self, vocab_size, input_dim, head_size, hidden_dim):
        super().__init__()
        self.sizes = head_size, hidden_dim
        self.wte = nn.Embedding(vocab_size, input_dim)
        self.qkv = nn.Linear(input_dim, 3 * head_size * hidden_dim)

    def forward(self, ids):
        x = self.wte(ids)
        heads, width = self.sizes
        q, k, v = (t.reshape(*ids.shape, heads, width).mT for t in self.qkv(x).chunk(3, -1))
        x = x + (v @ k.mT @ q).mT.reshape(*ids.shape, heads * width)
        return x @ self.wte.weight.T
"""
    source = source.replace("+ (v", "+ x[..., 1:] + (v" if broken else "+ (v")
    model, call = described(tmp_path, source)
    heads, width = CONFIG.n_head, CONFIG.n_embd // CONFIG.n_head
    assert model.sizes == ((width, CONFIG.d_inner) if broken else (heads, width))
    assert ("your code only runs with head_size" in call) is not broken


def test_a_width_with_the_name_head_dim_is_found(tmp_path: Path) -> None:
    """Two arguments may be the width, like `d_in` and `d_out`."""
    source = """
class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, head_dim):
        super().__init__()
        self.sizes = n_embd, head_dim
        self.wte, self.ln_f = nn.Embedding(vocab_size, n_embd), nn.LayerNorm(head_dim)

    def forward(self, ids):
        return self.ln_f(self.wte(ids)) @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert model.sizes == (24, 24) and call.endswith("only runs with head_dim=24")


def test_the_config_class_with_all_read_names_is_used(tmp_path: Path) -> None:
    """Two classes have the same sizes, but only one has another entry that the code reads."""
    source = """
@dataclass
class Base:
    vocab_size: int = 5
    n_embd: int = 4

@dataclass
class Own(Base):
    visible: bool = False

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.config = config

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T if not self.config.visible else None
"""
    source = source.replace("Base", "BaseConfig").replace("Own", "OwnConfig")
    model, _ = described(tmp_path, source)
    assert type(model.config).__name__ == "OwnConfig"


def test_a_switch_keeps_its_default_if_the_code_runs_only_with_it(tmp_path: Path) -> None:
    """The default of the user is passed, and the described call states it."""
    source = """
import dataclasses

@dataclasses.dataclass
class Config:
    vocab_size: int
    n_embd: int
    bias: bool = False

class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.bias = config.bias
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, ids):
        if self.bias:
            raise NotImplementedError
        return self.wte(ids) @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert model.bias is False and model.training
    assert call.endswith("; your code only runs with config.bias=False")
    model, call = described(tmp_path, source.replace("raise NotImplementedError", "pass"))
    assert model.bias is True and call.endswith("; your Config has bias=False")


def test_a_switch_that_forward_reads_from_the_modules_config_is_set(tmp_path: Path) -> None:
    source = """
import dataclasses

@dataclasses.dataclass
class Config:
    vocab_size: int = 5
    n_embd: int = 4
    swiglu: bool = False

config = Config(swiglu=True)

class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.swiglu:
            self.gate = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, ids):
        x = self.wte(ids)
        return (self.gate(x) if config.swiglu else x) @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert hasattr(model, "gate") and call.endswith("only runs with config.swiglu=True")


@pytest.mark.parametrize(("width", "expected"), [("n_key * n_head", 6), ("n_key", 24)])
def test_the_width_of_the_keys_is_that_of_one_head_or_of_all_heads(
    tmp_path: Path, width: str, expected: int
) -> None:
    """The number of parameters of the model decides."""
    source = f"""
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_layer, n_head, n_key):
        super().__init__()
        self.n_key = n_key
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(nn.Linear(n_embd, 12 * ({width})) for _ in range(n_layer))

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    assert own_file.build(tmp_path, source).n_key == expected


REPLACED = """
import torch
from torch import nn

class Skipped(nn.RMSNorm):
    __call__ = staticmethod(lambda x: x)

class GPT(nn.Module):
    def __init__(self, vocab_size, n_ctx, n_embd, n_layer, n_head, use_rms=True, use_rope=True):
        super().__init__()
        self.own = use_rms, use_rope
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Identity() if use_rope else {positions}
        self.norms = nn.ModuleList(
            nn.RMSNorm(n_embd) if use_rms else {norm} for _ in range(2 * n_layer + 1)
        )
        self.h = nn.ModuleList(nn.Linear(n_embd, 12 * n_embd) for _ in range(n_layer))

    def forward(self, ids):
        x, _ = self.wte(ids), self.wpe(torch.arange(ids.shape[1]))
        for norm in self.norms:
            x = norm(x)
        return x @ self.wte.weight.T
"""


@pytest.mark.parametrize(
    ("positions", "norm", "expected"),
    [
        ("nn.Embedding(n_ctx, n_embd)", "nn.LayerNorm(n_embd)", (False, False)),
        ("nn.Embedding(n_ctx, n_embd)", "nn.Identity()", (True, False)),
        ("nn.Embedding(n_ctx, n_embd)", "Skipped(n_embd)", (True, False)),
        ("nn.Identity()", "nn.LayerNorm(n_embd)", (False, True)),
    ],
)
def test_a_switch_that_nothing_replaces_keeps_its_default(
    tmp_path: Path, positions: str, norm: str, expected: tuple[bool, bool]
) -> None:
    source = REPLACED.format(positions=positions, norm=norm)
    model, call = own_file.described(tmp_path, source)
    assert model.own == expected
    assert ("found by trying" in call) is any(expected)


def test_a_module_that_may_be_missing_is_not_a_switch(tmp_path: Path) -> None:
    signature = ", vocab_size, n_ctx, n_embd, n_layer, n_head, rope: Core | None = None"
    source = gpt(signature, "vocab_size, n_ctx, n_embd, n_layer, n_head, rope")
    assert build(tmp_path, source).extra is None


def test_n_is_the_context_length_if_the_model_has_positions(tmp_path: Path) -> None:
    source = """
class GPT(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.n = data.n
        self.wte, self.wpe = nn.Embedding(data.vocab_size, 24), nn.Embedding(data.n, 24)

    def forward(self, ids):
        return (self.wte(ids) + self.wpe(torch.arange(self.n))) @ self.wte.weight.T
"""
    assert build(tmp_path, "import torch\n" + source).n == 32


def test_an_unknown_entry_in_a_section_of_a_config_is_named(tmp_path: Path) -> None:
    source = """
class GPT(nn.Module):
    def __init__(self, vocab_size, config):
        super().__init__()
        model, self.rate = config["architecture"], config["training"]["drop_rate"]
        self.width = model["token_embed"]
        self.wte = nn.Embedding(vocab_size, self.width)
        self.wpe = nn.Embedding(model["block_size"], self.width)
        blocks = [nn.Linear(self.width, 12 * self.width) for _ in range(model["n_layer"])]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    assert build(tmp_path, source).width == 24


SECTIONS = """
import dataclasses

@dataclasses.dataclass
class SizesConfig:
    model: str
    n_embd: int
    kind: str

@dataclasses.dataclass
class TrainConfig:
    steps: int
    folder: "str | None"
    rate: float

@dataclasses.dataclass
class Config:
    train: TrainConfig
    model: SizesConfig

class GPT(nn.Module):
    def __init__(self, vocab_size, config: Config):
        super().__init__()
        self.config = config
        if config.model.kind == "odd":
            raise ValueError(config.model.kind)
        self.wte = nn.Embedding(vocab_size, config.model.n_embd)

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""


def test_an_entry_that_the_model_does_not_read_has_a_value_of_its_type(tmp_path: Path) -> None:
    source = SECTIONS.replace('== "odd"', '!= "even"')
    config = dataclasses.asdict(build(tmp_path, source).config)
    assert config["train"] == {"steps": 1, "folder": None, "rate": 1.0}
    assert config["model"] == {"model": "", "n_embd": 24, "kind": "even"}  # found by trying


def test_an_entry_that_is_passed_on_with_all_others_counts_as_read(tmp_path: Path) -> None:
    source = SECTIONS.replace("self.config = config", "self.rate = Rate(**vars(config.train))")
    source += "\nclass Rate:\n    def __init__(self, steps, folder, rate):\n        pass\n"
    with pytest.raises(AdaptError, match=r"config\.train\.steps"):
        build(tmp_path, source.replace("pass", "raise ValueError"))


def test_the_caller_can_set_an_entry_of_a_section(tmp_path: Path) -> None:
    own = {"config": {"model": {"kind": "any", "n_embd": 12}, "train": {"steps": 9}}}
    config = dataclasses.asdict(build(tmp_path, SECTIONS, kwargs=own).config)
    assert config["train"] == {"steps": 9, "folder": None, "rate": 1.0}
    assert config["model"] == {"model": "", "n_embd": 12, "kind": "any"}


@pytest.mark.parametrize("stored", ["self.train_cfg = train_cfg", "self.rate = train_cfg.rate"])
def test_a_config_class_with_the_name_of_the_argument_is_used(tmp_path: Path, stored: str) -> None:
    """Sizes that the model reads from its other config are not those of this one."""
    source = """
import dataclasses

@dataclasses.dataclass
class ModelConfig:
    vocab_size: int = 1
    n_embd: int = 2

@dataclasses.dataclass
class TrainConfig:
    rate: float = 0.1

class GPT(nn.Module):
    def __init__(self, model_cfg, train_cfg):
        super().__init__()
        self.kept = dataclasses.asdict(train_cfg)
        STORED
        self.wte = nn.Embedding(model_cfg.vocab_size, model_cfg.n_embd)
"""
    model = build(tmp_path, source.replace("STORED", stored))
    assert model.kept == {"rate": 0.1} and model.wte.weight.shape == (97, 24)


def test_a_keyword_that_is_compared_with_a_string_is_not_a_size(tmp_path: Path) -> None:
    """`heads` is in the name of a number of heads, too."""
    source = """
class GPT(nn.Module):
    def __init__(self, n_vocab, n_ctx, dim, depth, heads, **kwargs):
        super().__init__()
        self.sizes = n_vocab, n_ctx, dim, depth, heads
        self.talking_heads = kwargs.get("talking_heads", "none")
        self.is_mixed = self.talking_heads == "pre" or self.talking_heads == "both"
"""
    model = build(tmp_path, source)
    assert (model.sizes, model.talking_heads) == (SIZES, "none")


def test_a_list_with_a_config_for_each_block_is_passed(tmp_path: Path) -> None:
    source = """
class GPT(nn.Module):
    def __init__(self, vocab_size, blocks: list[dict]):
        super().__init__()
        self.table = nn.Embedding(vocab_size, blocks[0]["d_model"])
        self.blocks = nn.ModuleList(nn.Linear(b["d_model"], b["d_ff"]) for b in blocks)
"""
    model = build(tmp_path, source)
    assert model.table.weight.shape == (97, 24)
    assert [block.weight.shape for block in model.blocks] == [(96, 24)] * 3


def test_a_model_that_a_head_accepts_is_not_a_config(tmp_path: Path) -> None:
    """The names that the head reads from the model are not entries of a config."""
    source = """
class Trunk(nn.Module):
    def __init__(self, vocab_size, n_embd):
        super().__init__()
        self.hidden_size, self.table = n_embd, nn.Embedding(vocab_size, n_embd)

class GPT(nn.Module):
    def __init__(self, gpt: Trunk):
        super().__init__()
        self.gpt, self.head = gpt, nn.Linear(gpt.hidden_size, gpt.table.num_embeddings)
"""
    assert build(tmp_path, source).head.weight.shape == (97, 24)


@pytest.mark.parametrize("annotation", ["", ": ModelHyperParameters"])
def test_a_config_class_that_sets_its_values_in_its_constructor_is_used(
    tmp_path: Path, annotation: str
) -> None:
    values = "self.vocab_size = 0  # of the data\n        self.block_size: int = 16\n"
    values += "        self.n_embd = 384\n        self.n_layer, self.n_head = 6, 6"
    more = f"class ModelHyperParameters:\n    def __init__(self):\n        {values}\n"
    read = ", ".join(f"self.own.{name[2:]}" for name in READ.split(", "))
    cls = gpt(f", sizes_of_mine{annotation}", read, "object.__setattr__(self, 'own', None)")
    cls = cls.replace("object.__setattr__(self, 'own', None)", "self.own = sizes_of_mine")
    source = cls.replace("class GPT", f"{more}\nclass GPT")
    assert build(tmp_path, source).sizes == SIZES


def test_a_config_class_with_getters_is_used(tmp_path: Path) -> None:
    names = [name[2:] for name in READ.split(", ")]
    values = "\n        ".join(f"self._{name} = 6" for name in names)
    getters = "".join(f"    def get_{n}(self):\n        return self._{n}\n" for n in names)
    more = f"class GPTConfig:\n    def __init__(self):\n        {values}\n{getters}"
    cls = gpt(", model_config", ", ".join(f"model_config.get_{name}()" for name in names))
    assert build(tmp_path, cls.replace("class GPT", f"{more}\nclass GPT")).sizes == SIZES


def test_numbers_in_a_config_constructor_with_parameters_are_replaced(tmp_path: Path) -> None:
    source = """
class Config:
    def __init__(self, vocab_size=65, block_size=16):
        self.vocab_size, self.block_size = vocab_size, block_size
        self.n_embd = 384
        self.n_layer = 6
        self.n_head = 6
        self.rows = 6
""" + gpt(", config: Config", READ.replace("c.", "config.") + ", config.rows")
    model = build(tmp_path, source)
    assert (model.sizes, model.extra) == (SIZES, 6)


ACTIVATIONS = {
    "annotated": (": typing.Union[str, typing.Callable]", "self.act = activation", "self.act(x)"),
    "called": ("", "self.activation = activation", "self.activation(x)"),
    "class": ("", "self.act = activation()", "self.act(x)"),
    "contained": (
        "",
        "assert activation is not None; self.parts = nn.ModuleDict(dict(act=activation))",
        "self.parts.act(x)",
    ),
    "name": ("", "self.act = {'gelu': torch.tanh}[activation]", "self.act(x)"),
    "name of a module": ("", "self.act = getattr(nn, activation)()", "self.act(x)"),
    "name that is assigned later": (
        ": str = None",
        "self.act = {'gelu': torch.tanh}[activation]",
        "self.act(x)",
    ),
    "name or function": (
        ": typing.Union[str, typing.Callable]",
        "self.act = torch.tanh if activation == 'gelu' else activation",
        "self.act(x)",
    ),
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_an_activation_is_passed_in_the_form_in_which_it_is_used(tmp_path: Path, case: str) -> None:
    annotation, stored, called = ACTIVATIONS[case]
    source = f"""
class Layer(nn.Module):
    def __init__(self, activation):
        super().__init__()
        {stored}

    def forward(self, x):
        return {called}

class GPT(nn.Module):
    def __init__(self, vocab_size, d_model, activation{annotation}):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, d_model)
        self.layer = Layer(activation)

    def forward(self, ids):
        return self.layer(self.tok(ids))
"""
    model, call = described(tmp_path, source)
    x = torch.linspace(-3, 3, 9)
    expected = nn.functional.gelu(x, approximate="tanh")
    named = case.startswith("name") and case != "name of a module"
    expected = nn.functional.gelu(x) if case == "name of a module" else expected
    assert torch.equal(model.layer(x), torch.tanh(x) if named else expected)
    passed = "'gelu'" if named else "gelu_new"
    passed = {"class": "new_gelu", "name of a module": "'GELU'"}.get(case, passed)
    passed = "GELU(…)" if case == "contained" else passed
    assert call == f"GPT(vocab_size=97, d_model=24, activation={passed})"


def test_entries_are_read_by_a_method_of_the_config(tmp_path: Path) -> None:
    text = """
class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        width = cfg.get_setting("model.n_embd")
        self.tok = nn.Embedding(cfg.get_setting("model.vocab_size"), width)
        self.other = cfg.get_setting("model.other", 5)
        self.layers = cfg.get_setting("model.n_layer")

    def forward(self, ids):
        return self.tok(ids) @ self.tok.weight.T
"""
    model = build(tmp_path, text)
    assert (model.tok.weight.shape, model.other, model.layers) == ((97, 24), 5, 3)


def test_a_config_of_keywords_has_neutral_values_too(tmp_path: Path) -> None:
    """Either the sizes or the name of a preset must be None."""
    text = """
class CfgNode:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)

class GPT(nn.Module):
    def __init__(self, config: CfgNode):
        super().__init__()
        assert (config.model_type is None) != (config.n_embd is None)
        self.tok = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, ids):
        return self.tok(ids) @ self.tok.weight.T
"""
    assert build(tmp_path, text).tok.weight.shape == (97, 24)


IN_A_FILE = """
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(cfg.vocab, cfg.width), nn.Embedding(cfg.ctx, cfg.width)
        self.norm = nn.LayerNorm(cfg.width, **cfg.norm)
        self.other, self.dropped = cfg.act, nn.Dropout(cfg.dropout)
"""


@pytest.mark.parametrize("where", ["config.yaml", "conf/gpt.yml", "../configs/model/small.json"])
def test_a_config_is_read_from_a_file(tmp_path: Path, where: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    file = package / where
    file.parent.mkdir(parents=True, exist_ok=True)
    model = {"vocab": 5, "width": 6, "ctx": 7, "norm": {"eps": 1e-3}, "act": "relu", "dropout": 0.5}
    file.write_text(json.dumps({"train": {"width": 1}, "model": model}))
    built, call = own_file.described(package, IN_A_FILE)
    assert built.wte.weight.shape == (97, 24) and built.norm.eps == 1e-3
    assert built.other == "gelu" and f"your {file.name} has act='relu'" in call


def test_how_far_attention_reaches_is_read_from_a_file(tmp_path: Path) -> None:
    """Other integers without a role may be sizes of a model of another width."""
    entries = {"vocab": 5, "width": 6, "ctx": 7, "window": 900, "sliding_window": 800, "other": 3}
    (tmp_path / "config.yaml").write_text(json.dumps(entries))
    source = IN_A_FILE.replace("**cfg.norm", "").replace("cfg.act,", "cfg.get('other', 1),")
    source = source.replace(
        "self.norm =", "self.reach = cfg.get('sliding_window', 2)\n        self.norm ="
    )
    built, _ = own_file.described(tmp_path, source)
    assert (built.reach, built.other) == (800, 1)


def test_an_argument_annotated_as_an_embedding_is_one(tmp_path: Path) -> None:
    source = gpt(
        ", embed: nn.Embedding, positions: 'nn.Embedding', dim, depth, heads",
        "*(each.num_embeddings for each in (embed, positions)), embed.embedding_dim, depth, heads",
    )
    assert build(tmp_path, source).sizes == SIZES


def test_an_optional_tokenizer_is_left_out(tmp_path: Path) -> None:
    before = "ids = {tokenizer.sep_token_id} if tokenizer else None"
    source = gpt(", c, tokenizer=None", f"{READ}, ids", before)
    assert build(tmp_path, source).sizes == SIZES


def test_an_optional_module_is_left_out(tmp_path: Path) -> None:
    before = "width = c.n_embd if table is None else table.embedding_dim"
    source = gpt(", c, table=None", f"{READ}, width", before)
    assert build(tmp_path, source).extra == CONFIG.n_embd


def test_the_values_of_a_dictionary_are_in_the_order_in_which_they_are_unpacked(
    tmp_path: Path,
) -> None:
    names = "n_vocab, n_ctx, dim, depth, heads"
    before = f"{names} = list(hparams.values())[:5]; rate = hparams['dropout']"
    source = gpt(", hparams", f"{names}, rate", before)
    model = build(tmp_path, source)
    assert (model.sizes, model.extra) == (SIZES, CONFIG.resid_pdrop)


def test_a_config_class_computes_attributes_from_the_checkpoints_sizes(tmp_path: Path) -> None:
    values = ["vocab_size = 65", "block_size = 8", "n_embd = 32", "n_layer = 2", "n_head = 2"]
    lines = "\n        self.".join([*values, "share = self.n_embd // self.n_head"])
    more = f"class Sizes:\n    def __init__(self):\n        self.{lines}\n"
    cls = gpt(", sizes: Sizes", READ.replace("c.", "sizes.") + ", sizes.share")
    model = build(tmp_path, cls.replace("class GPT", f"{more}\nclass GPT"))
    assert (model.sizes, model.extra) == (SIZES, 6)


def test_a_config_file_has_sections_in_a_section(tmp_path: Path) -> None:
    """Their sizes are the checkpoint's, and the tokenizer's name is not a section."""
    (tmp_path / "base.yaml").write_text(
        "model:\n  tokenizer: gpt2\n  block: 9\n  dim: 8\n  depth: 7\n  attention:\n    nb_heads: 6"
    )
    sizes = "m['vocab'], m['block'], m['dim'], m['depth'], m['attention']['nb_heads']"
    before = "m = config['model']; assert m['tokenizer'].upper()"
    source = gpt(", config", f"{sizes}, len(m['tokenizer'].split())", before)
    assert build(tmp_path, source).sizes == SIZES


@pytest.mark.parametrize("check", ["", "assert self.activation == 'squared' and not self.bias"])
def test_settings_of_a_config_class_without_defaults_are_read_from_a_file(
    tmp_path: Path, check: str
) -> None:
    """A value that the class requires is that of the file, although GPT-2 has another one."""
    (tmp_path / "small.yaml").write_text(
        "model:\n  vocab_size: 7\n  n_embd: 8\n  n_layer: 9\n  activation: squared\n"
        "  style: mine\n  bias: false\n"
    )
    source = """
@dataclass
class Config:
    vocab_size: int
    n_embd: int
    n_layer: int
    style: str
    activation: str
    bias: bool

    def __post_init__(self):
        assert self.style == "mine"
        CHECK

class GPT(Core):
    def __init__(self, config: Config):
        super().__init__(config.vocab_size, config.n_embd, config.n_layer, 4, 5, config.bias)
"""
    model = build(tmp_path, source.replace("CHECK", check))
    assert model.sizes[:3] == (97, 24, 3) and model.extra is not bool(check)


def test_a_file_with_other_names_is_not_a_config_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text('{"n_vocab": 5, "norm": {"eps": 1e-3}}')
    with pytest.raises(AdaptError, match=r"cfg\.norm"):
        own_file.build(tmp_path, IN_A_FILE, None)


def test_a_config_above_the_top_folder_of_the_project_is_not_read(tmp_path: Path) -> None:
    model = {"vocab": 5, "width": 6, "ctx": 7, "norm": {"eps": 1e-3}, "act": "relu", "dropout": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(model))
    project = tmp_path / "project"
    project.mkdir()
    own_file.build(project, IN_A_FILE)
    (project / "pyproject.toml").touch()
    with pytest.raises(AdaptError, match=r"cfg\.norm"):
        own_file.build(project, IN_A_FILE)


def test_an_argument_with_the_name_of_a_class_is_an_instance_of_it(tmp_path: Path) -> None:
    source = """
from torch import nn

class Body(nn.Module):
    def __init__(self, n_vocab, n_block, n_embd, n_layer):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(n_vocab, n_embd), nn.Embedding(n_block, n_embd)
        self.n_layer = n_layer

class GPT(nn.Module):
    def __init__(self, body, n_embd, norm):
        super().__init__()
        self.body, self.norm = body, norm
        self.head = nn.Linear(n_embd, body.wte.num_embeddings)

class Norm(nn.LayerNorm):
    def __init__(self, n_embd):
        super().__init__(n_embd)
"""
    model, call = own_file.described(tmp_path, source)
    assert call == "GPT(body=Body(…), norm=Norm(…), n_embd=24)"
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes == [(97, 24), (32, 24), (24,), (24,), (97, 24), (97,)]
    with pytest.raises(AdaptError, match="norm"):
        own_file.build(tmp_path, source.replace("class Norm(", "class Norm2("))
    with pytest.raises(AdaptError, match="RecursionError"):  # each class needs the other one
        own_file.build(tmp_path, source.replace("(self, n_vocab", "(self, gpt, n_vocab"))


def test_a_closure_has_the_defaults_of_its_function(tmp_path: Path) -> None:
    source = """
from torch import nn

def make(vocab_size, n_embd, p=0.25, *, scale=3):
    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.drop, self.scale = nn.Embedding(vocab_size, n_embd), nn.Dropout(p), scale
    return GPT()
"""
    model = own_file.build(tmp_path, source)
    assert (model.wte.weight.shape, model.drop.p, model.scale) == ((97, 24), 0.25, 3)


@pytest.mark.parametrize(("default", "expected"), [("None", None), ("2", 4)])
def test_the_code_computes_key_value_heads_without_a_default(
    tmp_path: Path, default: str, expected: int | None
) -> None:
    source = gpt(f", n_kv_heads={default}", "1, 2, 3, 4, 5, n_kv_heads")
    assert build(tmp_path, source).extra == expected


def test_a_subclass_of_a_model_of_transformers_receives_its_config(tmp_path: Path) -> None:
    source = """
from torch import nn
from transformers import GPT2PreTrainedModel

class GPT(GPT2PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)  # which refuses any other config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.n_embd)

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    model = own_file.build(tmp_path, source)
    assert type(model.config).__name__ == "GPT2Config"
    assert (model.config.n_layer, model.config.n_head) == SIZES[3:]
    assert (*model.wte.weight.shape, len(model.wpe.weight)) == (97, 24, 32)


REST = "ctx, width, depth, heads"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("vocab", "len(vocab)"),
        ("vocab", "len(vocab.stoi)"),
        ("stoi", "len(stoi)"),
        ("word_map", "len(word_map)"),
        ("vocab", "len({i: word for word, i in vocab.items()})"),
        ("tokenizer", "len(tokenizer)"),
        ("tokenizer", "tokenizer.vocab_size"),
        ("tokenizer", "tokenizer.get_vocab_size()"),
        ("tokenizer", "len(tokenizer.get_vocab())"),
        ("bpe_tokenizer", "bpe_tokenizer.get_piece_size()"),
        ("train_dataset", "train_dataset.get_vocab_size()"),
        ("data", "data.n_vocab"),
    ],
)
def test_a_vocabulary_has_the_size_of_the_checkpoints(
    tmp_path: Path, name: str, number: str
) -> None:
    model = build(tmp_path, gpt(f", {name}, {REST}", f"{number}, {REST}"))
    assert model.sizes == SIZES


def test_ids_of_special_tokens_of_a_vocabulary_are_valid(tmp_path: Path) -> None:
    ids = 'vocab["<pad>"], vocab.stoi["<eos>"], vocab.pad_token_id, vocab.token_to_id("<s>")'
    model = build(tmp_path, gpt(f", vocab, {REST}", f"len(vocab), {REST}, ({ids})"))
    assert model.extra == (-1, 96, -1, 96)
    nn.Embedding(97, 2, padding_idx=model.extra[0])  # torch accepts it


def test_a_vocabulary_that_another_class_reads_is_recognized(tmp_path: Path) -> None:
    source = """
class Embed(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.rows = len(vocab)
"""
    source += gpt(f", vocab, {REST}", f"Embed(vocab).rows, {REST}")
    assert build(tmp_path, source).sizes == SIZES


def test_a_vocabulary_with_other_attributes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdaptError, match=r"the argument vocab\.merges"):
        build(tmp_path, gpt(f", vocab, {REST}", f"len(vocab.merges), {REST}"))


@pytest.mark.parametrize("unpacked", ["SimpleNamespace(**config_dict)", "config_dict"])
def test_a_config_that_is_unpacked_is_a_dictionary(tmp_path: Path, unpacked: str) -> None:
    source = gpt(", config_dict", READ, f"c = {unpacked}")
    assert build(tmp_path, source).sizes == SIZES


def test_a_config_that_requires_a_file_in_its_post_init_is_built(tmp_path: Path) -> None:
    check = "\n    def __post_init__(self):\n        assert Path('no.txt').exists(), 'no corpus'\n"
    source = "from pathlib import Path\n" + DATACLASS + check + gpt(", c: GPTConfig", READ)
    assert build(tmp_path, source).sizes == SIZES
    other = source.replace("Path('no.txt').exists()", "self.n_embd % 5 == 0")
    with pytest.raises(AdaptError, match="no corpus"):  # this condition is not about a file
        build(tmp_path, other)


def test_an_enumeration_that_is_not_read_has_its_first_member(tmp_path: Path) -> None:
    fields = "\nclass GPTConfig:\n    kind: Kind\n    mode: typing.Literal['a', 'b']\n"
    source = "import enum\nclass Kind(enum.Enum):\n    FIRST, SECOND = 1, 2\n" + DATACLASS.replace(
        "\nclass GPTConfig:\n", fields
    )
    check = "assert list(vars(c).values())[:2] == [Kind.FIRST, 'a']"
    assert build(tmp_path, source + gpt(", c: GPTConfig", READ, check)).sizes == SIZES


@pytest.mark.parametrize("tie", [True, False])
def test_a_list_of_tied_weights_as_in_transformers_4_is_supported(
    tmp_path: Path, tie: bool
) -> None:
    source = f"""
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=8, n_embd=8, **more):
        self.vocab_size, self.n_embd = vocab_size, n_embd
        super().__init__(tie_word_embeddings={tie}, **more)

class GPT(PreTrainedModel):
    config_class = OwnConfig
    _tied_weights_keys = ["head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def get_output_embeddings(self):
        return self.head
"""
    model = build(tmp_path, source)
    assert (model.head.weight is model.wte.weight) is tie
    assert type(model)._tied_weights_keys == ["head.weight"]


def test_what_transformers_4_had_is_found_and_called(tmp_path: Path) -> None:
    """Conv1D in another module, `init_weights` without `post_init`, and masks of heads."""
    source = """
from transformers import GPT2Config, GPT2PreTrainedModel
from transformers.modeling_utils import Conv1D

class Decoder(GPT2PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.h = nn.ModuleList(Conv1D(3, config.n_embd) for _ in range(config.n_layer))
        self.init_weights()

    def forward(self, x):
        return [(h(x), m) for h, m in zip(self.h, self.get_head_mask(None, len(self.h)))]

class GPT(GPT2PreTrainedModel):
    def __init__(self, config: GPT2Config):
        super().__init__(config)
        self.wte, self.decoder = nn.Embedding(config.vocab_size, config.n_embd), Decoder(config)
        self.init_weights()

    def forward(self, ids):
        return self.decoder(self.wte(ids))
"""
    model = build(tmp_path, source)
    returned = model(torch.zeros(1, 2, dtype=torch.long))
    assert [(x.shape, mask) for x, mask in returned] == 3 * [((1, 2, 3), None)]
    modeling = sys.modules["transformers.modeling_utils"]
    assert not hasattr(modeling, "Conv1D")
    assert not hasattr(modeling.PreTrainedModel, "all_tied_weights_keys")


def test_a_model_of_transformers_without_a_config_class_gets_a_general_config(
    tmp_path: Path,
) -> None:
    """What its config class would declare is an attribute, also if the value was tried."""
    source = """
from transformers import PreTrainedModel

class GPT(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.heads = nn.ModuleList(nn.Identity() for _ in range(config.n_head // config.sharing))

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    model = build(tmp_path, source)
    assert model.wte.weight.shape == (CONFIG.vocab_size, CONFIG.n_embd)
    assert model.config.n_head == CONFIG.n_head and model.config.sharing


def test_a_training_loop_with_the_name_train_is_supported(tmp_path: Path) -> None:
    source = """
class GPT(Core):
    def __init__(self, n_vocab, ctx, width, depth, heads):
        super().__init__(n_vocab, ctx, width, depth, heads)
        self.drop = nn.Dropout(0.5)

    def train(self, batches, steps=10):
        raise RuntimeError("no training here")
"""
    model = build(tmp_path, source)
    with eval_mode(model):
        assert not model.training and not model.drop.training
    assert model.training and model.drop.training


def test_attributes_of_classes_are_restored() -> None:
    class Rotation(nn.Module):
        table, length, name = torch.empty(0), None, "rotation"

        def forward(self, x: Tensor) -> Tensor:
            Rotation.table, Rotation.length, Rotation.name = x, len(x), "other"
            return x

    class Longer(Rotation):
        pass

    model, empty = nn.Sequential(Longer()), Rotation.table
    state = ModelState(model)
    assert state.restore(model) == []
    model(torch.ones(3))
    assert Rotation.length == 3
    assert sorted(state.restore(model)) == ["length", "table"]
    assert Rotation.table is empty and Rotation.length is None


def test_booleans_without_a_default_leave_no_parameters_unused(tmp_path: Path) -> None:
    source = """
class GPT(nn.Module):
    def __init__(self, vocab_size, ctx, width, depth, heads, with_places: bool, raw_end: bool):
        super().__init__()
        self.switches = with_places, raw_end
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(ctx, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)

    def forward(self, ids):
        x = self.wte(ids)
        if self.switches[0]:
            x = x + self.wpe(torch.arange(ids.shape[1]))
        x = self.layers(x)
        return self.head(x if self.switches[1] else self.norm(x))
"""
    assert build(tmp_path, source).switches == (True, False)


def test_a_list_with_the_kind_of_every_layer_is_supported(tmp_path: Path) -> None:
    source = """
@dataclass
class GPTConfig:
    layer_types: list[str]
    vocab_size: int
    n_ctx: int
    n_embd: int

class GPT(nn.Module):
    def __init__(self, c: GPTConfig):
        super().__init__()
        self.windows = [8 if kind == "sliding_attention" else None for kind in c.layer_types]
        assert all(kind in ("sliding_attention", "full_attention") for kind in c.layer_types)
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.n_ctx, c.n_embd)

    def forward(self, ids):
        return (self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))) @ self.wte.weight.T
"""
    assert build(tmp_path, source).windows == [None, None, None]


def test_settings_of_the_training_have_neutral_values(tmp_path: Path) -> None:
    names = "warmup_steps, total_steps, num_epochs, log_interval"
    model = build(tmp_path, gpt(f", n_vocab, {REST}, {names}", f"n_vocab, {REST}, ({names})"))
    assert model.sizes == SIZES and model.extra == (1, 1, 1, 1)


def test_data_types_and_pairs_of_a_config_have_values_of_their_type(tmp_path: Path) -> None:
    fields = "\nclass GPTConfig:\n    dtype: torch.dtype\n    betas: tuple[float, float]\n"
    source = DATACLASS.replace("\nclass GPTConfig:\n", fields)
    source += gpt(", c: GPTConfig", f"{READ}, (c.dtype, *c.betas)")
    assert build(tmp_path, source).extra == (torch.float32, 0.9, 0.999)


def test_sizes_may_be_attributes_of_a_base_class(tmp_path: Path) -> None:
    source = """
class Base(Core):
    vocab_size, block_size, n_embd, n_layer, n_head, rank = 8, 9, 10, 11, 12, 13

class GPT(Base):
    def __init__(self):
        sizes = self.vocab_size, self.block_size, self.n_embd, self.n_layer, self.n_head
        super().__init__(*sizes, self.rank)
"""
    model = build(tmp_path, source)
    assert model.sizes == SIZES and model.extra == 13
    assert type(model).n_embd == 10  # restored


def test_a_config_may_be_read_with_getattr(tmp_path: Path) -> None:
    names = "vocab_size", "block_size", "n_embd", "n_layer", "n_head"
    sizes = ", ".join(f'getattr(c, "{name}")' for name in names)
    assert build(tmp_path, gpt(", c", sizes)).sizes == SIZES


def test_an_uninitialised_vector_is_filled_with_ones(tmp_path: Path) -> None:
    source = gpt(", vocab_size", NOTHING) + "        self.w = nn.Parameter(torch.empty(5000))\n"
    assert build(tmp_path, source).w.eq(1).all()


def test_the_number_of_key_groups_is_the_number_of_heads(tmp_path: Path) -> None:
    source = gpt(", vocab_size, block_size, n_embd, n_layer, n_head, n_kv_groups",
                 "vocab_size, block_size, n_embd, n_layer, n_head, n_kv_groups")  # fmt: skip
    assert build(tmp_path, source).extra == 4


def test_the_share_of_rotated_channels_is_all_of_them(tmp_path: Path) -> None:
    """A share of 0, such as `False`, would hide the rotation."""
    sizes = "vocab_size, block_size, n_embd, n_layer, n_head"
    source = gpt(
        f", {sizes}, rotary_pct, rotary_emb_base", f"{sizes}, (rotary_pct, rotary_emb_base)"
    )
    assert build(tmp_path, source).extra == (1.0, 10000.0)


def test_the_annotated_class_is_built_and_not_the_one_of_the_same_name(tmp_path: Path) -> None:
    names = [f"Decoder{i}" for i in range(8)]
    classes = "".join(
        f"\n\nclass {name}(nn.Module):\n    def __init__(self, vocab_size, block_size, n_embd, "
        "n_layer, n_head):\n        super().__init__()\n"
        for name in ("Decoder", *names)
    )
    source = gpt(", decoder: Decoder5", "1, 2, 3, 4, 5, decoder") + classes
    source = f"from __future__ import annotations\n{source}"
    assert type(build(tmp_path, source).extra).__name__ == "Decoder5"


def test_a_default_of_none_is_replaced_if_the_code_does_not_run_with_it(tmp_path: Path) -> None:
    source = gpt(", vocab_size, dtype=None, rope_theta=None", "float(rope_theta), 2, 3, 4, 5")
    source += "\n    def forward(self, ids):\n        return ids\n"
    _, call = described(tmp_path, source)
    assert call.endswith("your code only runs with rope_theta=10000.0")


def test_a_models_name_that_replaces_the_sizes_is_left_out(tmp_path: Path) -> None:
    """In minGPT, a config has either the name or the sizes; here, the name has precedence."""
    source = """
import dataclasses

@dataclasses.dataclass
class Config:
    model_type: str = "gpt2"
    n_layer: int = None
    n_embd: int = None

class GPT(Core):
    def __init__(self, config: Config):
        sizes = config.n_layer, config.n_embd
        if config.model_type is not None and None not in sizes:
            sizes = {"gpt2": (12, 768), "gpt2-medium": (24, 1024)}[config.model_type]
        super().__init__(0, 0, config.n_embd, *sizes)
        assert sizes[1] == config.n_embd

    def forward(self, ids):
        return ids
"""
    model, call = described(tmp_path, source)
    assert model.sizes == (0, 0, 24, 3, 24)
    assert call.endswith("your code only runs with config.model_type=None")


def test_the_path_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    source = """
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.loaded = False
        if config.weights_from is not None:
            self.wte = torch.load(config.weights_from)

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert vars(model)["loaded"] is False and "config.weights_from=None" in call


def test_a_switch_without_which_alone_the_code_runs_is_turned_off(tmp_path: Path) -> None:
    """The failing code reads an attribute that the config does not have off a tuple."""
    source = """
class Config:
    def __init__(self, vocab_size=5, n_embd=4, use_streams=True):
        self.vocab_size, self.n_embd, self.use_streams = vocab_size, n_embd, use_streams
        self.width = n_embd

class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, ids):
        x = self.wte(ids)
        if self.config.use_streams:
            pair = x, x
            x = x.to(pair.width)
        return x @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert model(torch.arange(5)[None]).shape == (1, 5, 97)
    assert "config.use_streams=False" in call


def test_a_default_with_which_the_code_cannot_be_built_is_turned_off(tmp_path: Path) -> None:
    """The constructor passes its **kwargs to a config, of which compat sets the sizes only."""
    source = """
@dataclasses.dataclass
class Config:
    vocab_size: int = 5
    n_embd: int = 4
    use_folds: bool = True

class GPT(nn.Module):
    def __init__(self, **kwargs):
        config = Config(**kwargs)
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.use_folds:
            self.wte.folds = self.folds

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    model, call = described(tmp_path, f"import dataclasses\n{source}")
    assert model.wte.num_embeddings == 97 and "use_folds=False" in call


@pytest.mark.parametrize("annotation", ["", ": Config"])
@pytest.mark.parametrize(
    "section", ["config", "Config(config.sizes)", 'Config(**config["sizes"])', 'config["sizes"]']
)
def test_a_dictionary_with_attributes_is_a_config(
    tmp_path: Path, annotation: str, section: str
) -> None:
    """`inspect` knows no signature of its class."""
    source = f"""
class Config(dict):
    __getattr__ = dict.__getitem__

class GPT(nn.Module):
    def __init__(self, config{annotation}):
        super().__init__()
        self.cfg = {section}
        self.wte = nn.Embedding(self.cfg["n_vocab"], self.cfg["d_hidn"])

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    model = build(tmp_path, source)
    assert model.wte.weight.shape == (97, 24)


@pytest.mark.parametrize(
    "copy",
    [
        "vars(self).update(sizes)",
        "self.__dict__.update(**sizes)",
        "for k, v in sizes.items():\n            setattr(self, k, v)",
    ],
)
@pytest.mark.parametrize("stars", ["", "**"])
def test_sizes_that_are_copied_to_the_model_are_found(
    tmp_path: Path, stars: str, copy: str
) -> None:
    """Another class assigns an attribute of the same name."""
    source = f"""
class Block(nn.Module):
    def __init__(self, n_head):
        super().__init__()
        self.n_head = n_head

class GPT(nn.Module):
    def __init__(self, {stars}sizes):
        super().__init__()
        {copy}
        self.wte = nn.Embedding(self.vocab_size, self.n_embd)
        self.block = Block(self.n_head)

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    model = build(tmp_path, source)
    assert model.wte.weight.shape == (97, 24) and model.block.n_head == 4


def test_a_part_of_a_config_may_have_parts(tmp_path: Path) -> None:
    source = """
@dataclass
class AttentionConfig:
    n_head: int = 12

@dataclass
class Sizes:
    vocab_size: int = 50257
    n_embd: int = 768
    attn: AttentionConfig = field(default_factory=AttentionConfig)

@dataclass
class Settings:
    model: Sizes = field(default_factory=Sizes)

class GPT(nn.Module):
    def __init__(self, settings: Settings):
        super().__init__()
        sizes = settings.model
        self.wte = nn.Embedding(sizes.vocab_size, sizes.n_embd)
        self.n_head = sizes.attn.n_head

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    model = build(tmp_path, f"from dataclasses import dataclass, field\n{source}")
    assert model.wte.weight.shape == (97, 24) and model.n_head == 4


def test_a_config_class_that_needs_the_name_of_a_file_is_replaced(tmp_path: Path) -> None:
    source = """
class Config:
    def __init__(self, path):
        with open(path) as file:
            self.vocab_size, self.n_embd = map(int, file)

class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    assert build(tmp_path, source).wte.weight.shape == (97, 24)


def test_a_model_that_needs_its_own_initialization_is_initialized(tmp_path: Path) -> None:
    source = """
class GPT(nn.Module):
    def __init__(self, n_vocab, n_embd):
        super().__init__()
        self.wte = nn.Embedding(n_vocab, n_embd)
        self.scale = None

    def init_params(self):
        raise OSError

    def init_weights(self):
        self.scale = 2.0

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T * self.scale
"""
    model, call = described(tmp_path, source)
    assert model.scale == 2.0 and "only runs after model.init_weights()" in call
    own = source.replace("self.scale = None", "self.scale = 3.0")
    model, call = described(tmp_path, own)
    assert model.scale == 3.0 and "init_weights" not in call


def test_a_config_that_cannot_be_printed_is_passed(tmp_path: Path) -> None:
    source = """
class Config:
    def __init__(self, vocab_size=5, stop_tokens=None):
        self.vocab_size, self.stop_tokens = vocab_size, stop_tokens

    def __repr__(self):
        return f"{self.vocab_size}, {list(self.stop_tokens)}"

class GPT(Core):
    def __init__(self, config: Config):
        super().__init__(config.vocab_size, 0, 0, 0, 0)
"""
    model, call = described(tmp_path, source)
    assert model.sizes[0] == 97 and call == "GPT(config=Config(…))"


def test_a_number_of_heads_in_the_code_is_passed_if_it_runs_with_no_other(tmp_path: Path) -> None:
    view = "\n    def forward(self, ids):\n        ids.new_zeros(24).view(8, 24 // self.sizes[4])\n"
    source = gpt(", vocab_size, dim, heads", "vocab_size, 0, dim, 0, heads") + view
    source += "        return ids\n"
    model, call = described(tmp_path, source)
    assert model.sizes[4] == 8 and call.endswith("your code only runs with heads=8")
    source = source.replace(
        "ids.new_zeros(24).view(8, 24 // self.sizes[4])", "assert self.sizes[4] == 1"
    )
    model, call = described(tmp_path, source)
    assert model.sizes[4] == 1 and call.endswith("your code only runs with heads=1")


def test_a_letter_is_no_probability_if_its_default_is_a_larger_number(tmp_path: Path) -> None:
    assert build(tmp_path, gpt(", d, P=113, p=0.5", "0, 0, d, 0, 0, (P, p)")).extra == (113, 0.1)


def test_a_shorter_context_is_built_if_the_code_does_not_run_in_the_checkpoints(
    tmp_path: Path,
) -> None:
    """The mask has the size of the width."""
    source = """
class GPT(Core):
    def __init__(self, vocab_size, dim, seq_len):
        super().__init__(vocab_size, seq_len, dim, 0, 0)
        self.wte, self.pos = nn.Embedding(vocab_size, dim), torch.zeros(seq_len, dim)
        self.mask = torch.ones(dim, dim)

    def forward(self, ids):
        x = self.wte(ids) + self.pos
        T = x.shape[1]
        return (x @ x.mT * self.mask[:T, :T]) @ x @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert model.sizes[1] == 13 and call.endswith("your code only runs with seq_len=13")


def test_one_layer_is_built_if_the_code_does_not_run_with_more(tmp_path: Path) -> None:
    """The result of a block has an axis more than its input."""
    source = """
class GPT(Core):
    def __init__(self, vocab_size, dim, depth):
        super().__init__(vocab_size, 0, dim, depth, 0)
        self.wte = nn.Embedding(vocab_size, dim)

    def forward(self, ids):
        x = self.wte(ids)
        for _ in range(self.sizes[3]):
            B, T, C = x.shape
            x = x[None]
        return x @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert model.sizes[3] == 1 and call.endswith("your code runs with one layer and not with 3")


@pytest.mark.parametrize("name", ["vocab_index", "chars", "char2idx", "stoi", "vocab_list"])
def test_what_is_counted_for_the_vocabulary_has_its_length(tmp_path: Path, name: str) -> None:
    source = gpt(f", {name}, n_ctx, dim, depth, heads", f"len({name}), n_ctx, dim, depth, heads")
    assert build(tmp_path, source).sizes == SIZES


@pytest.mark.parametrize("test", ["type(chars) != list", "not isinstance(chars, list)"])
def test_characters_that_must_be_a_list_are_one(tmp_path: Path, test: str) -> None:
    """None is their default, without which no model is built."""
    init = ", chars=None, n_ctx=4, dim=4, depth=4, heads=4"
    sizes = "len(chars), n_ctx, dim, depth, heads"
    model = build(tmp_path, gpt(init, sizes, before=f"if {test}: raise SystemExit(1)"))
    assert model.sizes == SIZES


LOADS_TOKENIZER = """
import os

class Tokenizer:
    def __init__(self, path):
        assert os.path.isfile(path), path
        self.n_words, self.pad = 5, 2
"""


def test_a_tokenizer_that_the_users_class_cannot_load_has_the_size_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    before = "tokenizer = Tokenizer(os.path.dirname(__file__) + '/words.txt')"
    sizes = "tokenizer.n_words, n_ctx, dim, depth, heads, tokenizer"
    source = LOADS_TOKENIZER + gpt(", n_ctx, dim, depth, heads", sizes, before)
    assert build(tmp_path, source).sizes == SIZES
    (tmp_path / "words.txt").write_text("")
    model = build(tmp_path, source)
    assert model.sizes == (5, *SIZES[1:]) and model.extra.pad == 2
    (tmp_path / "words.txt").unlink()
    with pytest.raises(AdaptError, match=r"AssertionError.*words\.txt"):
        build(tmp_path, source.replace("class Tokenizer:", "class Tokenizer(dict):"))


def test_a_rate_in_a_config_may_be_a_list(tmp_path: Path) -> None:
    sizes = READ.replace("c.", "cfg.").replace("cfg.", "cfg['").replace(",", "'],") + "']"
    before = "rates = cfg['drop_rate'][0], cfg['drop_rate'][2]"
    model = build(tmp_path, gpt(", cfg", f"{sizes}, rates", before))
    assert model.sizes == SIZES and model.extra == (CONFIG.resid_pdrop,) * 2


def test_the_number_of_heads_in_a_config_may_be_called_a_head_size(tmp_path: Path) -> None:
    sizes = READ.replace("c.", "config.").replace("n_head", "head_size")
    source = (
        gpt(", config", f"{sizes}, config.head_size")
        + """
    def split(self, x):
        B, T, C = x.shape
        return x.view(B, T, self.extra, C // self.extra)
"""
    )
    assert build(tmp_path, source).sizes[4] == CONFIG.n_embd // CONFIG.n_head
    source = source.replace("self.extra", "self.head_size")
    assert build(tmp_path, source).sizes == SIZES


def test_a_config_class_that_reads_a_file_is_replaced(tmp_path: Path) -> None:
    before = """
class Config:
    def __init__(self, config_path):
        with open(config_path) as file:
            self.entries = json.load(file)

    def __getattr__(self, name):
        return self.entries[name]
"""
    model = build(tmp_path, before + gpt(", config: Config", READ.replace("c.", "config.")))
    assert model.sizes == SIZES


def test_a_module_that_embeds_ids_is_made_with_the_sizes_that_are_read(tmp_path: Path) -> None:
    sizes = "embedding.vocab_size, 0, embedding.d_model, depth, heads, embedding"
    model = build(tmp_path, gpt(", embedding: nn.Module, depth, heads", sizes))
    assert model.sizes == (97, 0, 24, 3, 4) and model.extra.weight.shape == (97, 24)


def test_an_object_that_makes_a_module_is_not_a_config(tmp_path: Path) -> None:
    before = """
class Factory:
    def __init__(self, made=None):
        self.made = made

    def __call__(self, *args):
        return self.made(*args)
"""
    init = ", vocab_size, dim, norm_factory: Factory = Factory(nn.LayerNorm)"
    source = before + gpt(init, "vocab_size, 0, dim, 0, 0, norm_factory(dim)")
    assert isinstance(build(tmp_path, source).extra, nn.LayerNorm)


def test_a_context_of_the_width_is_built_if_the_code_runs_only_with_it(tmp_path: Path) -> None:
    """The token embedding is as wide as the context is long."""
    source = """
class GPT(Core):
    def __init__(self, vocab_size, dim, seq_len):
        super().__init__(vocab_size, seq_len, dim, 0, 0)
        self.wte, self.wpe = nn.Embedding(vocab_size, seq_len), nn.Embedding(seq_len, dim)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        return x @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert model.sizes[1] == 24 and call.endswith("your code only runs with seq_len=24")


def test_a_switch_is_not_a_config_whatever_its_annotation_is(tmp_path: Path) -> None:
    before = "class Annotation:\n    def __init__(self):\n        raise RuntimeError\n"
    source = before + gpt(", c, traced: Annotation = False", f"{READ}, traced")
    model = build(tmp_path, source)
    assert (model.sizes, model.extra) == (SIZES, False)


def test_an_error_that_every_trial_raises_is_named(tmp_path: Path) -> None:
    source = gpt(
        ", vocab_size, n_ctx, dim, depth, heads, zug", "vocab_size, n_ctx, dim, depth, heads"
    )
    source += "\n    def forward(self, ids):\n        return self.norm(ids)\n"
    with pytest.raises(AdaptError, match="needs the argument zug") as caught:
        described(tmp_path, source)
    last = str(caught.value).splitlines()[-2:]
    assert last[0].startswith("  With each value that compat tried, GPT raised AttributeError:")
    assert last[1].endswith("return self.norm(ids)")


def test_an_error_that_most_constructors_raise_is_named(tmp_path: Path) -> None:
    source = gpt(", vocab_size, n_ctx, dim, depth, heads, zug", "vocab_size, n_ctx, dim, depth, 0")
    check = "        assert zug > 0\n        self.gate = gate\n"
    source = source.replace("        super().__init__(", f"{check}        super().__init__(", 1)
    with pytest.raises(AdaptError, match="needs the argument zug") as caught:
        described(tmp_path, source)
    last = str(caught.value).splitlines()[-2:]
    assert (
        last[0]
        == "  With most values that compat tried, GPT raised NameError: name 'gate' is not defined"
    )
    assert last[1].endswith("self.gate = gate")


def test_a_missing_device_is_no_reason_for_a_shorter_context(tmp_path: Path) -> None:
    source = """
DEVICE = "cuda"

class GPT(Core):
    def __init__(self, vocab_size, dim, seq_len):
        super().__init__(vocab_size, seq_len, dim, 0, 0)
        self.wte, self.wpe = nn.Embedding(vocab_size, dim), nn.Embedding(seq_len, dim)

    def forward(self, ids):
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=DEVICE))
"""
    model, call = described(tmp_path, source)
    assert model.sizes[1] == 32 and "only runs" not in call
    source = source.replace("vocab_size, dim, seq_len)", "vocab_size, dim, seq_len, depth)")
    source = source.replace("dim, 0, 0)", "dim, depth, 0)")
    model, call = described(tmp_path, source)
    assert model.sizes[3] == 3 and "one layer" not in call


@pytest.mark.parametrize("annotation", ["str | None", "int | None"])
def test_an_annotation_of_a_base_class_stands_for_the_config_that_has_the_sizes(
    tmp_path: Path, annotation: str
) -> None:
    source = f"""
from dataclasses import dataclass

class ModelConfig:
    pass

@dataclass
class SizesConfig(ModelConfig):
    n_embd: int = 8
    n_layer: int = 2
    model_size: {annotation} = None

class GPT(Core):
    def __init__(self, config: ModelConfig):
        super().__init__(0, 0, config.n_embd, config.n_layer, 0, config)
"""
    model = build(tmp_path, source)
    assert type(model.extra).__name__ == "SizesConfig"
    assert model.sizes[2:4] == (24, 3)
    assert model.extra.model_size == (None if "str" in annotation else 24)


def test_a_device_that_the_code_compares_is_passed(tmp_path: Path) -> None:
    source = gpt(", vocab_size, device=None", NOTHING, "assert device == torch.device('cpu')")
    source += "\n    def forward(self, ids):\n        return ids\n"
    _, call = described(tmp_path, source)
    assert "your code only runs with device=device(type='cpu')" in call


def test_a_default_factory_may_be_a_value(tmp_path: Path) -> None:
    config = """
import dataclasses
PARTS = {"kind": 7}

@dataclass
class Config:
    n_embd: int = 8
    n_layer: int = 2
    parts: dict = dataclasses.field(default_factory=PARTS)
"""
    source = config + gpt(", config: Config", 'config.n_embd, config.parts["kind"], 3, 4, 5')
    assert build(tmp_path, source).sizes[:2] == (24, 7)


def test_an_attribute_that_the_config_class_lacks_is_added(tmp_path: Path) -> None:
    """The attribute of a tensor, such as `x.ndim`, is not the name of a size."""
    source = """
@dataclass
class GPTConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int

class GPT(Core):
    def __init__(self, config: GPTConfig):
        super().__init__(config.hidden_size, config.intermediate_size, 3, 4, 5, config.use_cache)
        self.w = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, ids):
        x = nn.functional.one_hot(ids, self.w.in_features).float()
        assert x.ndim == 3 and (ids.shape[1] > 9 or self.extra is False)
        return self.w(x)
"""
    model = build(tmp_path, source)
    assert model.sizes[:2] == (24, 96) and model.extra is False


def test_tensors_that_are_far_too_large_for_the_checkpoint_are_not_created(tmp_path: Path) -> None:
    """2 · 60,000² elements take 29 GB: the system may end a process that asks for them."""
    source = gpt("", NOTHING) + "        self.mask = torch.ones(2, 60_000, 60_000)\n"
    with pytest.raises(AdaptError, match="MemoryError: its tensors have more than 53") as error:
        build(tmp_path, source)
    assert "self.mask = torch.ones(2, 60_000, 60_000)" in str(error.value)


def test_a_dictionary_that_is_unpacked_has_the_arguments_of_the_class_that_takes_it(
    tmp_path: Path,
) -> None:
    """A config in the module, whose other entries the class does not take, is not passed."""
    source = """
class Attention(nn.Module):
    def __init__(self, d_model, h, max_seq_len, dropout=0.1):
        super().__init__()

PARAMS = {"d_model": 8, "num_heads": 2, "max_seq_len": 4, "lr": 1e-3}

class GPT(Core):
    def __init__(self, vocab_size, attention_params, N):
        sizes = attention_params["d_model"], attention_params["max_seq_len"]
        super().__init__(vocab_size, *sizes[::-1], N, attention_params["h"])
        self.attention = Attention(**attention_params)
"""
    assert build(tmp_path, source).sizes == SIZES


def test_an_unknown_switch_is_off_if_the_model_then_has_the_parameters_of_a_gpt2(
    tmp_path: Path,
) -> None:
    source = """
@dataclass
class Config:
    n_vocab: int = 50257
    n_ctx: int = 1024
    n_embd: int = 768
    n_head: int = 12
    n_layer: int = 12
    use_folding: bool = True
    use_nothing: bool = True

class GPT(Core):
    def __init__(self, config: Config):
        c, n = config, config.n_embd
        switches = c.use_folding, c.use_nothing
        super().__init__(c.n_vocab, c.n_ctx, n, c.n_layer, c.n_head, switches)
        self.wte, self.wpe = nn.Embedding(c.n_vocab, n), nn.Embedding(c.n_ctx, n)
        inner = 5 if c.use_folding else 4 * n
        layers = [nn.Linear(n, 3 * n), nn.Linear(n, n), nn.Linear(n, inner), nn.Linear(inner, n)]
        norms = [nn.LayerNorm(n), nn.LayerNorm(n)]
        self.h = nn.ModuleList(nn.ModuleList([*layers, *norms]) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(n)

    def forward(self, ids):
        return self.ln_f(self.wte(ids)) @ self.wte.weight.T
"""
    model, call = described(tmp_path, source)
    assert model.extra == (False, True)
    assert "your Config has use_folding=True" in call


def test_a_module_that_is_annotated_gets_the_same_config(tmp_path: Path) -> None:
    source = """
from torch import nn

class FastAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width, self.linear = config.n_embd, nn.Linear(config.n_embd, config.n_embd)

class GPT(nn.Module):
    def __init__(self, config, attention: nn.Module):
        super().__init__()
        self.config, self.attention = config, attention
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, ids):
        return self.attention.linear(self.wte(ids)) @ self.wte.weight.T
"""
    model = build(tmp_path, source)
    assert type(model.attention).__name__ == "FastAttention"
    assert model.attention.width == CONFIG.n_embd


def test_buffers_in_float64_are_converted_if_the_code_runs_only_then(tmp_path: Path) -> None:
    source = """
import numpy as np
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, n_ctx, n_embd):
        super().__init__()
        self.wte, self.head = nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size)
        self.register_buffer("table", torch.tensor(np.sin(np.arange(n_ctx))[:, None]))

    def forward(self, ids):
        return self.head(self.wte(ids) + self.table[: ids.shape[1]])
"""
    model, call = described(tmp_path, source)
    assert model.table.dtype == torch.float32
    assert call.endswith("; your code only runs after model.float()")
    model, call = described(tmp_path, source.replace(": ids.shape[1]]", ": ids.shape[1]].float()"))
    assert model.table.dtype == torch.float64
    assert "float()" not in call


def test_fairscales_parallel_layers_are_those_of_torch(tmp_path: Path) -> None:
    source = """
import no_fairscale.initialize as fs_init
from no_fairscale.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd):
        super().__init__()
        width = 2 * n_embd // fs_init.get_model_parallel_world_size()
        self.wte = ParallelEmbedding(vocab_size, n_embd, init_method=lambda x: x)
        self.up = ColumnParallelLinear(n_embd, width, bias=False, gather_output=False)
        self.down = RowParallelLinear(width, n_embd, input_is_parallel=True)

    def forward(self, ids):
        return self.down(self.up(self.wte(ids))) @ self.wte.weight.T
"""
    model = build(tmp_path, source)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes == {
        "wte.weight": (97, 24), "up.weight": (48, 24), "down.weight": (24, 48), "down.bias": (24,),
    }  # fmt: skip


def test_a_setting_that_the_config_class_refuses_keeps_its_default(tmp_path: Path) -> None:
    source = DATACLASS + "    bias: bool = False\n    dropout: float = 0.0\n\n"
    source += "    def __post_init__(self):\n        assert self.dropout == 0 and not self.bias\n\n"
    model = build(
        tmp_path,
        source + gpt(", config: GPTConfig", f"{READ}, config.bias".replace("c.", "config.")),
    )
    assert model.sizes == (97, 32, 24, 3, 4) and model.extra is False


def test_a_window_length_is_the_context_if_no_other_name_is(tmp_path: Path) -> None:
    alone = gpt(
        ", vocab_size, n_embd, n_layer, n_head, window_length=5",
        "vocab_size, window_length, n_embd, n_layer, n_head",
    )
    assert build(tmp_path, CORE + alone).sizes == (97, 32, 24, 3, 4)
    beside = alone.replace("window_length=5", "n_ctx, window_length=5")
    assert build(tmp_path, CORE + beside).sizes == (97, 5, 24, 3, 4)


def test_what_the_body_of_a_config_class_assigns_is_kept_if_it_takes_anything(
    tmp_path: Path,
) -> None:
    source = """
from typing import Optional

@dataclass
class Config:
    vocab_size: int = 5
    n_embd: int = 6
    n_layer: int = 7
    ffn_dim_multiplier: Optional[float] = None

    def __init__(self, **kwargs):
        for name, value in kwargs.items():
            if hasattr(self, name):
                setattr(self, name, value)

class GPT(Core):
    def __init__(self, config: Config):
        sizes = config.vocab_size, config.n_embd, config.n_layer
        super().__init__(*sizes, 4, 5, config.ffn_dim_multiplier)
"""
    model = build(tmp_path, CORE + source)
    assert model.sizes[:3] == (97, 24, 3) and model.extra is None


@pytest.mark.parametrize("by_name", [False, True])
def test_the_name_of_a_data_type_in_a_file_is_the_type_unless_the_code_looks_it_up(
    tmp_path: Path, by_name: bool
) -> None:
    dtype = 'getattr(torch, cfg["dtype"])' if by_name else 'cfg["dtype"]'
    source = f"""
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.wte = nn.Embedding(cfg["vocab_size"], cfg["n_embd"], dtype={dtype})
"""
    entries = {"vocab_size": 5, "n_embd": 6, "dtype": "float64"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    model = own_file.build(tmp_path, source)
    assert model.wte.weight.shape == (97, 24)
    assert model.wte.weight.dtype == (torch.float64 if by_name else torch.float32)


def test_parameters_of_several_types_are_converted_if_the_code_runs_only_then(
    tmp_path: Path,
) -> None:
    """The code checks the type of its buffer, so that `model.float()` would not help."""
    source = """
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, n_ctx, n_embd):
        super().__init__()
        self.wte, self.head = nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size)
        self.register_buffer("table", torch.ones(n_ctx, 1, dtype=torch.bfloat16))
        self.wte.to(torch.bfloat16)

    def forward(self, ids):
        assert self.table.dtype == torch.bfloat16
        return self.head(self.wte(ids) + self.table[: ids.shape[1]])
"""
    model, call = described(tmp_path, source)
    assert model.wte.weight.dtype == torch.float32 and model.table.dtype == torch.bfloat16
    assert call.endswith("; outside autocast, your code only runs with float32 parameters")
    source = source.replace(
        "self.head(self.wte(ids) +", "self.head((self.wte(ids) * 1.0).float() +"
    )
    model, call = described(tmp_path, source)
    assert model.wte.weight.dtype == torch.bfloat16 and "autocast" not in call


def test_sizes_of_a_module_that_cannot_be_imported_are_the_checkpoints(tmp_path: Path) -> None:
    """Only what is read off such a module is executed, and here the constructor reads it."""
    (tmp_path / "own_sizes.py").write_text("open('no such file')\nN_EMBD = 384\nVOCAB_SIZE = 65\n")
    source = """
from torch import nn
import own_sizes

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(own_sizes.VOCAB_SIZE, own_sizes.N_EMBD)

    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    assert build(tmp_path, source).wte.weight.shape == (CONFIG.vocab_size, CONFIG.n_embd)
