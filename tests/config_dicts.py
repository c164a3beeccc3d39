"""Configurations of published models."""

from __future__ import annotations

from typing import Any

# The unchanged config.json of the hub's `gpt2`.
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

# The configuration dictionary of the notebooks.
NOTEBOOK: dict[str, Any] = {
    "vocab_size": 500,
    "context_length": 64,
    "emb_dim": 48,
    "n_heads": 6,
    "n_layers": 5,
    "drop_rate": 0.2,
    "qkv_bias": False,
}
