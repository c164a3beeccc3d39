"""Published files: values that only scripts assign, missing libraries, parts and sizes."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch
from torch import nn

from compat import AdaptError
from compat.user_models import construct, construct_with_call, load_target
from compat.user_models.synonyms import neutral, role_of, role_of_number
from tests.user_models.own_file import CONFIG, build, described, loaded

OF_CONFIG = "vocab_size, n_embd, n_layer = config.vocab_size, config.n_embd, config.n_layer"
ITEMS_OF_CONFIG = (
    'vocab_size, n_embd, n_layer = config["vocab_size"], config["n_embd"], config["n_layer"]'
)
ARGUMENTS = ", vocab_size, n_embd, n_layer"


def sized(signature: str = "", before: str = "") -> str:
    """Return a class GPT whose constructor executes these lines before it uses its sizes."""
    return f"""
from torch import nn

class GPT(nn.Module):
    def __init__(self{signature}):
        super().__init__()
{indent(before, " " * 8)}
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList(nn.Linear(n_embd, n_embd) for _ in range(n_layer))
"""


def test_globals_that_only_the_main_guard_assigns_are_set(tmp_path: Path) -> None:
    script = """
if __name__ == "__main__":
    text = open("no such file").read()
    vocab_size = len(set(text))
    n_embd, n_layer = 5, 6
    print(GPT())
"""
    model = build(tmp_path, sized() + script)
    assert (model.wte.weight.shape, len(model.h)) == ((97, 24), 3)
    with pytest.raises(AdaptError, match="own"):
        build(tmp_path, sized().replace("n_embd", "secret"))


def test_the_config_class_of_a_training_script_is_used(tmp_path: Path) -> None:
    """Only the script reads its name, and the script fails before it does so."""
    config = """
from dataclasses import dataclass

@dataclass
class GPTConfig:
    vocab_size: int = 5
    n_embd: int = 4
    n_layer: int = 1
    pattern: str = "SSSL"

"""
    source = sized(", config", f"self.pattern = config.pattern.lower()\n{OF_CONFIG}")
    script = "text = open('no such file').read()\nprint(GPT(GPTConfig()), text)\n"
    model = build(tmp_path, config + source + script)
    assert (model.pattern, model.wte.weight.shape) == ("sssl", (97, 24))


def test_sizes_that_the_file_does_not_define_are_set(tmp_path: Path) -> None:
    """This happens in a notebook from which the cell with the hyperparameters was deleted."""
    unused = "\n    def grow(self):\n        return MLP(4)\n"  # a class that was deleted
    cls = loaded(tmp_path, sized() + unused)
    model, call = construct_with_call(cls, CONFIG)
    assert model.wte.weight.shape == (97, 24)  # type: ignore[union-attr]
    assumed = "vocab_size=97, n_embd=24, n_layer=3"
    assert f"your code reads names that it does not define, so compat set {assumed}" in call
    assert "MLP" not in call
    assert "n_embd" not in vars(sys.modules[cls.__module__])  # removed afterwards
    sizes = "n_embd, n_layer, vocab_size = 5, 6, 7\n"
    assert "does not define" not in described(tmp_path, sizes + sized())[1]


def test_a_global_that_is_none_until_the_data_is_read_is_set(tmp_path: Path) -> None:
    settings = "vocab_size = None\ntokens = None\nn_embd, n_layer = 5, 6\n"
    model = build(tmp_path, settings + sized() + "        self.seen = tokens\n")
    assert model.wte.weight.shape == (97, 24)
    assert model.seen is None


def test_a_vocabulary_size_that_is_not_a_number_is_replaced(tmp_path: Path) -> None:
    read = """
vocab = sorted(set("some text"))
places = {c: i for i, c in enumerate(vocab)}
vocab_size = open("no such file").name
n_embd, n_layer = 5, 6
"""
    model = build(tmp_path, read + sized() + "        self.seen = places\n")
    assert model.seen["e"] == 1
    assert model.wte.weight.shape == (97, 24)


def test_a_tokenizer_without_files_has_the_tokens_that_are_added(tmp_path: Path) -> None:
    read = """
from transformers import GPT2Tokenizer
tokenizer = GPT2Tokenizer.from_pretrained("no/such/tokenizer")
tokenizer.add_special_tokens({"pad_token": "<pad>"})
vocab_size, n_embd, n_layer = len(tokenizer), 5, 6
"""
    model = build(tmp_path, read + sized() + "        self.padding = tokenizer.pad_token_id\n")
    assert model.wte.weight.shape == (97, 24)
    assert isinstance(model.padding, int)


def test_the_program_is_not_ended_without_a_message(tmp_path: Path) -> None:
    source = sized("", "import os\nvocab_size, n_embd, n_layer = 5, 6, 7\nos._exit(3)")
    with pytest.raises(AdaptError, match=r"SystemExit: 3\n.*os\._exit\(3\)"):
        build(tmp_path, source)


@pytest.mark.parametrize("expected", ["bfloat16", "float32"])
def test_a_data_type_that_is_compared_with_strings_is_one(tmp_path: Path, expected: str) -> None:
    lines = """
