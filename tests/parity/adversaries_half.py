"""The same adversaries in half precision, where their effects are smaller than rounding errors.

These faults are in the code or the weights, so a float32 copy of the model reveals them; the
self-check runs their float32 entries. They also run uncalibrated, like models of 500M parameters
and more, because the test lowers that threshold.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tests.parity import (
    adversaries_cheating,
    adversaries_harmless,
    adversaries_inputs,
    adversaries_source,
)
from tests.parity.adversaries_numeric import NUMERIC, add_noise, norms
from tests.parity.adversary import FAULTS, HARMLESS, Adversary, edit, register


@edit("numeric", **NUMERIC)
def positions_off_by_one(model):
    """Position p has the embedding of p + 1."""
    model.pos_emb.weight.copy_(model.pos_emb.weight.roll(-1, dims=0))


@edit("numeric", **NUMERIC)
def eps_of_1e2(model):
    """The eps of the layer norms is 1e-2."""
    for norm in norms(model):
        norm.eps = 1e-2


@edit("numeric", **NUMERIC)
def weights_with_10_percent_noise(model):
    """All weights are off by 10 %."""
    add_noise(model, 0.1)


def in_dtype(entry: Adversary, dtype: str) -> Adversary:
    """Return the entry for a checkpoint and a model in `dtype`."""

    def build(folder: Path, scratch: Path) -> nn.Module:
        return entry.build(folder, scratch).to(getattr(torch, dtype))

    return replace(entry, name=f"{entry.name}_in_{dtype}", build=build, dtype=dtype)


# These imports register entries.
REGISTERED = (adversaries_inputs, adversaries_cheating, adversaries_source, adversaries_harmless)
HALF_FAULTS = (
    "positions_off_by_one", "eps_of_1e2", "weights_with_10_percent_noise",
    "weights_with_1_percent_noise", "eps_of_1e2_in_one_norm", "eps_of_1e4", "eps_outside_the_root",
    "unbiased_variance", "erf_gelu", "scale_of_d_plus_1", "rounded_scale", "mask_of_minus_four",
    "missing_value_bias", "one_bias_off", "heads_swapped_in_one_layer", "small_attention_dropped",
    "softmax_with_a_sink", "capped_scores", "last_residual_scaled", "low_rank_projection",
    "embeddings_of_unit_length", "temperature_of_1_0005", "window_of_64", "positions_modulo_100",
    "id_0_masked", "eos_resets_positions", "third_row_shifted", "right_once_loaded_again",
    "scaled_after_the_head", "nano_erf", "nano_eps", "nano_window_100", "nano_any_zero",
    "mingpt_scale", "mingpt_gelu", "book_unbiased",
)  # fmt: skip
HALF_HARMLESS = (
    "equal_wrapped", "equal_rows_alone", "equal_full_mask", "equal_frozen",
    "equal_checkpointed_blocks", "equal_fused_kernels", "equal_sdpa_bool_mask",
    "equal_clamped_ids", "equal_in_place_residual", "equal_finfo_min_mask",
)  # fmt: skip

for _dtype in ("bfloat16", "float16"):
    for _name in (*HALF_FAULTS, *HALF_HARMLESS):
        register(in_dtype({**FAULTS, **HARMLESS}[_name], _dtype))
