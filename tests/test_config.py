"""GPT2Config: what it accepts under which names, what it refuses, and what it derives."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from compat import GPT2Config
from compat.config import ALIASES, as_config
from compat.errors import ConfigError

OURS_ONLY = {"qkv_bias", "layer_norm_bias"}

# config.json of the hub's `gpt2`, as it stands there.
HUB_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}

# The notebooks' dictionary.
NOTEBOOK: dict[str, Any] = {
    "vocab_size": 500,
    "context_length": 64,
    "emb_dim": 48,
    "n_heads": 6,
    "n_layers": 5,
    "drop_rate": 0.2,
    "qkv_bias": False,
}


def test_defaults_are_those_of_transformers() -> None:
    reference = transformers.GPT2Config()
    for field in fields(GPT2Config):
        if field.name not in OURS_ONLY:
            assert getattr(GPT2Config(), field.name) == getattr(reference, field.name), field.name


def test_our_own_fields_default_to_what_a_checkpoint_has() -> None:
    assert GPT2Config().qkv_bias is True
    assert GPT2Config().layer_norm_bias is True


def test_hugging_face_fields_are_read() -> None:
    raw = {
        "vocab_size": 11,
        "n_positions": 12,
        "n_embd": 20,
        "n_layer": 3,
        "n_head": 5,
        "n_inner": 33,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-6,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.2,
        "resid_pdrop": 0.3,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    config = GPT2Config.from_dict(raw)
    assert {name: getattr(config, name) for name in raw} == raw
    assert {field.name for field in fields(config)} == raw.keys() | OURS_ONLY


def test_hub_gpt2s_config_is_the_default() -> None:
    assert GPT2Config.from_dict(HUB_GPT2) == GPT2Config()


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"_num_labels": 1, "id2label": {"0": "LABEL_0"}}, id="distilgpt2"),
        pytest.param({"output_past": True}, id="gpt2-xl"),
        pytest.param({"torch_dtype": "float16", "transformers_version": "4.20"}, id="half"),
        pytest.param({"add_cross_attention": False, "pruned_heads": {}}, id="switched off"),
        pytest.param({"gradient_checkpointing": True, "use_cache": False}, id="for training"),
    ],
)
def test_fields_of_other_real_files_change_nothing(extra: dict[str, Any]) -> None:
    assert GPT2Config.from_dict({**HUB_GPT2, **extra}) == GPT2Config()


@pytest.mark.parametrize("change", [{}, {"n_embd": 24, "n_head": 3, "tie_word_embeddings": False}])
def test_a_config_as_transformers_writes_it_is_read(change: dict[str, Any]) -> None:
    written = transformers.GPT2Config(**change).to_dict()
    assert GPT2Config.from_dict(written) == GPT2Config(**change)


@pytest.mark.parametrize("name", ["machining", "tarot"])
def test_the_config_of_a_checkpoint_made_by_others_is_read(shared: Path, name: str) -> None:
    raw = json.loads((shared / "data" / "checkpoints" / name / "config.json").read_text())
    config = GPT2Config.from_dict(raw)
    for field in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "eos_token_id"):
        assert getattr(config, field) == raw[field]


@pytest.mark.parametrize(("alias", "name"), transformers.GPT2Config.attribute_map.items())
def test_aliases_of_transformers_are_read(alias: str, name: str) -> None:
    assert getattr(GPT2Config.from_dict({alias: 24}), name) == 24


def test_the_notebook_dictionary_is_read() -> None:
    assert GPT2Config.from_dict(NOTEBOOK) == GPT2Config(
        vocab_size=500,
        n_positions=64,
        n_embd=48,
        n_head=6,
        n_layer=5,
        embd_pdrop=0.2,
        attn_pdrop=0.2,
        resid_pdrop=0.2,
        qkv_bias=False,
    )


@pytest.mark.parametrize(
    ("used", "other"), [("n_heads", "num_heads"), ("n_layers", "number_of_layers")]
)
def test_other_spellings_of_the_notebook_are_read(used: str, other: str) -> None:
    raw = {**NOTEBOOK, other: NOTEBOOK[used]}
    del raw[used]
    assert GPT2Config.from_dict(raw) == GPT2Config.from_dict(NOTEBOOK)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_two_names_that_disagree_are_refused(alias: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' twice: 24, and 48 as '{alias}'"):
        GPT2Config.from_dict({name: 24, alias: 48})


def test_two_aliases_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="'n_embd' twice: 24, and 48 as 'hidden_size'"):
        GPT2Config.from_dict({"emb_dim": 24, "hidden_size": 48})


def test_drop_rate_that_disagrees_with_one_of_its_three_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'attn_pdrop' twice: 0\.3, and 0\.2 as 'drop_rate'"):
        GPT2Config.from_dict({"attn_pdrop": 0.3, "drop_rate": 0.2})


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_two_names_that_agree_are_fine(alias: str, name: str) -> None:
    assert getattr(GPT2Config.from_dict({name: 24, alias: 24}), name) == 24


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_cross_attention", True),
        ("rotary_pct", 0.25),
        ("n_embed", 64),
        ("quantization_config", {"bits": 4}),
        ("pruned_heads", {"0": [1]}),
    ],
)
def test_an_unknown_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{field}' = ") as caught:
        GPT2Config.from_dict({**HUB_GPT2, field: value})
    assert repr(value) in str(caught.value)


def test_all_unknown_fields_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'alpha' = 1, 'beta' = 'x'"):
        GPT2Config.from_dict({"beta": "x", "alpha": 1})


@pytest.mark.parametrize("off", [False, None, 0, "", {}, []])
def test_an_unknown_field_that_is_switched_off_is_accepted(off: object) -> None:
    assert GPT2Config.from_dict({"some_new_feature": off}) == GPT2Config()


@pytest.mark.parametrize("model_type", ["llama", "gpt-nano", "GPT2", None])
def test_another_model_type_is_refused(model_type: object) -> None:
    with pytest.raises(ConfigError, match=f"model_type {model_type!r}; expected 'gpt2'"):
        GPT2Config.from_dict({**HUB_GPT2, "model_type": model_type})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_layer", "2"),
        ("n_layer", True),
        ("n_layer", 12.0),
        ("n_layer", None),
        ("n_head", (12,)),
        ("vocab_size", 50257.5),
        ("n_inner", "3072"),
        ("n_inner", False),
        ("layer_norm_epsilon", "1e-5"),
        ("layer_norm_epsilon", None),
        ("attn_pdrop", True),
        ("activation_function", None),
        ("tie_word_embeddings", 1),
        ("scale_attn_weights", "true"),
        ("qkv_bias", None),
        ("eos_token_id", "50256"),
        ("eos_token_id", ("50256",)),
        ("bos_token_id", 1.0),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{field}'") as caught:
        GPT2Config.from_dict({field: value})
    assert repr(value) in str(caught.value)


def test_a_whole_number_is_a_float_too() -> None:
    assert GPT2Config.from_dict({"drop_rate": 0}).attn_pdrop == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, bad)
            for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")
            for bad in (0, -1)
        ],
        ("n_head", 7),
        ("n_embd", 770),
        ("embd_pdrop", -0.1),
        ("attn_pdrop", 1.5),
        ("resid_pdrop", float("nan")),
        ("layer_norm_epsilon", -1e-5),
        ("layer_norm_epsilon", float("inf")),
        ("layer_norm_epsilon", float("nan")),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"'{field}'") as caught:
        GPT2Config.from_dict({field: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(("n_inner", "d_inner"), [(None, 96), (50, 50)])
def test_d_inner_is_n_inner_or_four_times_the_width(n_inner: int | None, d_inner: int) -> None:
    assert GPT2Config(n_embd=24, n_head=2, n_inner=n_inner).d_inner == d_inner


def test_d_head_is_one_heads_share_of_the_width() -> None:
    assert GPT2Config().d_head == 64


@pytest.mark.parametrize(
    ("scaled", "by_layer", "expected"),
    [
        (True, False, [0.125, 0.125, 0.125]),
        (False, False, [1.0, 1.0, 1.0]),
        (True, True, [0.125, 0.0625, 0.125 / 3]),
        (False, True, [1.0, 0.5, 1 / 3]),
    ],
)
def test_attention_scale(scaled: bool, by_layer: bool, expected: list[float]) -> None:
    config = GPT2Config(scale_attn_weights=scaled, scale_attn_by_inverse_layer_idx=by_layer)
    assert [config.attention_scale(i) for i in range(3)] == expected


@pytest.mark.parametrize(
    ("eos", "expected"), [(7, (7,)), (None, ()), ([7, 9], (7, 9)), (0, (0,)), ([], ())]
)
def test_stop_ids(eos: int | list[int] | None, expected: tuple[int, ...]) -> None:
    assert GPT2Config.from_dict({"eos_token_id": eos}).stop_ids == expected


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(),
        GPT2Config(n_embd=24, n_head=4, n_inner=50, n_layer=2, n_positions=9, vocab_size=11),
        GPT2Config(activation_function="relu", layer_norm_epsilon=1e-6, scale_attn_weights=False),
        GPT2Config(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
        GPT2Config(eos_token_id=(1, 2), bos_token_id=None, pad_token_id=4),
        GPT2Config(tie_word_embeddings=False, attn_pdrop=0.0, embd_pdrop=0.2, resid_pdrop=0.3),
    ],
)
def test_a_config_survives_config_json(config: GPT2Config) -> None:
    assert GPT2Config.from_dict(json.loads(json.dumps(config.to_hf_dict()))) == config


def test_the_written_config_is_one_that_transformers_reads() -> None:
    config = GPT2Config(n_embd=24, n_head=4, n_inner=50, eos_token_id=(1, 2), n_positions=9)
    written = config.to_hf_dict()
    reference = transformers.GPT2Config.from_dict(json.loads(json.dumps(written)))
    assert (reference.n_embd, reference.n_head, reference.n_inner) == (24, 4, 50)
    assert reference.eos_token_id == [1, 2]
    assert not OURS_ONLY & written.keys()
    assert written["model_type"] == reference.model_type == "gpt2"
    assert written["n_ctx"] == 9


def test_blocks_take_a_config_or_a_dictionary() -> None:
    config = GPT2Config.from_dict(NOTEBOOK)
    assert as_config(config) is config
    assert as_config(NOTEBOOK) == config


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="n_layer"):
        GPT2Config().n_layer = 3  # type: ignore[misc]