if cfg["torch_dtype"] == "bfloat16":
    self.kind = "bfloat16"
else:
    assert cfg["torch_dtype"] == "float32"
    self.kind = "float32"
vocab_size, n_embd, n_layer = cfg["vocab_size"], cfg["n_embd"], cfg["n_layer"]
"""
    if expected == "bfloat16":
        lines = lines.replace('"float32"', "torch.float32")
    assert build(tmp_path, "import torch\n" + sized(", cfg", lines)).kind == expected


def test_a_ratio_that_the_code_computes_without_a_value_is_none(tmp_path: Path) -> None:
    lines = f"assert config.ffn_dim_multiplier is None\n{OF_CONFIG}"
    assert build(tmp_path, sized(", config", lines)).wte.weight.shape == (97, 24)


def test_only_biases_that_gpt2_has_are_turned_on() -> None:
    assert (role_of("use_recency_bias"), role_of("mlp_bias")) == (None, "bias")
    assert role_of("relative_attention_bias") is None and role_of("attn_bias") == "qkv_bias"


def test_a_width_beside_those_of_embeddings_and_the_mlp_is_that_of_the_stream() -> None:
    names = ["embedding_dim", "hidden_dim", "dim_feedforward"]
    assert role_of("hidden_dim", names) == "n_embd"
    assert role_of("hidden_dim", names[:2]) == "d_inner"
    of_transformers = ["dim", "hidden_dim", "chunk_size_feed_forward"]
    assert role_of("hidden_dim", of_transformers) == "d_inner"


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_an_argument_with_named_choices_has_one_of_them(tmp_path: Path, future: str) -> None:
    config = f"""{future}from dataclasses import dataclass
from typing import Literal

@dataclass
class Config:
    vocab_size: int
    n_embd: int
    n_layer: int
    mlp: Literal["swiglu", "gelu"]

    def __post_init__(self):
        assert self.mlp in ("swiglu", "gelu")

"""
    call = "    def forward(self, ids):\n        return self.wte(ids) @ self.wte.weight.T\n"
    lines = f"self.mlp = {{'swiglu': 1, 'gelu': 2}}[config.mlp]\n{OF_CONFIG}"
    model = build(tmp_path, config + sized(", config: Config", lines) + call)
    assert model.mlp in (1, 2) and model.wte.weight.shape == (97, 24)


def test_a_section_that_is_empty_by_default_is_a_dictionary(tmp_path: Path) -> None:
    lines = f"self.k = config.get('moe', {{}}).get('n_expert', 3)\n{ITEMS_OF_CONFIG}"
    assert build(tmp_path, sized(", config", lines)).k == 3


LIBRARY = """
from no_such_library import checked, log
import no_such_trainer

class GPT(nn.Module):
    @checked(kind="all")
    @checked
    def __init__(self, width: checked.Int["n"] = 5):
        super().__init__()
        log.info("built")
        self.width = width
"""


def test_a_missing_library_that_logs_and_decorates_is_replaced(tmp_path: Path) -> None:
    source = "from torch import nn\n" + LIBRARY
    assert build(tmp_path, source).width == 24
    with pytest.raises(AdaptError, match=r"no_such_library[\s\S]*self\.width = log\.info"):
        build(tmp_path, source + "        self.width = log.info(width)\n")


def test_a_config_class_of_a_missing_library_is_built(tmp_path: Path) -> None:
    """This includes fields that only `forward` reads, which have no value without the decorator."""
    sizes = OF_CONFIG.replace("config", "hparams")
    source = sized(", hparams: HParams", f"self.hparams = hparams\n{sizes}")
    fields = "vocab_size: int\n    n_embd: int\n    n_layer: int\n"
    config = f"import no_such_library\n\n@no_such_library.define\nclass HParams:\n    {fields}"
    config += "    gradient_checkpointing: bool\n    path: str\n    made = 3\n"
    model = build(tmp_path, config + source)
    assert model.wte.weight.shape == (97, 24) and model.hparams.gradient_checkpointing is False
    assert (model.hparams.path, model.hparams.made) == ("", 3)


def test_data_that_a_missing_library_downloads_is_not_needed(tmp_path: Path) -> None:
    """A function downloads it at module level, as in book chapters that load OpenAI's weights."""
    (tmp_path / "own_download.py").write_text(
        "import no_such_library as lib\n\ndef download():\n    return lib.variables()['size']\n"
    )
    source = "from torch import nn\nfrom own_download import download\n" + sized(ARGUMENTS)
    assert len(build(tmp_path, source + "\nsize = download()\n").h) == 3


def versioned_package(package: Path) -> Path:
    """Make a package that reads the version of its project, which is not installed."""
    package.mkdir()
    (package / "__init__.py").write_text(
        "from importlib.metadata import version\n__version__ = version('no-such-project')\n"
    )
    return package


