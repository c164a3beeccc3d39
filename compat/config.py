"""The configuration of a GPT-2, from Hugging Face's `config.json` or a notebook's dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from compat.errors import ConfigError, listed, short_repr

# Other names of GPT2Config's fields: from `transformers`' attribute map, from notebooks.
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

# Fields of real config.json files that do not enter the forward pass in eval mode.
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

# Beyond this PyTorch has no tensor, and no position or id for one.
_MOST = 2**31 - 1

# Fields that enter neither shapes nor arithmetic, and that frameworks set on a model's config.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(kw_only=True, unsafe_hash=True)  # safe: no field that is hashed ever changes
class GPT2Config:
    """What fixes the shapes and the arithmetic of a GPT-2, under Hugging Face's names.

    The defaults are those of `transformers.GPT2Config`, the 124M model. `qkv_bias` and
    `layer_norm_bias` are ours: False leaves these biases out, as some hand-written blocks do.

    Fields cannot be changed, since models that were built from a config would contradict it;
    `dataclasses.replace(config, n_layer=2)` makes another config. Only `bos_token_id`,
    `eos_token_id` and `pad_token_id` may be set, to ids of the vocabulary or None: they enter
    neither shapes nor arithmetic. Frameworks may set any other attribute, such as `use_cache`.
    Such attributes are kept, copied and pickled, and do not take part in comparison, hashing,
    `asdict`, `replace` or `to_hf_dict`.

    Raises:
        ConfigError: a field has the wrong type or lies out of range, or is assigned another value.
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
        for own in fields(self):
            value, accepted = getattr(self, own.name), _TYPES[str(own.type)]
            # In Python True is an int; in a config it is a mistake.
            if not isinstance(value, accepted) or (
                isinstance(value, bool) and bool not in accepted
            ):
                raise ConfigError(
                    f"config field {own.name!r} is {short_repr(value)}; expected {own.type}"
                )
        if not all(type(token_id) is int for token_id in self.stop_ids):
            raise ConfigError(
                f"config field 'eos_token_id' is {short_repr(self.eos_token_id)}; expected whole "
                f"numbers"
            )
        for name in _TOKEN_IDS:
            value = getattr(self, name)
            if any(abs(token_id) > _MOST for token_id in _as_ids(value)):
                raise ConfigError(
                    f"config field {name!r} is {short_repr(value)}; expected ≤ {_MOST:,}"
                )
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "d_inner"):
            if not 1 <= getattr(self, name) <= _MOST:
                field_name = "n_inner" if name == "d_inner" else name
                found = short_repr(getattr(self, name))
                raise ConfigError(
                    f"config field {field_name!r} is {found}; expected 1 to {_MOST:,}"
                )
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"config field 'n_head' is {self.n_head}, which does not divide "
                f"'n_embd' = {self.n_embd}; every head needs the same whole number of channels"
            )
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"config field {name!r} is {short_repr(getattr(self, name))}; expected 0 to 1"
                )
        if not 0 <= self.layer_norm_epsilon < 1e30:  # an int can be too large to be a float
            raise ConfigError(
                f"config field 'layer_norm_epsilon' is {short_repr(self.layer_norm_epsilon)}; "
                "expected ≥ 0"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and self._is_ours(name):
            current = getattr(self, name)
            if type(value) is not type(current) or value != current:
                if name not in _TOKEN_IDS:
                    raise _read_only(name)
                value = self._checked_ids(name, value)
        elif self._is_ours(name) and name not in self.__dataclass_fields__:
            raise _read_only(name)
        super().__setattr__(name, value)

    def _checked_ids(self, name: str, value: Any) -> int | tuple[int, ...] | None:
        """What a framework sets the ids of a special token to."""
        several = name == "eos_token_id" and isinstance(value, (list, tuple)) and len(value) > 0
        ids = tuple(value) if several else () if value is None else (value,)
        if not all(type(i) is int and 0 <= i < self.vocab_size for i in ids):
            kinds = "an id, a list of ids" if name == "eos_token_id" else "an id"
            raise ConfigError(
                f"config field {name!r} cannot be set to {short_repr(value)}; expected {kinds} or "
                f"None; "
                f"the vocabulary has ids 0 to {self.vocab_size - 1}"
            )
        return ids if several else value

    def __delattr__(self, name: str) -> None:
        if name in _TOKEN_IDS:
            raise _ReadOnlyError(f"config field {name!r} cannot be removed; set it to None")
        if self._is_ours(name):
            raise _read_only(name)
        super().__delattr__(name)

    def _is_ours(self, name: str) -> bool:
        """Fields, their other names and what is computed from them."""
        return hasattr(type(self), name) or name in ALIASES or name == "drop_rate"

    @property
    def d_inner(self) -> int:
        """Width of the feed-forward layer: `n_inner`, or 4 × `n_embd` where it is None."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def d_head(self) -> int:
        """Channels of one attention head."""
        return self.n_embd // self.n_head

    def attention_scale(self, layer_idx: int) -> float:
        """The factor on q·kᵀ in layer `layer_idx`: 1/√D or 1, over layer + 1 where asked for."""
        scale = self.d_head**-0.5 if self.scale_attn_weights else 1.0
        return scale / float(layer_idx + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return _as_ids(self.eos_token_id)

    def ids_of(self, name: str) -> tuple[int, ...]:
        """The ids in the field `bos_token_id`, `eos_token_id` or `pad_token_id`."""
        return _as_ids(getattr(self, name))

    def to_hf_dict(self) -> dict[str, Any]:
        """The fields of Hugging Face's `config.json`; `n_ctx` is there for older readers."""
        own = {k: v for k, v in asdict(self).items() if k not in ("qkv_bias", "layer_norm_bias")}
        head = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_ctx": self.n_positions,
        }
        return {**head, **own}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GPT2Config:
        """Read Hugging Face's fields or a notebook's (`emb_dim`, `n_heads`, `drop_rate`, …).

        Fields that are missing take `transformers`' defaults. A field that is not known is refused
        by name unless it is switched off (false, null, empty): it may change the arithmetic.

        Raises:
            ConfigError: not a GPT-2, an unknown field, two names of one field that disagree.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config is a {type(raw).__name__}; expected a dictionary of fields")
        if raw.get("model_type", "gpt2") != "gpt2":
            raise ConfigError(
                f"config has model_type {short_repr(raw['model_type'])}; expected 'gpt2'"
            )
        known: dict[str, Any] = {}
        for given, value in raw.items():
            targets = (
                ["embd_pdrop", "attn_pdrop", "resid_pdrop"]
                if given == "drop_rate"
                else [ALIASES.get(given, given)]
            )
            for name in targets:
                if name in known and known[name] != value:
                    raise ConfigError(
                        f"config says {name!r} twice: {short_repr(known[name])}, "
                        f"and {short_repr(value)} as {given!r}"
                    )
                known[name] = tuple(value) if isinstance(value, list) else value
        names = {own.name for own in fields(cls)}
        unknown = sorted(k for k, v in known.items() if k not in names | IGNORED and v)
        if unknown:
            found = listed([f"{short_repr(name)} = {short_repr(known[name])}" for name in unknown])
            raise ConfigError(
                f"config has {found}, which compat does not understand and which may change the "
                "arithmetic; if it does not, remove it from the config"
            )
        return cls(**{name: value for name, value in known.items() if name in names})


class _ReadOnlyError(ConfigError, AttributeError):
    """What Python raises where an attribute cannot be set, too."""


def _read_only(name: str) -> _ReadOnlyError:
    return _ReadOnlyError(
        f"config field {name!r} cannot be changed, since models may have been built from it; make "
        "another config with dataclasses.replace(config, …)"
    )


def _as_ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """One id, several or none."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def as_config(config: GPT2Config | Mapping[str, Any]) -> GPT2Config:
    """Let every block take a GPT2Config or a plain dictionary."""
    return config if isinstance(config, GPT2Config) else GPT2Config.from_dict(config)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Let every loader take a data type or its name, such as "float16"; None stays None.

    Raises:
        ConfigError: anything but one of the four types that weights may have.
    """
    if dtype is None:
        return None
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        names = ", ".join(list(DTYPES)[:-1]) + f" or {list(DTYPES)[-1]}"
        raise ConfigError(f"dtype is {short_repr(dtype)}; expected {names}")
    return found
