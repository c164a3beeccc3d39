"""GPT2Config refuses invalid fields and names them."""

from __future__ import annotations

import pytest

from compat import GPT2Config
from compat.config import ALIASES
from compat.errors import ConfigError
from tests.config_dicts import HUB_GPT2


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_two_names_with_different_values_are_refused(alias: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' twice: 24, and 48 as '{alias}'"):
        GPT2Config.from_dict({name: 24, alias: 48})


def test_two_aliases_with_different_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="'n_embd' twice: 24, and 48 as 'hidden_size'"):
        GPT2Config.from_dict({"emb_dim": 24, "hidden_size": 48})


def test_a_drop_rate_that_contradicts_one_of_its_three_fields_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'attn_pdrop' twice: 0\.3, and 0\.2 as 'drop_rate'"):
        GPT2Config.from_dict({"attn_pdrop": 0.3, "drop_rate": 0.2})


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
    with pytest.raises(ConfigError, match=r"'alpha' = 1 and 'beta' = 'x'"):
        GPT2Config.from_dict({"beta": "x", "alpha": 1})


@pytest.mark.parametrize("model_type", ["llama", "GPT2", None])
def test_another_model_type_is_refused(model_type: object) -> None:
    with pytest.raises(ConfigError, match=f"model_type {model_type!r}, but must have 'gpt2'"):
        GPT2Config.from_dict({**HUB_GPT2, "model_type": model_type})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_layer", "2"),
        ("n_layer", True),
        ("n_layer", 12.0),
        ("n_layer", None),
        ("n_head", (12,)),
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
        # Out of range
        *[
            (name, bad)
            for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")
            for bad in (0, -1)
        ],
        *[(name, 2**31) for name in ("vocab_size", "n_layer", "n_inner")],
        ("n_head", 7),
        ("n_embd", 770),
        ("embd_pdrop", -0.1),
        ("attn_pdrop", 1.5),
        ("resid_pdrop", float("nan")),
        ("layer_norm_epsilon", -1e-5),
        ("layer_norm_epsilon", float("inf")),
        ("layer_norm_epsilon", float("nan")),
        ("bos_token_id", 2**31),
        ("eos_token_id", (0, -(2**31))),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{field}'") as caught:
        GPT2Config.from_dict({field: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("digits", [400, 4000, 5000])
@pytest.mark.parametrize("field", ["layer_norm_epsilon", "attn_pdrop", "n_embd", "eos_token_id"])
def test_a_very_long_number_is_refused_with_a_short_message(field: str, digits: int) -> None:
    with pytest.raises(ConfigError, match=f"'{field}' is ") as caught:
        GPT2Config(**{field: 10**digits})
    assert len(str(caught.value)) < 500