def test_a_project_may_read_its_own_version(tmp_path: Path) -> None:
    package = versioned_package(tmp_path / "own_versioned")
    (package / "layers.py").write_text("SIZE = 7\n")
    (package / "model.py").write_text(
        "from own_versioned.layers import SIZE\nfrom torch import nn\n\n"
        "class GPT(nn.Module):\n    size = SIZE\n"
    )
    assert vars(load_target(f"{package / 'model.py'}:GPT"))["size"] == 7


def test_a_module_that_a_method_imports_may_fail(tmp_path: Path) -> None:
    """It reads a version, and imports a missing library, as those at the top of a file do."""
    package = versioned_package(tmp_path / "own_lazy")
    (package / "layers.py").write_text("import no_such_library\nSIZE = 7\n")
    imports = "from own_lazy.layers import SIZE"
    (package / "model.py").write_text(
        "from torch import nn\n\nclass GPT(nn.Module):\n    def size(self):\n"
        f"        {imports}\n        import own_lazy.training\n        return SIZE\n"
    )
    (package / "training.py").write_text("")
    model = f"{package / 'model.py'}:GPT"
    assert vars(load_target(model))["size"](None) == 7
    (package / "layers.py").write_text("SIZE = 7\n")
    for training in ("no such Python", "raise SystemExit"):  # which the model may not need
        (package / "training.py").write_text(training)
        assert load_target(model).__name__ == "GPT"


PARTS = """
from torch import nn

class Decoder(nn.Module):
    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.layers = layers

class Words(nn.Embedding):
    pass

class GPT(nn.Module):
    def __init__(self, decoder: Decoder, words: Words):
        super().__init__()
        self.decoder, self.words = decoder, words

def show(gpt):
    return GPT(gpt.decoder, gpt.words)

def assemble(vocab, N=6, d_model=512):
    layers = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(N))
    return GPT(Decoder(layers), Words(vocab, d_model))
"""


@pytest.mark.parametrize("name", ["GPT", None])
def test_a_function_that_assembles_the_parts_is_called(tmp_path: Path, name: str | None) -> None:
    model = build(tmp_path, PARTS, name)
    assert (type(model).__name__, len(model.decoder.layers)) == ("GPT", 3)
    assert model.words.weight.shape == (97, 24)


CONTAINER = """
from torch import nn

class Tower(nn.Sequential):
    BODY

def assemble(vocab, N=6, d_model=512):
    layers = [nn.Linear(d_model, d_model) for _ in range(N)]
    return Tower(nn.Embedding(vocab, d_model), *layers)
"""


@pytest.mark.parametrize("own", [False, True])
def test_a_function_that_assembles_a_container_is_called(tmp_path: Path, own: bool) -> None:
    """A container without its own constructor has no sizes."""
    sized = "def __init__(self, n_layer, n_embd, vocab): super().__init__(nn.Linear(n_layer, 1))"
    model = build(tmp_path, CONTAINER.replace("BODY", sized if own else "pass"), None)
    assert type(model).__name__ == "Tower" and len(model) == (1 if own else 4)


@pytest.mark.parametrize(
    ("constructor", "layers"),
    [("decoder, words", 3), ("decoder: Decoder, words", 3), ("n_layer, n_embd, vocab", None)],
)
def test_a_function_is_called_only_if_the_class_accepts_no_sizes(
    tmp_path: Path, constructor: str, layers: int | None
) -> None:
    """Annotations do not matter; a function such as `tiny(vocab, N=2)` has its own sizes."""
    source = PARTS.replace("decoder: Decoder, words: Words", constructor)
    if layers is None:
        source = source.replace("self.decoder, self.words = decoder, words", "self.built = n_layer")
    model = build(tmp_path, source, "GPT")
    assert (model.built if layers is None else len(model.decoder.layers)) == 3
    assert hasattr(model, "built") is (layers is None)


def test_a_data_class_that_the_constructor_builds_has_the_checkpoints_sizes(tmp_path: Path) -> None:
    """This is true of the defaults of its fields and of its other attributes."""
    sizes = (
        "from dataclasses import dataclass\n\n@dataclass\nclass Own:\n"
        "    vocab_size: int = 5\n    n_embd: int = 6\n    n_layer = 7\n    note: str = 'x'\n"
    )
    read = "own = Own()\n" + OF_CONFIG.replace("config", "own")
    model = build(tmp_path, sizes + sized(before=read))
    assert (model.wte.weight.shape, len(model.h)) == ((97, 24), 3)
    own = vars(sys.modules[type(model).__module__])["Own"]()
    assert (own.vocab_size, own.n_embd, own.n_layer, own.note) == (5, 6, 7, "x")


