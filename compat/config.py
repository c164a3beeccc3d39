"""The configuration of a GPT-2, from Hugging Face's `config.json` or a notebook's dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from compat.errors import ConfigError, listed, short_repr

# Other names of GPT2Config's fields, in `transformers`' attribute map and in notebooks.
ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "emb_dim": "n_embd",
    "n_layers": "n_layer",
    "number_of_layers": "n_layer",
    "n_heads": "n_head",
    "num_heads": "n_head",
    "context_length": "n_positions",
}

# Fields of config.json that do not affect the forward pass in eval mode.
IGNORED = frozenset(
    """
    _attn_implementation_autoset _commit_hash _name_or_path _num_labels architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    classifier_dropout cross_attention_hidden_size dataset decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping embed_dropout encoder_no_repeat_ngram_size
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout id2label initializer_range is_decoder label2id length_penalty license
    max_length min_length model_max_length model_type n_ctx no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions output_hidden_states output_past
    output_scores predict_special_tokens prefix problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    task_specific_params temperature tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache
    """.split()
)

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "int | tuple[int, ...] | None": (int, tuple, type(None)),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
HALF = (torch.float16, torch.bfloat16)  # in the order of golden files

# The largest size and the largest id.
_MAX = 2**31 - 1

# Fields that affect neither shapes nor arithmetic, and that frameworks assign on a config.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DROPOUT_RATES = ("embd_pdrop", "attn_pdrop", "resid_pdrop")


@dataclass(kw_only=True, unsafe_hash=True)  # safe, since the hashed fields are read-only
class GPT2Config:
    """The shapes and the arithmetic of a GPT-2, under Hugging Face's field names.

    The defaults are those of `transformers.GPT2Config`, the 124M model. Two fields are not Hugging
    Face's: `qkv_bias=False` and `layer_norm_bias=False` leave these biases out.

    Fields are read-only, because a changed config would contradict models that were built from it;
    `dataclasses.replace(config, n_layer=2)` makes another config. Only `bos_token_id`,
    `eos_token_id` and `pad_token_id`, which do not affect shapes or arithmetic, may be set, to ids
    of the vocabulary or None. Frameworks may set other attributes, such as `use_cache`. These are
    copied and pickled. Comparison, hashing, `asdict`, `replace` and `to_hf_dict` ignore them.

    Raises:
        ConfigError: A field has the wrong type, is out of range, or is assigned another value.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = field(default=50256, hash=False)
    eos_token_id: int | tuple[int, ...] | None = field(default=50256, hash=False)
    pad_token_id: int | None = field(default=None, hash=False)
    qkv_bias: bool = True
    layer_norm_bias: bool = True

    def __post_init__(self) -> None:
        def expect(holds: bool, name: str, expected: str, value: Any = None) -> None:
            if not holds:
                found = short_repr(getattr(self, name) if value is None else value)
                raise ConfigError(f"config field {name!r} is {found}, but must be {expected}.")

        for own in fields(self):
            value, accepted = getattr(self, own.name), _TYPES[str(own.type)]
            # In Python True is an int; in a config that is a mistake.
            proper = isinstance(value, accepted) and (
                bool in accepted or not isinstance(value, bool)
            )
            expect(proper, own.name, f"of type {own.type}")
        whole = all(type(token_id) is int for token_id in self.stop_ids)
        expect(whole, "eos_token_id", "whole numbers")
        for name in TOKEN_IDS:
            within = all(abs(token_id) <= _MAX for token_id in self.ids_of(name))
            expect(within, name, f"≤ {_MAX:,}")
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            expect(1 <= getattr(self, name) <= _MAX, name, f"from 1 to {_MAX:,}")
        expect(1 <= self.d_inner <= _MAX, "n_inner", f"from 1 to {_MAX:,}", self.d_inner)
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"config field 'n_head' is {self.n_head}, which does not divide "
                f"'n_embd' = {self.n_embd}. Every head needs the same whole number of channels."
            )
        for name in DROPOUT_RATES:
            expect(0 <= getattr(self, name) <= 1, name, "from 0 to 1")
        # An int can be too large to be a float.
        expect(0 <= self.layer_norm_epsilon < 1e30, "layer_norm_epsilon", "≥ 0")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and self._is_ours(name):
            current = getattr(self, name)
            if type(value) is not type(current) or value != current:
                if name not in TOKEN_IDS:
                    raise _read_only(name)
                value = self._checked_ids(name, value)
        elif self._is_ours(name) and name not in self.__dataclass_fields__:
            raise _read_only(name)
        super().__setattr__(name, value)

    def _checked_ids(self, name: str, value: Any) -> int | tuple[int, ...] | None:
        """Return the checked value of a special token's ids, which a framework sets."""
        several = name == "eos_token_id" and isinstance(value, (list, tuple)) and len(value) > 0
        ids = tuple(value) if several else () if value is None else (value,)
        if not all(type(i) is int and 0 <= i < self.vocab_size for i in ids):
            kinds = "an id, a list of ids" if name == "eos_token_id" else "an id"
            raise ConfigError(
                f"config field {name!r} cannot be set to {short_repr(value)}, but only to {kinds} "
                f"or None. The vocabulary has ids 0 to {self.vocab_size - 1}."
            )
        return ids if several else value

    def __delattr__(self, name: str) -> None:
        if name in TOKEN_IDS:
            raise _ReadOnlyError(f"config field {name!r} cannot be removed. Set it to None.")
        if self._is_ours(name):
            raise _read_only(name)
        super().__delattr__(name)

    def _is_ours(self, name: str) -> bool:
        """Return whether an attribute is a field, an alias of one, or a property."""
        return hasattr(type(self), name) or name in ALIASES or name == "drop_rate"

    @property
    def d_inner(self) -> int:
        """Width of the feed-forward layer: `n_inner`, or 4 × `n_embd` if that is None."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def d_head(self) -> int:
        """Channels of one attention head."""
        return self.n_embd // self.n_head

    def attention_scale(self, layer_idx: int) -> float:
        """Return the factor on q·kᵀ: 1/√D or 1, divided by layer_idx + 1 if the config says so."""
        scale = self.d_head**-0.5 if self.scale_attn_weights else 1.0
        return scale / float(layer_idx + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end-of-text ids."""
        return self.ids_of("eos_token_id")

    def ids_of(self, name: str) -> tuple[int, ...]:
        """Return the ids in the field `bos_token_id`, `eos_token_id` or `pad_token_id`."""
        value = getattr(self, name)
        if value is None:
            return ()
        return value if isinstance(value, tuple) else (value,)

    def to_hf_dict(self) -> dict[str, Any]:
        """Return the fields of Hugging Face's `config.json`, with `n_ctx` for older programs."""
        own = {k: v for k, v in asdict(self).items() if k not in ("qkv_bias", "layer_norm_bias")}
        head = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_ctx": self.n_positions,
        }
        return {**head, **own}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GPT2Config:
        """Build a config from Hugging Face's fields or a notebook's (`emb_dim`, `drop_rate`, …).

        Missing fields have `transformers`' defaults. An unknown field may change the arithmetic,
        and is refused unless it is false, null or empty.

        Raises:
            ConfigError: The config is not that of a GPT-2, a field is unknown, or two names of one
                field disagree.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config is a {type(raw).__name__}, but must be a dictionary.")
        if raw.get("model_type", "gpt2") != "gpt2":
            raise ConfigError(
                f"config has model_type {short_repr(raw['model_type'])}, but must have 'gpt2'."
            )
        known: dict[str, Any] = {}
        for alias, value in raw.items():
            for name in DROPOUT_RATES if alias == "drop_rate" else (ALIASES.get(alias, alias),):
                if name in known and known[name] != value:
                    raise ConfigError(
                        f"config has {name!r} twice: {short_repr(known[name])}, and "
                        f"{short_repr(value)} as {alias!r}. Remove one of them."
                    )
                known[name] = tuple(value) if isinstance(value, list) else value
        names = {own.name for own in fields(cls)}
        unknown = sorted(k for k, v in known.items() if k not in names | IGNORED and v)
        if unknown:
            found = listed([f"{short_repr(name)} = {short_repr(known[name])}" for name in unknown])
            raise ConfigError(
                f"config has {found}, which compat does not understand and which may change the "
                "arithmetic. If it does not, remove it from the config."
            )
        return cls(**{name: value for name, value in known.items() if name in names})


class _ReadOnlyError(ConfigError, AttributeError):
    """A ConfigError that is also the AttributeError that Python expects of `__setattr__`."""


def _read_only(name: str) -> _ReadOnlyError:
    return _ReadOnlyError(
        f"config field {name!r} is read-only, since models may have been built from the config. "
        "Make another config with dataclasses.replace(config, …)."
    )


def as_config(config: GPT2Config | Mapping[str, Any]) -> GPT2Config:
    """Return a GPT2Config for a GPT2Config or a dictionary of its fields."""
    return config if isinstance(config, GPT2Config) else GPT2Config.from_dict(config)


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a data type without `torch.`, such as "float16"; a name stays the same."""
    return str(dtype).removeprefix("torch.")


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the torch.dtype for a torch.dtype or its name, such as "float16"; None stays None.

    Raises:
        ConfigError: The data type is not one of the four that weights can have.
    """
    if dtype is None:
        return None
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        names = ", ".join(list(DTYPES)[:-1]) + f" or {list(DTYPES)[-1]}"
        raise ConfigError(f"dtype is {short_repr(dtype)}, but must be {names}.")
    return found


def as_device(device: str | torch.device) -> torch.device:
    """Return the torch.device for a torch.device or its name, provided that it holds values.

    Raises:
        ConfigError: The device is unknown, missing, or without values, as "meta" is.
    """
    try:
        there = torch.zeros(1, device=device)
        there.cpu()  # which "meta" cannot do
    except Exception as error:  # each kind of device raises another exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"device is {short_repr(device)}, which cannot be used: {reason}"
        ) from error
    return there.device
