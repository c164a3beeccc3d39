"""What people call the sizes of a GPT-2, and the value that the checkpoint has for each name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

from compat.config import GPT2Config

# Role: the names it goes by. DiagnosisContext and underscores do not count.
NAMES = {
    "vocab_size": """
        vocab vocab_size n_vocab num_vocab d_vocab d_vocab_out vocab_dim vocab_len vocabulary
        vocabulary_size size_vocab tokens n_tokens n_token num_tokens num_token ntoken token_count
        num_embeddings padded_vocab_size src_vocab_size tgt_vocab_size src_vocab tgt_vocab
        dict_size words n_words num_words output_size output_dim""",
    "n_positions": """
        n_positions num_positions n_position n_pos num_pos pos_size position_size max_positions
        max_position max_pos max_position_embeddings num_position_embeddings n_ctx ctx ctx_len
        ctx_length ctx_size d_ctx max_ctx context context_length context_len context_size n_context
        context_window max_context max_context_length max_context_len block_size block_length
        block_len block seq_len seq_length seqlen sequence_length sequence_len n_seq max_seq
        max_seq_len max_seq_length max_seqlen max_sequence_length max_sequence_len max_len
        max_length length max_tokens
        max_token_len input_len window window_size chunk_size time_steps""",
    "n_embd": """
        n_embd n_embed n_emb num_embed num_embd num_embeds d_embd d_embed d_emb emb emb_dim emb_size
        embd embd_dim embd_size embed embed_dim embed_size embed_len embeds_size embedding_dim
        embedding_size embeddings_dim embedding_dimension embedding_dims embedding dim_emb dim_embed
        dim_embedding num_embedding_dims d_model dmodel model_dim model_size dim_model dim dims
        n_dim ndim n_model emsize ninp token_dim channels n_channels num_channels n_features
        num_features features width n_width n_state nx residual_dim dim_residual d_residual
        normalized_shape input_dim input_size""",
    "n_layer": """
        n_layer n_layers num_layer num_layers layers layer number_of_layers depth num_hidden_layers
        n_hidden_layers n_block n_blocks num_block num_blocks number_of_blocks blocks block_count
        layer_count n_decoder n_decoders num_decoders num_decoder decoder_layers num_decoder_layers
        num_decoder_blocks n_decoder_layers n_decoder_blocks transformer_layers
        num_transformer_layers num_transformer_blocks n_transformer_layers n_transformer_blocks
        n_trf_layers trf_layers num_trf_blocks transformer_blocks num_encoder_layers stacks
        num_layers_total""",
    "n_head": """
        n_head n_heads num_head num_heads number_of_heads heads head_count num_attention_heads
        n_attention_heads attention_heads attn_heads n_attn_heads num_attn_heads nhead nheads
        n_attn n_kv_head n_kv_heads num_kv_heads num_key_value_heads kv_heads""",
    "d_inner": """
        n_inner d_inner inner_dim dim_inner inner_size d_ff dff ff ff_dim ff_size dim_ff n_ff d_ffn
        ffn_dim ffn_size ffn ffwd_dim ffn_hidden ffn_hidden_dim ffn_hidden_size ffn_num_hiddens
        ff_hidden ff_hidden_dim ff_hidden_size d_mlp n_mlp mlp mlp_dim mlp_size dim_mlp mlp_hidden
        mlp_hidden_dim mlp_hidden_size mlp_width intermediate_size intermediate_dim d_intermediate
        dim_feedforward dim_feed_forward feedforward_dim feed_forward_dim d_feedforward
        feed_forward_size feedforward_size feedforward feed_forward d_feed_forward nhid""",
    "d_head": """
        d_head dim_head head_dim head_size size_head head_width d_k d_v d_q d_key d_value key_size
        dim_per_head head_channels head_embd head_embed attn_head_size head_n_embd""",
    "ratio": """
        mlp_ratio ff_ratio ffn_ratio ff_mult ffn_mult mlp_mult mlp_multiplier ff_multiplier
        ffn_multiplier mlp_expansion ff_expansion ffn_expansion expansion expansion_factor
        forward_expansion ff_factor ffn_factor mlp_factor hidden_mult widening_factor dim_mult
        inner_mult ff_dim_mult multiplier""",
    "embd_pdrop": "embd_pdrop",
    "attn_pdrop": "attn_pdrop attention_probs_dropout_prob",
    "resid_pdrop": "resid_pdrop dropout drop p_drop",
    "qkv_bias": "qkv_bias attn_bias attention_bias attn_qkv_bias use_qkv_bias bias_qkv",
    "layer_norm_bias": "layer_norm_bias ln_bias norm_bias layernorm_bias",
    "bias": """
        bias use_bias biases with_bias has_bias linear_bias mlp_bias add_bias enable_bias
        add_bias_linear out_bias proj_bias ffn_bias ff_bias include_bias""",
    "head_bias": "lm_head_bias head_bias out_head_bias output_bias",
    "layer_norm_epsilon": """
        layer_norm_epsilon layer_norm_eps layernorm_epsilon layernorm_eps ln_eps ln_epsilon
        norm_eps norm_epsilon eps epsilon rms_norm_eps""",
    "activation_function": """
        activation_function activation act act_fn hidden_act act_type activation_type
        activation_name nonlinearity afn""",
    "init": "initializer_range init_range init_std initializer_std weight_init_std init_scale",
    "tie_word_embeddings": """
        tie_word_embeddings tie_weights tie_weight tie_embeddings tie_embedding tied_embeddings
        tied_weights tied weight_tying tie_embed share_weights share_embeddings shared_embeddings
        use_weight_tying weight_tie tie tie_emb embedding_tie""",
    "pre_norm": "pre_norm norm_first pre_ln normalize_before is_pre_norm use_pre_norm",
    "causal": "causal is_causal use_causal_mask causal_mask",
    "device": "device",
    # Switches away from GPT-2.
    "off": """
        use_rmsnorm use_rms_norm rmsnorm rms_norm use_rms use_rope rope use_rotary rotary
        use_rotary_emb use_rotary_embeddings use_alibi alibi use_relu use_squared_relu use_swiglu
        swiglu use_silu use_moe moe use_qk_norm qk_norm use_gqa parallel_block parallel_residual
        use_parallel_residual post_norm use_post_norm post_ln norm_last""",
}
# The width, unless another name here is the width; then the inner width.
WIDE = "hidden_size hidden_dim dim_hidden hidden hiddens n_hidden n_hiddens num_hiddens d_hidden"
# Words for names that are in no table: the role, one word of these, one of those, none of these.
COUNT = {"n", "num", "number", "count", "total", "max", "per"}
EXTENT = {"d", "dim", "dims", "dimension", "size", "width", "hidden", "hiddens"}
DROPOUT = {"dropout", "drop", "pdrop"}
EMBEDDING = {"emb", "embd", "embed", "embedding", "embeddings"}
RULES: list[tuple[str, set[str], set[str], set[str]]] = [
    ("embd_pdrop", DROPOUT, EMBEDDING | {"pos"}, set()),
    ("attn_pdrop", DROPOUT, {"attn", "att", "atten", "attention"}, set()),
    ("resid_pdrop", DROPOUT, DROPOUT, set()),
    ("layer_norm_epsilon", {"eps", "epsilon"}, {"eps", "epsilon"}, set()),
    ("vocab_size", {"vocab", "vocabulary"}, EXTENT | COUNT | {"len"}, set()),
    ("d_head", {"head"}, EXTENT, set()),
    ("n_head", {"head", "heads"}, COUNT | {"heads"}, EXTENT | {"lm", "out", "bias"}),
    (
        "n_layer",
        {"layers", "blocks", "decoders"},
        {"layers", "blocks", "decoders"},
        EXTENT | {"bias"},
    ),
    ("n_layer", {"layer", "block", "decoder"}, COUNT, EXTENT | {"bias"}),
    (
        "n_positions",
        {"context", "ctx", "seq", "sequence", "pos", "position", "positions", "block"},
        COUNT | {"len", "length", "size", "window"},
        {"bias"},
    ),
    (
        "d_inner",
        {"ff", "ffn", "mlp", "ffwd", "feedforward", "inner", "intermediate"},
        EXTENT,
        {"bias"},
    ),
    ("n_embd", EMBEDDING | {"model", "residual"}, EXTENT, {"bias"}),
]
# What one letter and the like may stand for where nothing better is known.
WEAK = {"v": "vocab_size", "t": "n_positions", "c": "n_embd", "d": "n_embd", "e": "n_embd"} | {
    "l": "n_layer", "n": "n_layer", "nx": "n_layer", "h": "n_head", "p": "resid_pdrop"
}  # fmt: skip
# What a constructor may insist on though it changes no number.
NEUTRAL: dict[str, Any] = {
    "model_type": None, "batch_size": 1, "learning_rate": 1e-3, "lr": 1e-3, "weight_decay": 0.0,
    "verbose": False, "debug": False, "seed": 0, "use_cache": False, "kv_cache": False,
    "gradient_checkpointing": False, "output_attentions": False, "output_hidden_states": False,
    "use_return_dict": False, "tokenizer": None, "tokeniser": None, "logger": None,
}  # fmt: skip
SIZES = {"vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "d_inner", "d_head", "ratio"}


def plain(name: str) -> str:
    """A name as it is compared: `n_embd`, `nEmbd` and `N_EMBD` are one."""
    return name.replace("_", "").replace("-", "").lower()


_ROLES = {plain(name): role for role, names in NAMES.items() for name in names.split()}
_ROLES |= {plain(f.name): f.name for f in fields(GPT2Config) if plain(f.name) not in _ROLES}
_WIDE = {plain(name) for name in WIDE.split()}
_NEUTRAL = {plain(name): value for name, value in NEUTRAL.items()}


def role_of(name: str, aliases: Iterable[str] = (), among: Collection[str] = ()) -> str | None:
    """What a name stands for, or None.

    Args:
        name: of an argument, a key or an attribute.
        aliases: the names of the parameters that its value is passed on to.
        among: all names beside it, which decide what `hidden_size` is.
    """
    short = plain(name)
    if short in _WIDE:
        others = {_ROLES.get(plain(other)) for other in among}
        return "d_inner" if "n_embd" in others else "n_embd"
    if short in _ROLES:
        return _ROLES[short]
    aliases = set(aliases)
    if "num_embeddings" in aliases:  # a table's length is one of two sizes
        others = {_ROLES.get(plain(other)) for other in among}
        if "vocab_size" in others and "out_features" not in aliases:
            return "n_positions"
        if "n_positions" in others or "out_features" in aliases:
            return "vocab_size"
    found = {role for alias in aliases if (role := _passed(alias))}
    return found.pop() if len(found) == 1 else WEAK.get(short) or _by_words(name)


def _passed(parameter: str) -> str | None:
    """The role of a parameter that a value is passed on to; `p` is nn.Dropout's."""
    if parameter in ("p", "num_embeddings"):
        return WEAK.get(parameter)
    return _ROLES.get(plain(parameter))


def _by_words(name: str) -> str | None:
    """`heads_per_attention_layer` and other names that are in no table."""
    words = set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))
    for role, of, with_one, without in RULES:
        if words & of and words & with_one and not words & without:
            return role
    return None


def value_of(role: str, config: GPT2Config) -> Any:
    """The checkpoint's value for a role."""
    ratio = config.d_inner / config.n_embd
    ours = {
        "ratio": int(ratio) if ratio.is_integer() else ratio,
        "bias": True,
        "head_bias": False,
        "init": 0.02,
        "pre_norm": True,
        "causal": True,
        "off": False,
        "device": "cpu",
    }
    return ours[role] if role in ours else getattr(config, role)


def neutral(name: str) -> tuple[bool, Any]:
    """Whether the name is of something that changes no number, and a value for it."""
    return plain(name) in _NEUTRAL, _NEUTRAL.get(plain(name))