def test_a_data_class_that_reads_a_missing_file_is_built(tmp_path: Path) -> None:
    source = sized(", config: Config").replace("(vocab_size", "(config.vocab_size")
    source = source.replace("n_embd", "config.n_embd").replace("n_layer", "config.n_layer")
    fields = "from dataclasses import dataclass\n\n@dataclass\nclass Config:\n"
    fields += "    n_embd: int = 5\n    n_layer: int = 6\n    vocab_size: int = 7\n"
    check = "    def __post_init__(self):\n        self.half = self.n_embd // 2\n"
    check += "        open('no data').read()\n"
    source += "        self.half = config.half\n"
    model = build(tmp_path, fields + check + source)
    assert (model.wte.weight.shape, model.half) == ((97, 24), 12)
    for wrong in (check.replace("__post_init__", "__init__"), check.replace("open(", "int(")):
        with pytest.raises(AdaptError, match="own"):
            build(tmp_path, fields + wrong + source)


def test_a_vocabulary_of_a_tokenizer_that_is_counted_has_the_length(tmp_path: Path) -> None:
    source = sized(", n_embd, n_layer, tokenizer", "vocab_size = len(tokenizer.vocab)")
    assert build(tmp_path, source).wte.weight.shape == (97, 24)


@pytest.mark.parametrize("where", ["own.py", "settings.py"])
def test_an_attribute_of_a_config_class_may_raise(tmp_path: Path, where: str) -> None:
    """It downloads a tokenizer, without which the model can be built."""
    config = """
import tiktoken

class Config:
    tokenizer = tiktoken.get_encoding("no such encoding")
    text: str = open("no such file").read()
    vocab_size = len(text)
    n_embd, n_layer = 5, 6
    sep_id = tokenizer.eot_token
"""
    source = sized(", config: Config", f"self.sep_id = config.sep_id\n{OF_CONFIG}")
    if where == "own.py":
        source = config + source
    else:
        tmp_path.joinpath(where).write_text(config)
        source = "from settings import Config\n" + source
    model = build(tmp_path, source)
    assert (model.wte.weight.shape, len(model.h)) == ((97, 24), 3)


def test_a_function_that_accepts_only_a_size_receives_the_config(tmp_path: Path) -> None:
    source = "from torch import nn\n\ndef own(size):\n    return nn.Linear(size.n_embd, 2)\n"
    assert build(tmp_path, source, "own").in_features == 24


def test_a_variant_of_the_model_is_not_selected(tmp_path: Path) -> None:
    both = sized().replace("GPT", "RotaryGPT") + sized()
    assert loaded(tmp_path, both, None).__name__ == "GPT"
    both = both.replace("class GPT", "class LinearGPT")
    assert loaded(tmp_path, both, None).__name__ == "LinearGPT"


def test_sizes_may_be_among_other_keywords(tmp_path: Path) -> None:
    read = """
vocab_size = kwargs.get("vocab_size", 9)
n_embd = kwargs["width"]
n_layer = kwargs.pop("depth", 1)
self.note = kwargs.get("note", "none")"""
    model = build(tmp_path, sized(", **kwargs", read))
    assert (model.wte.weight.shape, len(model.h), model.note) == ((97, 24), 3, "none")


def test_an_attribute_with_a_default_is_not_added(tmp_path: Path) -> None:
    """A config class without the attribute builds the model as for its author."""
    source = """
from torch import nn

class OwnConfig:
    def __init__(self, n_embd=5):
        self.n_embd = n_embd

class GPT(nn.Module):
    def __init__(self, config: OwnConfig):
        super().__init__()
        self.rope = getattr(config, "use_rope", "default")
        self.wide = getattr(config, "n_embd", 3), config.n_layer
"""
    model = build(tmp_path, source)
    assert (model.rope, model.wide) == ("default", (24, 3))


def test_an_attribute_with_a_default_that_another_class_requires_may_be_left_out(
    tmp_path: Path,
) -> None:
    """It would be the MLP's width beside `hidden_size`, but here it is an alias of that."""
    source = """
from torch import nn

class Config:
    def __init__(self, vocab_size=5, hidden_size=6, n_layer=1, **others):
        self.vocab_size, self.hidden_size, self.n_layer = vocab_size, hidden_size, n_layer
        vars(self).update(others)

class Unused(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.linear = nn.Linear(config.hidden_dim, 2)

class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width = getattr(config, "hidden_dim", None)
        width = config.hidden_size if width is None else width
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(config.n_layer))

    def forward(self, ids):
        return self.h[0](self.wte(ids)) @ self.wte.weight.T
"""
    model = build(tmp_path, source)
    assert (model.wte.weight.shape, model.h[0].in_features) == ((97, 24), 24)


