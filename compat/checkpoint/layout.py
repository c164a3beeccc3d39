"""Hugging Face's GPT-2 as a set of tensors: names (without `transformer.`) and shapes."""

from __future__ import annotations

from compat.config import GPT2Config

Shape = tuple[int, ...]
HEAD, EMBEDDING = "lm_head.weight", "wte.weight"
PREFIX = "transformer."  # of all names but the head's, in files that transformers saves


def saved_name(name: str) -> str:
    """The name under which `transformers` saves a tensor."""
    return name if name == HEAD else PREFIX + name


def expected_shapes(config: GPT2Config) -> dict[str, Shape]:
    """Every tensor that a GPT-2 of this configuration has, the head included even if tied."""
    C, inner = config.n_embd, config.d_inner
    block: dict[str, Shape] = {
        "ln_1.weight": (C,),
        "ln_1.bias": (C,),
        "attn.c_attn.weight": (C, 3 * C),
        "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C),
        "attn.c_proj.bias": (C,),
        "ln_2.weight": (C,),
        "ln_2.bias": (C,),
        "mlp.c_fc.weight": (C, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, C),
        "mlp.c_proj.bias": (C,),
    }
    return {
        "wte.weight": (config.vocab_size, C),
        "wpe.weight": (config.n_positions, C),
        **{f"h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in block.items()},
        "ln_f.weight": (C,),
        "ln_f.bias": (C,),
        HEAD: (config.vocab_size, C),
    }


def mask_buffers(config: GPT2Config) -> set[str]:
    """The causal masks that old files carry beside the weights: known, and ignored."""
    names = ("attn.bias", "attn.masked_bias")
    return {f"h.{i}.{name}" for i in range(config.n_layer) for name in names}
