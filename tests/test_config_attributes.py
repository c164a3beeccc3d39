"""Frameworks may set attributes on a config, but may not change its fields."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from compat import ConfigError, GPT2Config, load_pretrained, save_pretrained

FOREIGN: dict[str, Any] = {
    "use_cache": False,
    "_name_or_path": "gpt2",
    "_attn_implementation": "eager",
    "gradient_checkpointing": True,
    "torch_dtype": "float16",
    "quantization_config": {"bits": 8},
}


def with_foreign(config: GPT2Config) -> GPT2Config:
    for name, value in FOREIGN.items():
        setattr(config, name, value)
    return config


def test_attributes_of_frameworks_are_kept(tiny: Path) -> None:
    config: Any = with_foreign(load_pretrained(tiny).config)
    assert {name: getattr(config, name) for name in FOREIGN} == FOREIGN
    config.use_cache = True
    assert config.use_cache is True
    del config.use_cache
    assert not hasattr(config, "use_cache")


def test_attributes_of_frameworks_do_not_affect_our_fields() -> None:
    plain, changed = GPT2Config(), with_foreign(GPT2Config())
    assert plain == changed and hash(plain) == hash(changed)
    assert asdict(plain) == asdict(changed) and repr(plain) == repr(changed)
    assert plain.to_hf_dict() == changed.to_hf_dict()
    assert replace(changed, n_layer=3) == GPT2Config(n_layer=3)


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize(
    "name", [field.name for field in fields(GPT2Config) if field.name not in TOKEN_IDS]
)
def test_our_own_fields_are_read_only(name: str) -> None:
    config = GPT2Config()
    before = getattr(config, name)
    for value in (3, "relu", 0.5, None, not before):
        if type(value) is not type(before) or value != before:
            with pytest.raises(ConfigError, match=rf"'{name}'.*dataclasses\.replace"):
                setattr(config, name, value)
    with pytest.raises(ConfigError, match=rf"'{name}'.*dataclasses\.replace"):
        delattr(config, name)
    assert config == GPT2Config()


@pytest.mark.parametrize("name", TOKEN_IDS)
def test_frameworks_may_set_the_ids_of_special_tokens(
    tiny: Path, tmp_path: Path, name: str
) -> None:
    """For example `model.config.pad_token_id = tokenizer.eos_token_id`."""
    model = load_pretrained(tiny)
    config, in_a_set = model.config, {model.config}
    for value in (5, 96, 0, None, 3):
        setattr(config, name, value)
        assert getattr(config, name) == value and config in in_a_set
    assert config == replace(load_pretrained(tiny).config, **{name: 3})
    assert config != load_pretrained(tiny).config
    save_pretrained(model, tmp_path / "saved")
    assert getattr(load_pretrained(tmp_path / "saved").config, name) == 3
    with pytest.raises(ConfigError, match=rf"'{name}'.*cannot be removed"):
        delattr(config, name)


@pytest.mark.parametrize("name", TOKEN_IDS)
@pytest.mark.parametrize("value", [97, -1, True, 3.0, "5", (), (1, 97), [2, "a"], {}, 1 << 80])
def test_an_id_outside_the_vocabulary_is_refused(name: str, value: Any) -> None:
    config = GPT2Config(vocab_size=97, bos_token_id=1, eos_token_id=2)
    before = copy.copy(config)
    with pytest.raises(ConfigError, match=rf"'{name}'.*but only to .*0 to 96"):
        setattr(config, name, value)
    assert config == before


def test_several_ids_may_end_a_text() -> None:
    config: Any = GPT2Config(vocab_size=97)
    for value in ([5, 7], (5, 7)):
        config.eos_token_id = value
        assert config.eos_token_id == config.stop_ids == (5, 7)
        with pytest.raises(ConfigError, match=r"'pad_token_id'"):
            config.pad_token_id = value
    config.eos_token_id = None
    assert config.stop_ids == ()


@pytest.mark.parametrize(
    "name", ["hidden_size", "emb_dim", "n_heads", "drop_rate", "d_head", "d_inner", "stop_ids"]
)
def test_aliases_of_our_fields_are_read_only(name: str) -> None:
    """If the alias were stored as an attribute, setting it would silently have no effect."""
    config = GPT2Config()
    with pytest.raises(ConfigError, match=rf"'{name}'.*dataclasses\.replace"):
        setattr(config, name, 3)
    assert config == GPT2Config()


def test_a_field_may_be_set_to_its_current_value() -> None:
    config = GPT2Config(pad_token_id=7, eos_token_id=(1, 2))
    config.pad_token_id = 7
    config.eos_token_id = (1, 2)
    config.tie_word_embeddings = True
    with pytest.raises(ConfigError):
        config.tie_word_embeddings = 1  # type: ignore[assignment]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))],
)
def test_copies_are_equal_and_read_only(copied: Any) -> None:
    config = with_foreign(GPT2Config(n_layer=3))
    duplicate = copied(config)
    assert duplicate == config and duplicate is not config and vars(duplicate) == vars(config)
    duplicate.use_cache = True
    assert config.use_cache is False  # type: ignore[attr-defined]
    with pytest.raises(ConfigError):
        duplicate.n_layer = 4
    assert duplicate.n_layer == 3