@pytest.mark.parametrize("kind", ["typing.Optional[float]", "float"])
def test_negated_switches_and_caps_are_off(tmp_path: Path, kind: str) -> None:
    """A cap is disabled if its type permits None."""
    config = f"""
import typing
from dataclasses import dataclass

@dataclass
class Config:
    vocab_size: int = 5
    n_embd: int = 4
    n_layer: int = 1
    no_bias: bool = True
    logit_soft_cap: {kind} = 50.0
"""
    cap = "self.linear = nn.Linear(4, 4, bias=not config.no_bias and config.logit_soft_cap)"
    source = sized(", config: Config", f"self.config = config\n{OF_CONFIG}\n{cap}")
    model = build(tmp_path, config + source)
    assert model.config.no_bias is False
    assert model.config.logit_soft_cap == (50.0 if kind == "float" else None)


@pytest.mark.parametrize(
    ("name", "alone", "with_a_width"),
    [
        ("Nx", "n_embd", "n_layer"),
        ("num_embeddings", "n_embd", "vocab_size"),
        ("hidden_size", "n_embd", "d_inner"),
        ("token_size", "n_embd", "vocab_size"),
    ],
)
def test_the_role_of_an_ambiguous_name_depends_on_other_names(
    name: str, alone: str, with_a_width: str
) -> None:
    assert role_of(name, [name, "vocab_size"]) == alone
    assert role_of(name, [name, "d_model"]) == with_a_width


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (["token_size", "d_model", "heads"], ["vocab_size", "n_embd", "n_head"]),
        (["d_qk", "d_v", "feedforward_h_dim"], ["d_head", "d_head", "d_inner"]),
        (["key_dim", "val_dim", "emb_dim"], ["d_head", "d_head", "n_embd"]),
        (["transformer_dropout_rate", "max_rate"], ["resid_pdrop", None]),
        (["input_dim", "hidden_dim", "pf_dim"], ["vocab_size", "n_embd", "d_inner"]),
        (["vocab_size", "input_dim", "hidden_dim"], ["vocab_size", "n_embd", "d_inner"]),
        (["layers_num", "block_count", "N_stack"], ["n_layer", "n_layer", "n_layer"]),
        (["decoder_layers_num", "decoder_depth"], ["n_layer", "n_layer"]),
        (["use_causal_attention_mask", "causal_mask"], ["causal", "causal"]),
        (["pre_normalization", "post_layer_norm"], ["pre_norm", "off"]),
        (["decoder_normalize_before"], ["pre_norm"]),
        (["sentence_length", "alphabet_size"], ["n_positions", "vocab_size"]),
        (["window", "dim"], ["n_positions", "n_embd"]),
        (["len_vocab", "len_sequence", "len_embedding"], ["vocab_size", "n_positions", "n_embd"]),
        (["position_capacity", "use_positions", "with_pos_emb"], ["n_positions", "on", "on"]),
        (["window_size", "max_len"], [None, "n_positions"]),
        (["norm_layer", "n_layer"], [None, "n_layer"]),
        (["n_tokens", "n_embd"], ["vocab_size", "n_embd"]),
        (["n_tokens", "vocab_size"], [None, "vocab_size"]),
        (["tie_embedding_weights"], ["tie_word_embeddings"]),
        (["num_unique_tokens", "filter_size", "dim"], ["vocab_size", "d_inner", "n_embd"]),
        (["hidden_size", "mid_size", "pyramid_size"], ["n_embd", "d_inner", None]),
        (["num_cabezas", "num_capas"], ["n_head", "n_layer"]),
        (["tamano_vocabulario", "longitud_maxima"], ["vocab_size", "n_positions"]),
        (["taille_du_vocabulaire", "nb_tetes"], ["vocab_size", "n_head"]),
        (["nombre_de_couches", "anzahl_schichten"], ["n_layer", "n_layer"]),
        (["tamanho_bloco", "dimension_embedding"], ["n_positions", "n_embd"]),
        (["G_N_EMBD", "DEFAULT_BLOCK_SIZE", "g_x"], ["n_embd", "n_positions", None]),
        (["n_block", "n_embd"], ["n_layer", "n_embd"]),
        (["n_block", "n_layer"], ["n_positions", "n_layer"]),
        (["V", "S", "E", "N", "L"], ["vocab_size", "n_positions", "n_embd", "n_head", "n_layer"]),
        (["N", "H"], ["n_layer", "n_head"]),
        (["N", "H", "L"], ["n_positions", "n_head", "n_layer"]),
        (["encoder_ffn_embed_dim", "encoder_embed_dim"], ["d_inner", "n_embd"]),
        (
            ["dim_ff", "dff", "cutoff", "loss_coeff", "diff"],
            ["d_inner", "d_inner", None, None, None],
        ),
        (["dim_qk_head", "dim_v_head", "dim_model"], ["d_head", "d_head", "n_embd"]),
        (["dim_expert", "expert_dim", "network_depth"], ["d_inner", "d_inner", "n_layer"]),
        (["no_bias", "disable_rope", "without_residual"], ["off", "on", "off"]),
        (["n_kv_groups", "n_kv_heads", "n_heads"], ["one", "n_head", "n_head"]),
        (["n_kv_groups", "n_heads"], ["n_head", "n_head"]),
        (["no_of_heads", "norm_first", "noise"], ["n_head", "pre_norm", None]),
        (["logit_soft_cap", "softcap", "capacity"], ["cap", "cap", None]),
        (["logits", "with_lm_head", "no_logits", "lm_head"], ["on", "on", "off", None]),
        (["decoder_only", "is_decoder", "decoder"], ["on", "on", None]),
        (["mask_attention", "use_masked_attn", "mask"], ["causal", "causal", None]),
        (["INTERNAL_DIMENSION", "moe_inter_dim", "interval"], ["d_inner", "d_inner", None]),
        (["TEXT_CHUNK_SIZE", "max_sequence", "bptt"], ["n_positions"] * 3),
        (["positional_embeddings_len", "d_qkv"], ["n_positions", "d_head"]),
        (["vocab_size_in", "vocab_size_out"], ["vocab_size", "vocab_size"]),
        (["nb_trans", "word_embed_proj_dim"], ["n_layer", "n_embd"]),
        (["num_query_heads_per_key", "proj_forward"], ["one", "d_inner"]),
        (["use_ff", "apply_final_norm", "use_blocks", "num_blocks"], ["on", "on", None, "n_layer"]),
        (["embeding_dim", "num_header", "max_relative_dist"], ["n_embd", "n_head", "n_positions"]),
        (["seg_len", "mem_len"], ["n_positions", None]),
        (
            ["max_token_value", "max_token_index", "max_tokens"],
            ["vocab_size"] * 2 + ["n_positions"],
        ),
        (["attention_dim", "dim_attn", "attention"], ["n_embd", "n_embd", None]),
        (["attention_inner_dim", "inner_dim"], ["n_embd", "d_inner"]),
        (["mlp_hidden_layers", "num_ffn_layers", "hidden_layers"], ["one", "one", "n_layer"]),
    ],
)
def test_names_have_the_expected_roles(names: list[str], roles: list[str | None]) -> None:
    assert [role_of(name, names) for name in names] == roles


