"""The names of taps in other implementations, whose arrays therefore need no map of names.

Sources: `llm.c/train_gpt2.c`, HookedTransformer of TransformerLens, and the module names of
`transformers`, its Flax models and nanoGPT, as used by forward hooks and `capture_intermediates`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from compat.golden_files.contents import GRADIENT


@dataclass(frozen=True)
class Convention:
    """The names of one family of implementations.

    Args:
        taps: maps the family's names to golden names. `{i}` is the layer; if only the golden name
            contains it, one array holds all layers along its first axis. If a tap has several
            names, the first one that is present is compared.
        others: the names of arrays that are not taps.
        parameters: maps the family's names of gradients of parameters, if they are not names of
            modules.
    """

    taps: Mapping[str, str]
    others: tuple[str, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)


MODULES = Convention(
    taps={
        "drop": "embed",
        "dropout": "embed",
        "h.{i}.attn.c_attn": "h.{i}.qkv",
        "attentions.{i}": "h.{i}.probs",
        "h.{i}.attn.__call__.1": "h.{i}.probs",
        "h.{i}.attn.attn_dropout": "h.{i}.probs",
        "h.{i}.attn.resid_dropout": "h.{i}.attn",
        "h.{i}.attn.c_proj": "h.{i}.attn",
        "h.{i}.mlp.c_fc": "h.{i}.fc",
        "h.{i}.mlp.act": "h.{i}.act",
        "h.{i}.mlp.gelu": "h.{i}.act",
        "h.{i}.mlp.dropout": "h.{i}.mlp",
        "h.{i}.mlp.c_proj": "h.{i}.mlp",
        "h.{i}": "h.{i}.out",
        "lm_head": "logits",
    },
    others=("wte", "wpe", "h", "h.{i}.__call__.1", "h.__call__.{i}", "__call__.{i}"),
)
LLM_C_MODULES = {
    "ln1": "h.{i}.ln_1",
    "qkv": "h.{i}.attn.c_attn",
    "attproj": "h.{i}.attn.c_proj",
    "ln2": "h.{i}.ln_2",
    "fc": "h.{i}.mlp.c_fc",
    "fcproj": "h.{i}.mlp.c_proj",
    "lnf": "ln_f",
}
LLM_C = Convention(
    taps={
        "encoded": "embed",
        "ln1": "h.{i}.ln_1",
        "qkv": "h.{i}.qkv",
        "att": "h.{i}.probs",
        "atty": "h.{i}.heads",
        "attproj": "h.{i}.attn",
        "residual2": "h.{i}.resid_mid",
        "ln2": "h.{i}.ln_2",
        "fch": "h.{i}.fc",
        "fch_gelu": "h.{i}.act",
        "fcproj": "h.{i}.mlp",
        "residual3": "h.{i}.out",
        "lnf": "ln_f",
        "logits": "logits",
    },
    others=("ln1_mean", "ln1_rstd", "ln2_mean", "ln2_rstd", "lnf_mean", "lnf_rstd", "preatt",
            "probs", "losses"),
    parameters={
        "wte": "wte.weight",
        "wpe": "wpe.weight",
        **{
            f"{own}{part[0]}": f"{module}.{part}"
            for own, module in LLM_C_MODULES.items()
            for part in ("weight", "bias")
        },
    },
)  # fmt: skip
LENS = Convention(
    taps={
        "blocks.0.hook_resid_pre": "embed",
        "blocks.{i}.ln1.hook_normalized": "h.{i}.ln_1",
        "blocks.{i}.attn.hook_q": "h.{i}.q",
        "blocks.{i}.attn.hook_k": "h.{i}.k",
        "blocks.{i}.attn.hook_v": "h.{i}.v",
        "blocks.{i}.attn.hook_pattern": "h.{i}.probs",
        "blocks.{i}.attn.hook_z": "h.{i}.heads",
        "blocks.{i}.hook_attn_out": "h.{i}.attn",
        "blocks.{i}.hook_resid_mid": "h.{i}.resid_mid",
        "blocks.{i}.ln2.hook_normalized": "h.{i}.ln_2",
        "blocks.{i}.mlp.hook_pre": "h.{i}.fc",
        "blocks.{i}.mlp.hook_post": "h.{i}.act",
        "blocks.{i}.hook_mlp_out": "h.{i}.mlp",
        "blocks.{i}.hook_resid_post": "h.{i}.out",
        "ln_final.hook_normalized": "ln_f",
    },
    others=("hook_embed", "hook_pos_embed", "blocks.{i}.hook_resid_pre", "blocks.{i}.hook_attn_in",
            "blocks.{i}.hook_mlp_in", "blocks.{i}.hook_q_input", "blocks.{i}.hook_k_input",
            "blocks.{i}.hook_v_input", "blocks.{i}.ln1.hook_scale", "blocks.{i}.ln2.hook_scale",
            "blocks.{i}.attn.hook_attn_scores", "blocks.{i}.attn.hook_result",
            "ln_final.hook_scale"),
)  # fmt: skip
CONVENTIONS = (MODULES, LLM_C, LENS)

# Prefixes and suffixes that frameworks add to module names, and prefixes of gradients.
WRAPPERS = re.compile(r"^(?:(?:_orig_mod|module|model|transformer|acts)\.)+")
CALL = re.compile(r"\.__call__(?:\.0)?$")
GRADIENTS = re.compile(r"^(?:grads_acts|gradients|grads?)\.")
FLAX = re.compile(r"\.(?:kernel|scale|embedding)$")  # Flax's names for `weight`


@dataclass(frozen=True)
class Recognised:
    """The meaning of a name.

    Args:
        golden: the golden name, with `{i}` for an array of all layers; None for an array that is
            not a tap.
        rank: if several names stand for one tap, the one with the smallest rank is compared.
    """

    golden: str | None
    rank: int = 0


def recognise(label: str, n_layer: int) -> Iterator[Recognised]:
    """Yield the possible meanings of an array's name, the most likely one first.

    Args:
        label: the name in the candidate's file.
        n_layer: the number of blocks.
    """
    plain = label.replace("/", ".")
    prefix = ""
    if GRADIENTS.match(plain):
        prefix, plain = GRADIENT, GRADIENTS.sub("", plain)
        yield from _recognise_llm_c(plain)
    elif plain.startswith("d"):
        yield from _recognise_llm_c(plain[1:])
    plain = CALL.sub("", WRAPPERS.sub("", plain))
    plain = FLAX.sub(".weight", plain) if prefix else plain
    if plain != label:
        yield Recognised(prefix + plain)
    if match := re.fullmatch(r"hidden_states\.(\d+)", plain):
        i = int(match[1])  # the last hidden state is the output of the final norm
        found = "ln_f" if i == n_layer else f"h.{i - 1}.out" if i else "embed"
        yield Recognised(prefix + found, len(MODULES.taps))
    for convention in CONVENTIONS:
        for rank, (pattern, golden) in enumerate(convention.taps.items()):
            if (layer := layer_of(plain, pattern)) is not None:
                found = golden.replace("{i}", layer or "{i}")
                yield Recognised(prefix + found, rank)
        if any(layer_of(plain, pattern) is not None for pattern in convention.others):
            yield Recognised(None)


def _recognise_llm_c(name: str) -> Iterator[Recognised]:
    """Recognise a gradient of llm.c, which has the name of its value."""
    for names in (LLM_C.parameters, LLM_C.taps):
        if name in names:
            yield Recognised(GRADIENT + names[name])
    if name in LLM_C.others:
        yield Recognised(None)


def layer_of(name: str, pattern: str) -> str | None:
    """Match a name with a pattern in which `{i}` always stands for the same number.

    Returns:
        The number as text, "" if the pattern does not contain `{i}`, or None if it does not match.
    """
    if "{i}" not in pattern:
        return "" if name == pattern else None
    before, _, after = pattern.partition("{i}")
    regex = re.escape(before) + r"(\d+)" + re.escape(after).replace(r"\{i\}", r"\1")
    match = re.fullmatch(regex, name)
    return None if match is None else str(int(match[1]))
