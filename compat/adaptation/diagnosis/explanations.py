"""Why each deviation matters for GPT-2's weights, for `gpt2-compat explain CODE`."""

from __future__ import annotations

from compat.adaptation.diagnosis.registry import CODES, Code

EXPLANATIONS = {
    "n_embd_mismatch": "Every tensor of the checkpoint has this width in its shape, so none of "
    "them fits into a model of another width.",
    "vocab_mismatch": "Each row of wte.weight is the embedding of one token. In a table of "
    "another size, some tokens have no trained row, and the softmax runs over other tokens.",
    "context_too_short": "Each row of wpe.weight is the embedding of one position. A shorter "
    "table holds the first rows, so the model computes the same up to its own length.",
    "n_layer_mismatch": "The layers were trained together. A model with fewer of them skips "
    "computations that the head expects, and additional ones keep random weights.",
    "inner_dim": "c_fc.weight and c_proj.weight have the inner width in their shapes, so they "
    "cannot be loaded into an MLP of another width.",
    "no_qkv_bias": "GPT-2's c_attn.bias is trained and far from zero. Without it, q, k and v are "
    "shifted in every head and every layer. Later models often have no such bias.",
    "no_proj_bias": "attn.c_proj.bias is trained and added to the residual stream in every layer. "
    "Without it, each layer shifts all hidden states that follow.",
    "no_out_proj": "attn.c_proj mixes the concatenated heads. Without it, each head writes to its "
    "own slice of the residual stream, which is not what the next layers were trained to read.",
    "no_mlp_bias": "The biases of c_fc decide which inner neurons are active, and that of c_proj "
    "is added to the residual stream. Both are trained.",
    "no_ln_bias": "The biases of GPT-2's norms are trained. Without them, the input of every "
    "projection after the norm is shifted.",
    "no_ln_weight": "The weights of GPT-2's norms are trained and differ a lot between channels. "
    "Without them, every channel enters the projections with the same size.",
    "shared_parameters": "The checkpoint has different values for each of these tensors, and one "
    "parameter can hold only one of them.",
    "random_parameters": "No tensor of the checkpoint belongs to these parameters. They keep "
    "whatever values the constructor gave them, and these change the logits.",
    "unused_parameters": "Parameters that the forward pass does not read cannot change the logits. "
    "They cost memory, and weight decay acts on them in training.",
    "rope": "GPT-2's weights know positions only from wpe.weight, which is added to the token "
    "embedding. They were not trained with rotated queries and keys.",
    "shared_kv": "A third of c_attn belongs to the keys and another to the values. If the code "
    "reads `self.W_key(x)` for both, the weights of one of them are never used.",
    "no_head_merge_transpose": "Before the merge, the heads are (B, H, T, D). Reshaping this to "
    "(B, T, C) without the transpose mixes heads and tokens, although the shape is right.",
    "no_head_split_transpose": "Reshaping (B, T, C) to (B, H, T, D) without the transpose takes "
    "the channels of one head from several tokens, although the shape is right.",
    "qk_norm": "Later models normalize queries and keys to keep training stable. GPT-2's weights "
    "were trained without it, and the lengths of q and k carry information.",
    "grouped_query_attention": "Later models let several query heads share keys and values to save "
    "memory. The checkpoint has a key and a value for every head.",
    "sliding_window": "GPT-2 was trained to read its whole context. With a window, distant tokens "
    "have no influence.",
    "gated_mlp": "LLaMA and others multiply the activation by a second projection. The checkpoint "
    "has no weights for it.",
    "extra_projection": "The checkpoint has no weights for further layers, so they keep random "
    "ones, and what they compute reaches the logits.",
    "batch_first": "The sequences of a batch must not influence each other. With one sequence in "
    "the batch, each token attends to itself alone.",
    "mixed_types": "Every operation on two types either fails or converts one of them. A copy "
    "in one type shows whether the code is right, and the model itself what its types cost.",
    "doubled_residual": "x += y changes the tensor that x names, and every other name for it. A "
    "shortcut that was kept before is changed as well.",
    "norm_axis": "LayerNorm makes the channels of a token comparable. Over the tokens, it mixes "
    "them, and earlier tokens depend on later ones.",
    "mask_value": "Only a score far below all others has probability 0 after the softmax. With 0, "
    "exp(0) = 1, and hidden tokens keep as much weight as visible ones.",
    "time_shift": "GPT-2 predicts the token after each position from that position. With shifted "
    "inputs, every layer reads other tokens than its weights were trained for.",
    "weights_changed": "A model whose weights depend on the calls before computes something else "
    "each time, so that no comparison holds for the next call.",
    "low_rank_term": "LoRA trains B and A beside a frozen weight. The checkpoint does not have "
    "them, and they have no effect only while B is 0.",
    "id_condition": "GPT-2 knows ids only as rows of wte. Padding is hidden by a mask that the "
    "caller passes, and no id ends or resets a text by itself.",
    "plain_list": "nn.Module finds parameters in attributes that are modules, and does not look "
    "into lists. parameters(), state_dict() and to() leave out these modules.",
    "low_precision": "bfloat16 has 8 bits of mantissa. One computation in it limits the precision "
    "of everything after it.",
    "softmax_dim": "The weights of a query must add up to 1 over the keys. Over any other axis "
    "they do not, although no shape changes.",
    "mask_after_softmax": "A softmax over unmasked scores includes later tokens in its sum. "
    "Setting their weights to zero afterwards leaves weights that add up to less than 1.",
    "finite_mask": "The softmax of a score that is much lower than the others is 0 in float32. "
    "With a finite value this holds only as long as no visible score is as low.",
    "no_mask": "GPT-2 was trained to predict the next token from those before it. Without the "
    "mask, training is meaningless, since the answer is visible, and its weights see an input "
    "that they never saw.",
    "mask_off": "A mask that is shifted by one shows the next token, or hides the token itself. "
    "Both change every hidden state but the first ones.",
    "no_attn_scale": "Unscaled scores are √d_head times larger, so the softmax is almost one-hot "
    "where it should be smooth.",
    "scale_by_d_model": "The scores of one head are sums of d_head products. Divided by the square "
    "root of the embedding width, they are too small, and attention is too even.",
    "wrong_scale": "The factor sets how sharp the softmax is. GPT-2's weights were trained with "
    "1/√d_head.",
    "attn_upcast": "Casting to a wider type only reduces rounding errors. In float32 models a cast "
    "to float32 has no effect.",
    "n_head_mismatch": "The number of heads is not visible in any shape: c_attn has the same size "
    "for every number. With another number, the softmax runs over other groups of channels.",
    "head_interleaved_qkv": "The order of rows in a fused projection is a convention. The name map "
    "of this model reorders them, and code that copies the tensor unchanged would be wrong.",
    "qk_swapped": "The product q·kᵀ tells the two apart only by the direction of the mask and of "
    "the softmax. A name-based loader would load them in the wrong order.",
    "kv_swapped": "Key and value have the same shape. A name-based loader would load them in the "
    "wrong order.",
    "rmsnorm": "LayerNorm subtracts the mean of the channels first. GPT-2's residual stream has a "
    "mean that is not zero, so the result differs.",
    "unbiased_var": "torch.var and torch.std divide by C − 1 by default. For C = 768 every norm is "
    "then 0.07 % too small, and the error adds up over the layers.",
    "eps_outside_sqrt": "GPT-2 computes (x − mean) / √(var + eps). An eps that is added to the "
    "standard deviation acts differently wherever the variance is small.",
    "eps_value": "GPT-2 uses 1e-5. The difference is visible where the variance of the hidden "
    "states is small, which is the case in the first layers.",
    "extra_ln": "A norm that the weights were not trained with rescales the residual stream.",
    "missing_ln": "The projections after a norm expect inputs of unit variance. Without it, they "
    "get the residual stream as it is, which grows from layer to layer.",
    "no_final_ln": "The head is the token embedding, and it expects normalized hidden states. "
    "GPT-2 applies ln_f before it, which the original Transformer does not.",
    "post_ln": "The original Transformer and GPT-1 apply the norm after the sum, but GPT-2 moved "
    "it to the input of each branch. The weights work with one of the two only.",
    "norm_on_output": "A norm on the output of a branch fixes the size of what it adds to the "
    "residual stream, which in GPT-2 the weights decide.",
    "swapped_ln": "Loading by name would put the weights of one norm into the other. Both have "
    "the same shape, so nothing else would notice.",
    "erf_gelu": "nn.GELU() is the exact function. The two differ by up to 0.0005, which adds up "
    "over the layers to a visible difference in the logits.",
    "relu": "ReLU is zero for every negative input, but GELU is not. The weights of c_proj were "
    "trained with GELU's values.",
    "silu": "SiLU and GELU have a similar form, but differ by up to 0.2.",
    "other_activation": "The weights of c_proj were trained with the values of the checkpoint's "
    "activation, which its config.json names as activation_function.",
    "parallel_block": "GPT-J and others compute both branches from the same input. In GPT-2 the "
    "MLP sees what attention added.",
    "missing_residual": "Without the sum, a branch replaces the hidden states instead of adding "
    "to them, and everything that earlier layers computed is lost.",
    "residual_from_norm": "What is added must be the residual stream itself. If the normalized "
    "copy is added, the stream is rescaled in every block.",
    "scaled_embedding": "The original Transformer multiplies token embeddings by √d_model. GPT-2 "
    "does not, and its position embeddings were trained for unscaled tokens.",
    "sinusoidal_pos": "GPT-2 learned its position embeddings. A formula replaces them by other "
    "values.",
    "no_pos": "Without positions, attention cannot tell the order of tokens other than by the "
    "causal mask.",
    "pos_offset": "Each position has its own trained row of wpe.weight. With an offset, every "
    "token gets the embedding of another position.",
    "untied_head": "In GPT-2 head and token embedding are one tensor. A copy computes the same "
    "until one of the two is trained.",
    "head_bias": "A bias of zero adds nothing. In training it would become another parameter that "
    "Hugging Face's model has no place for.",
    "scaled_logits": "A factor on the logits is a temperature. It changes every probability, but "
    "not which token is the most likely one.",
    "softmax_output": "F.cross_entropy and samplers expect logits. A second softmax makes "
    "training slow and sampling almost uniform.",
    "changed_logits": "Operations such as a clamp or a soft cap change logits that GPT-2 returns "
    "as they are.",
    "last_position_only": "Models that only generate need only the last position. Training and "
    "scoring need all of them.",
    "dropout_always_on": "F.dropout has training=True by default, so it also drops values in eval "
    "mode. Results then change from call to call.",
    "random_in_forward": "A module that is created in forward gets new random weights at every "
    "call. Nothing can be loaded into it or trained.",
    "train_mode": "A new module is in training mode. Until eval() is called, dropout changes the "
    "logits.",
    "fast_path": "Which code runs depends on the mode of the model and on gradients, so that the "
    "same model computes different logits in training and in eval mode.",
    "untraced": "Code that leaves torch cannot be followed operation by operation, so that the "
    "logits are compared but no deviation can be located.",
    "unexamined": "One check failed with an error of its own. The comparison of hidden states and "
    "logits does not depend on it.",
    "not_compared": "The code has a condition of which only one side was reached by the inputs of "
    "the proof. On the other side the model may compute something else.",
    "kv_cache": "With a cache, only the new ids are passed. They stand after the cached ones, so "
    "that their positions continue, and they attend to all of them. Generation without a cache is "
    "right, and with it the text goes wrong from the second token on.",
    "wrong_gradient": "Autograd computes other gradients than GPT-2's, although the logits are "
    "GPT-2's. Fine-tuning would leave some parameters as they are or move them in a wrong "
    "direction, and the loss may fall all the same.",
    "unexplained": "The numbers differ, and none of the known deviations explains it.",
}


def explain(code: str) -> str:
    """What a deviation is, why it matters for GPT-2's weights, and its fix; as text.

    Raises:
        KeyError: the code is not in the registry.
    """
    fix = 'F.gelu(x, approximate="tanh")' if code.endswith(("gelu", "lu")) else "See the line."
    return compose(CODES[code], EXPLANATIONS[code], fix)


def compose(entry: Code, why: str, fix: str = "") -> str:
    """The three paragraphs of an explanation.

    Args:
        entry: the texts of the deviation.
        why: why it matters.
        fix: replaces a fix that depends on the finding.
    """
    names = _Placeholders()
    what = entry.message.format_map(names)
    fix = fix if entry.fix == "{fix}" else entry.fix.format_map(names)
    return f"{what[0].upper()}{what[1:]}.\n\n{why}\n\nFix: {fix}"


class _Placeholders(dict[str, object]):
    """Stands for values that only a finding has: `<found>`."""

    def __missing__(self, name: str) -> _Placeholder:
        return _Placeholder(name)


class _Placeholder(str):
    def __format__(self, spec: str) -> str:
        return "<" + self + ">"