@pytest.mark.parametrize(
    "name",
    ["num_experts", "n_experts", "active_experts", "num_experts_per_tok", "top_k", "moe_top_k"],
)
def test_a_mixture_of_experts_has_one_expert(name: str) -> None:
    assert neutral(name) == (True, 1)


def test_a_number_may_have_the_name_of_a_module() -> None:
    assert role_of("tok_emb") is None
    assert role_of("ffw_size") == "d_inner"
    assert role_of_number("tok_emb", ["tok_emb", "vocab_size"]) == "n_embd"
    assert role_of_number("tok_emb", ["tok_emb", "d_model"]) is None
    assert role_of_number("head", ["head", "d_model"]) == "n_head"
    assert role_of_number("head", ["head", "n_head"]) is role_of("head") is None


def test_residual_connections_that_can_be_disabled_stay_enabled(tmp_path: Path) -> None:
    source = """
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, with_residuals, max_cache_batch):
        super().__init__()
        self.found = with_residuals, max_cache_batch > 1
"""
    assert isinstance(model := build(tmp_path, source), nn.Module)
    assert model.found == (True, True)


def test_a_missing_library_in_a_notebook_is_replaced(tmp_path: Path) -> None:
    cells = ["import no_such_library\n", sized(ARGUMENTS)]
    cells[1] += "        self.trainer = no_such_library\n"
    code = [{"cell_type": "code", "source": cell} for cell in cells]
    path = tmp_path / "own.ipynb"
    path.write_text(json.dumps({"cells": code, "nbformat": 4}))
    assert len(construct(load_target(f"{path}:GPT"), CONFIG).h) == 3  # type: ignore[arg-type]


def test_a_notebook_that_was_saved_as_a_script_is_loaded(tmp_path: Path) -> None:
    script = "!pip install no_such_library\n%matplotlib inline\n"
    script += "vocab_size, n_embd, n_layer = 5, 6, 7\n"
    target = loaded(tmp_path, script + sized(), None)
    assert len(construct(target, CONFIG).h) == 3  # type: ignore[arg-type]
    assert inspect.getsource(target).startswith("class GPT")
    with pytest.raises(AdaptError, match="SyntaxError"):
        loaded(tmp_path, script + "def broken(:\n", None)


def test_devices_in_globals_are_replaced_by_the_cpu(tmp_path: Path) -> None:
    source = """
import torch
from torch import nn

device, DEVICE = "cuda:1", torch.device("mps")

class Config:
    device = "cuda"

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.found = device, DEVICE, Config.device
"""
    target = loaded(tmp_path, source)
    assert vars(construct(target, CONFIG))["found"] == ("cpu", torch.device("cpu"), "cpu")
    assert vars(sys.modules[target.__module__])["device"] == "cuda:1"


