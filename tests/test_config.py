"""GPT2Config: the names that it accepts, derived values, and what it writes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from compat import GPT2Config
from compat.config import as_config
from tests.config_dicts import HUB_GPT2, NOTEBOOK

OURS_ONLY = {"qkv_bias", "layer_norm_bias"}


def test_defaults_are_those_of_transformers() -> None:
    reference = transformers.GPT2Config()
    for field in fields(GPT2Config):
        if field.name not in OURS_ONLY:
            assert getattr(GPT2Config(), field.name) == getattr(reference, field.name), field.name


def test_our_own_fields_default_to_the_values_of_a_checkpoint() -> None:
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


def test_the_config_of_the_hubs_gpt2_is_the_default() -> None:
    assert GPT2Config.from_dict(HUB_GPT2) == GPT2Config()


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"_num_labels": 1, "id2label": {"0": "LABEL_0"}}, id="distilgpt2"),
        pytest.param({"output_past": True}, id="gpt2-xl"),
        pytest.param({"torch_dtype": "float16", "transformers_version": "4.20"}, id="half"),
        pytest.param({"gradient_checkpointing": True, "use_cache": False}, id="for training"),
    ],
)
def test_fields_of_other_published_configs_are_ignored(extra: dict[str, Any]) -> None:
    assert GPT2Config.from_dict({**HUB_GPT2, **extra}) == GPT2Config()


@pytest.mark.parametrize("change", [{}, {"n_embd": 24, "n_head": 3, "tie_word_embeddings": False}])
def test_a_config_written_by_transformers_is_read(change: dict[str, Any]) -> None:
    written = transformers.GPT2Config(**change).to_dict()
    assert GPT2Config.from_dict(written) == GPT2Config(**change)


@pytest.mark.parametrize("name", ["machining", "tarot"])
def test_the_config_of_a_checkpoint_by_another_author_is_read(shared: Path, name: str) -> None:
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


@pytest.mark.parametrize(
    ("alias", "name"), [("hidden_size", "n_embd"), ("context_length", "n_positions")]
)
def test_two_names_with_equal_values_are_accepted(alias: str, name: str) -> None:
    assert getattr(GPT2Config.from_dict({name: 24, alias: 24}), name) == 24


@pytest.mark.parametrize("off", [False, None, 0, "", {}, []])
def test_an_unknown_field_that_is_switched_off_is_accepted(off: object) -> None:
    assert GPT2Config.from_dict({"some_new_feature": off}) == GPT2Config()


def test_an_integer_is_accepted_as_a_float() -> None:
    assert GPT2Config.from_dict({"drop_rate": 0}).attn_pdrop == 0


@pytest.mark.parametrize(("n_inner", "d_inner"), [(None, 96), (50, 50)])
def test_d_inner_is_n_inner_or_four_times_the_width(n_inner: int | None, d_inner: int) -> None:
    assert GPT2Config(n_embd=24, n_head=2, n_inner=n_inner).d_inner == d_inner


def test_d_head_is_the_width_of_one_head() -> None:
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
def test_the_attention_scale_depends_on_both_settings(
    scaled: bool, by_layer: bool, expected: list[float]
) -> None:
    config = GPT2Config(scale_attn_weights=scaled, scale_attn_by_inverse_layer_idx=by_layer)
    assert [config.attention_scale(i) for i in range(3)] == expected


@pytest.mark.parametrize(
    ("eos", "expected"), [(7, (7,)), (None, ()), ([7, 9], (7, 9)), (0, (0,)), ([], ())]
)
def test_stop_ids_are_read_from_eos_token_id(
    eos: int | list[int] | None, expected: tuple[int, ...]
) -> None:
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
def test_a_config_is_restored_from_config_json(config: GPT2Config) -> None:
    assert GPT2Config.from_dict(json.loads(json.dumps(config.to_hf_dict()))) == config


def test_transformers_reads_the_written_config() -> None:
    config = GPT2Config(n_embd=24, n_head=4, n_inner=50, eos_token_id=(1, 2), n_positions=9)
    written = config.to_hf_dict()
    reference = transformers.GPT2Config.from_dict(json.loads(json.dumps(written)))
    assert (reference.n_embd, reference.n_head, reference.n_inner) == (24, 4, 50)
    assert reference.eos_token_id == [1, 2]
    assert not OURS_ONLY & written.keys()
    assert written["model_type"] == reference.model_type == "gpt2"
    assert written["n_ctx"] == 9


def test_blocks_accept_a_config_or_a_dictionary() -> None:
    config = GPT2Config.from_dict(NOTEBOOK)
    assert as_config(config) is config
    assert as_config(NOTEBOOK) == config


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="n_layer"):
        GPT2Config().n_layer = 3  # type: ignore[misc]