def test_modules_of_a_package_may_import_each_other(tmp_path: Path) -> None:
    """As in the author's scripts, the package's __init__ imports the model first."""
    package = tmp_path / "nets"
    (tmp_path / "parts").mkdir()
    package.mkdir()
    (package / "__init__.py").write_text("from .model import GPT\nfrom .sizes import n_embd\n")
    (package / "sizes.py").write_text("n_embd = 5\n")
    (tmp_path / "parts" / "embedding.py").write_text(
        "from torch import nn\nfrom nets.sizes import n_embd\nEmbedding = nn.Embedding\n"
    )
    own = sized(ARGUMENTS).replace("nn.Embedding", "Embedding")
    (package / "model.py").write_text(f"from parts.embedding import Embedding\n{own}")
    model = construct(load_target(f"{package / 'model.py'}:GPT"), CONFIG)
    assert model.wte.weight.shape == (97, 24)


def test_a_subpackage_with_the_name_of_a_library_does_not_hide_the_library(tmp_path: Path) -> None:
    """`import sqlite3` refers to the library, as it does where the package is imported."""
    package = tmp_path / "nets"
    (package / "sqlite3").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sqlite3" / "__init__.py").write_text("from nets.settings import Missing\n")
    (package / "settings.py").write_text("import sqlite3\nconnect = sqlite3.connect\n")
    (package / "model.py").write_text(f"from nets.settings import connect\n{sized(ARGUMENTS)}")
    sys.modules.pop("sqlite3", None)
    model = construct(load_target(f"{package / 'model.py'}:GPT"), CONFIG)
    assert model.wte.weight.shape == (97, 24)


def test_values_may_be_read_from_keyword_arguments(tmp_path: Path) -> None:
    read = """
vocab_size, n_embd = config["vocab_size"], config["n_embd"]
n_layer = config.get("n_layer", 2)
self.rates = config["dropout"], config.get("lr", 0.5)"""
    model = build(tmp_path, sized(", **config", read))
    assert (model.wte.weight.shape, len(model.h)) == ((97, 24), 3)
    assert model.rates == (CONFIG.resid_pdrop, 0.5)


def test_an_argument_of_an_abstract_class_is_not_a_config(tmp_path: Path) -> None:
    interface = """
from typing import Protocol
import abc

class Tokenizer(Protocol):
    @abc.abstractmethod
    def encode(self, text: str) -> list[int]: ...
"""
    source = sized(f"{ARGUMENTS}, tokenizer: Tokenizer")
    model = build(tmp_path, interface + source + "        self.tokenizer = tokenizer\n")
    assert model.tokenizer is None and model.wte.weight.shape == (97, 24)


def test_switches_without_defaults_that_would_remove_a_part(tmp_path: Path) -> None:
    source = """
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_layer, remove_norm_rms, remove_rope, no_bias):
        super().__init__()
        self.rope, norm = not remove_rope, nn.Identity if remove_norm_rms else nn.RMSNorm
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList(nn.Linear(n_embd, n_embd, bias=not no_bias) for _ in range(n_layer))
        self.norm = norm(n_embd)

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.h:
            x = layer(x)
        return self.norm(x) @ self.wte.weight.T
"""
    model = build(tmp_path, source.replace("remove_norm_rms", "remove_rmsnorm"))
    assert model.rope is True and isinstance(model.norm, nn.RMSNorm)
    assert model.h[0].bias is not None


CONFIGURED = """
from dataclasses import dataclass
from pathlib import Path
from torch import nn

@dataclass
class Config:
    data_dir: Path
    vocab_size: int = 5
    n_embd: int = 4
    n_layer: int = 1
    n_heads: int = 4
    n_kv_heads: int = 2
    qkv_bias: bool = False
    ffn_dim_multiplier: float | None = None
    moe_layers: list[int] | None = None

class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config, self.file = config, config.data_dir / "text"
        self.kv = config.n_kv_heads, config.ffn_dim_multiplier, config.moe_layers
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        width = config.n_embd
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(config.n_layer))
"""


def test_a_path_a_factor_and_a_list_of_a_config(tmp_path: Path) -> None:
    """Data are not read. A default of None is kept where the code computes the value."""
    model = build(tmp_path, CONFIGURED)
    assert model.file == Path("data_dir/text") and model.kv == (4, None, None)


def test_what_is_replaced_in_a_config_class_is_reported(tmp_path: Path) -> None:
    _, call = described(tmp_path, CONFIGURED)
    assert call.endswith("; your Config has n_kv_heads=2 and qkv_bias=False")
    _, call = described(tmp_path, CONFIGURED.replace("n_kv_heads: int = 2", "n_kv_heads: int = 4"))
    assert call.endswith("; your Config has qkv_bias=False")


@pytest.mark.parametrize("named", ["", '        assert kind in ("full_attention", "local")\n'])
def test_the_kinds_of_the_layers_in_a_dictionary(tmp_path: Path, named: str) -> None:
    source = f"""
from torch import nn

class Layer(nn.Linear):
    def __init__(self, width, kind):
        super().__init__(width, width)
{named}        self.local = kind == "sliding_attention"

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        assert len(cfg["layer_types"]) == cfg["n_layers"]
        self.wte = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.scale, self.base = cfg["query_pre_attn_scalar"] ** -0.5, cfg["rope_local_base"]
        self.h = nn.ModuleList(Layer(cfg["emb_dim"], kind) for kind in cfg["layer_types"])

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.h:
            x = layer(x)
        return x @ self.wte.weight.T
"""
    model = build(tmp_path, source)
    assert len(model.h) == 3 and not any(layer.local for layer in model.h)
    assert model.scale == 6**-0.5 and model.base == 10000.0


@pytest.mark.parametrize("default", [4, 512])
def test_a_width_that_the_code_uses_as_a_factor(tmp_path: Path, default: int) -> None:
    """A large number is a width, although it is multiplied, as where parameters are counted."""
    source = f"""
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size=5, embed_dim=8, hidden_dim={default}, n_layer=1):
        super().__init__()
        self.count = 2 * embed_dim*hidden_dim
        self.wte = nn.Embedding(vocab_size, embed_dim)
        self.h = nn.ModuleList(nn.Linear(embed_dim, embed_dim) for _ in range(n_layer))
"""
    assert build(tmp_path, source).count == 2 * 24 * (4 if default == 4 else 96)


def test_a_config_after_a_line_that_fails_is_compared_too(tmp_path: Path) -> None:
    source = """
from torch import nn

assert open("no such file")
CONFIG = {"vocab_size": 5, "n_embd": 8, "n_layer": 1, "qkv_bias": False}

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.bias, width = cfg["qkv_bias"], cfg["n_embd"]
        self.wte = nn.Embedding(cfg["vocab_size"], width)
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(cfg["n_layer"]))
"""
    model, call = described(tmp_path, source)
    assert model.bias is True and call.endswith("; your CONFIG has qkv_bias=False")


@pytest.mark.parametrize(
    "config",
    [
        'CONFIG = {"vocab_size": 5, "n_embd": 8, "n_layer": 1, "qkv_bias": False}\n',
        'import torch\nCONFIG = {"vocab_size": 5, "n_embd": 8, "n_layer": 1, "qkv_bias": False,'
        ' "type": torch.half}\n',
        "class Config:\n    vocab_size: int = 5\n    n_embd = 8\n    n_layer = 1\n"
        "    qkv_bias: bool = False\n",
    ],
    ids=["dictionary", "dictionary with other values", "class"],
)
def test_a_python_file_of_settings_is_compared_without_running_it(
    tmp_path: Path, config: str
) -> None:
    source = """
from torch import nn

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.bias, width = cfg.qkv_bias, cfg.n_embd
        self.wte = nn.Embedding(cfg.vocab_size, width)
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(cfg.n_layer))
"""
    (tmp_path / "my_config.py").write_text(f"raise SystemExit\n{config}")
    model, call = described(tmp_path, source)
    assert model.bias is True and call.endswith("; your my_config.py has qkv_bias=False")


def test_a_vocabulary_that_a_config_asks_its_task_for_is_replaced(tmp_path: Path) -> None:
    config = """
class Task:
    def size(self):
        return 5

class Config:
    N_EMBD, N_LAYER = 4, 1

    def __init__(self, task: Task):
        self.VOCAB_SIZE = task.size()
"""
    read = "vocab_size, n_embd, n_layer = config.VOCAB_SIZE, config.N_EMBD, config.N_LAYER"
    source = sized(", config: Config", read)
    assert build(tmp_path, config + source).wte.weight.shape == (97, 24)


@pytest.mark.parametrize(
    ("made", "width"),
    [
        ("nn.LayerNorm(config.n_hidden)", 24),
        ("nn.Linear(config.n_hidden, 4 * config.n_hidden)", 24),
        ("nn.Linear(config.n_embed, config.n_hidden)", 96),
    ],
)
def test_a_hidden_width_that_the_code_normalizes_or_widens_is_that_of_the_stream(
    tmp_path: Path, made: str, width: int
) -> None:
    read = f"""
vocab_size, n_embd, n_layer = config.n_vocab, config.n_embed, config.n_layer
self.part, self.width = {made}, config.n_hidden"""
    assert build(tmp_path, sized(", config", read)).width == width


def test_of_several_values_that_are_assigned_together_one_may_be_unknown(tmp_path: Path) -> None:
    script = """
import json
DM, n_layer = 32, 6
text = json.load(open("no such file"))
V, other, half = len(set(text)), 5, DM // 2
"""
    source = (
        sized(before="vocab_size, n_embd = V, DM") + "        self.half, self.kept = half, other\n"
    )
    model = build(tmp_path, script + source)
    assert (model.wte.weight.shape, len(model.h)) == ((97, 24), 3)
    assert (model.half, model.kept) == (12, 5)
