"""Why each deviation matters for GPT-2's weights, for `gpt2-compat explain CODE`."""

from __future__ import annotations

import re

from compat.adaptation.diagnosis.registry import CODES, Code

EXPLANATIONS = {
    "residual_weights": "Some models scale the output of a branch, for example by 1/√(2 n_layer), "
    "or by learned factors as in LayerScale and ReZero. GPT-2 only scales the initial values of "
    "its weights.",
    "n_embd_mismatch": "Every tensor of the checkpoint has this width in its shape, so none of "
    "them fits into a model of another width.",
    "vocab_mismatch": "Each row of wte.weight is the embedding of one token. In a table of "
    "another size, some tokens have no trained row, and the softmax runs over other tokens.",
    "context_too_short": "Each row of wpe.weight is the embedding of one position. A shorter "
    "table holds the first rows, so the model computes the same up to its own length.",
    "n_layer_mismatch": "The layers were trained together. A model with fewer layers skips "
    "computations that the head relies on, and additional layers keep random weights.",
    "inner_dim": "c_fc.weight and c_proj.weight have the inner width in their shapes, so they "
    "cannot be loaded into an MLP of another width.",
    "head_width": "GPT-2's c_attn has 3 · n_embd outputs and c_proj has n_embd inputs, so that the "
    "heads together are as wide as the model. Wider or narrower heads cannot hold these weights.",
    "latent_attention": "Multi-head latent attention (DeepSeek) projects to a narrow vector first, "
    "which is all that is cached. c_attn is one matrix of full rank, and cannot be divided so.",
    "rounded_weights": "GPT-2's weights were trained without rounding. Rounded to a few values, as "
    "BitNet's are, they project to other vectors, in every layer.",
    "sliced_heads": "In GPT-2, every head has a projection of all channels. A head that projects "
    "its own slice sees a part of the token only, and c_attn does not fit into its matrices.",
    "no_qkv_bias": "GPT-2's c_attn.bias is trained and far from zero. Without it, q, k and v are "
    "shifted in every head and every layer. Later models often have no such bias.",
    "no_proj_bias": "attn.c_proj.bias is trained and added to the residual stream in every layer. "
    "Without it, each layer shifts all hidden states that follow.",
    "per_head_projection": "attn.c_proj.weight adds each channel of each head to all channels "
    "of the block. A projection within a head reaches only the channels of this head.",
    "no_attention": "Attention is the only part in which a token reads other tokens. Without it, "
    "the next token is predicted from the last one alone.",
    "unused_attention": "The result of the heads is computed and then lost, for example because "
    "the projection is applied to their input. So no token reads other tokens.",
    "no_out_proj": "attn.c_proj mixes the concatenated heads. Without it, each head writes to its "
    "own slice of the residual stream, which is not what the next layers were trained to read.",
    "no_mlp_bias": "The biases of c_fc decide which inner neurons are active, and that of c_proj "
    "is added to the residual stream. Both are trained.",
    "no_ln_bias": "The biases of GPT-2's norms are trained. Without them, the input of every "
    "projection after the norm is shifted.",
    "no_ln_weight": "The weights of GPT-2's norms are trained and differ a lot between channels. "
    "Without them, every channel enters the projections with the same variance.",
    "shared_parameters": "The checkpoint has different values for these tensors, and one "
    "parameter can hold the values of only one tensor.",
    "random_parameters": "No tensor of the checkpoint belongs to these parameters. They keep "
    "their initial values, which change the logits.",
    "unused_parameters": "Parameters that the forward pass does not use cannot change the "
    "logits. They take memory, and weight decay changes them in training.",
    "rope": "GPT-2 encodes positions only in wpe.weight, which is added to the token embedding. "
    "Its weights were not trained with rotated queries and keys.",
    "shared_kv": "A third of c_attn belongs to the keys and another to the values. If the code "
    "reads `self.W_key(x)` for both, the other projection's weights are never used.",
    "no_head_merge_transpose": "Before the merge, the heads are (B, H, T, D). Reshaping this to "
    "(B, T, C) without the transpose mixes heads and tokens, although the shape is right.",
    "no_head_split_transpose": "Reshaping (B, T, C) to (B, H, T, D) without the transpose takes "
    "the channels of one head from several tokens, although the shape is right.",
    "qk_norm": "Later models normalize queries and keys to keep training stable. GPT-2's weights "
    "were trained without it, and the norms of q and k carry information.",
    "position_bias": "In GPT-2, wpe.weight is the only source of positions. ALiBi and T5 add a "
    "bias to the scores instead.",
    "other_softmax": "Some models add a key with the score 0, which allows a head to attend to no "
    "token.",
    "changed_scores": "Some later models cap the scores to keep training stable. GPT-2's softmax "
    "reads the scaled scores as they are.",
    "position_ids": "The position embedding of a token is the row of wpe.weight at its index in "
    "the sequence. A common mistake is a counter that is not incremented, or incremented twice.",
    "grouped_query_attention": "Later models let several query heads share keys and values to save "
    "memory. The checkpoint has a key and a value for every head.",
    "sliding_window": "GPT-2 was trained to read its whole context. With a window, distant tokens "
    "have no influence.",
    "gated_mlp": "LLaMA and others multiply the activation by a second projection. The checkpoint "
    "has no weights for it.",
    "extra_projection": "The checkpoint has no weights for additional projections, so they keep "
    "random weights, and their results change the logits.",
    "cross_attention": "The checkpoint has no weights for a second attention in each block. They "
    "keep random values, and their result changes the hidden states that the MLP reads.",
    "no_mlp": "Two thirds of the weights of each block are in its MLP. Without it, the hidden "
    "states that the next block reads are not those that it was trained on.",
    "unknown_mlp": "The checkpoint has the two matrices of one MLP for each block. Routers and "
    "experts, or further projections, have no weights in it and keep random ones.",
    "one_mlp_projection": "c_fc widens each hidden state, and c_proj returns it to the width of "
    "the residual stream. A single projection has no place for the weights of both.",
    "batch_first": "The sequences of a batch must not influence each other. With one sequence in "
    "the batch, each token attends to itself alone.",
    "no_head": "The head turns the last hidden states into a score for each token of the "
    "vocabulary. Without it, the model predicts nothing. GPT-2's head is the token embedding.",
    "continued": "GPT-2's logits depend on nothing but the ids of one call. A position or a KV "
    "cache that the modules keep has to be reset, or else a new text is read as the end of the "
    "last one.",
    "one_token": "A prompt of T tokens costs T calls, and training on whole sequences is not "
    "possible. With a causal mask, one call computes the logits of all positions.",
    "mixed_types": "An operation on two data types either fails or converts one of them. The "
    "copy in one type shows whether the code is correct, and the comparison in the model's own "
    "types shows how much accuracy they cost.",
    "doubled_residual": "x += y changes the tensor in place, and with it every other reference "
    "to it, such as a shortcut that was stored before. A branch that returns x + f(x) has its own "
    "shortcut. If the block adds x once more, x counts twice.",
    "norm_axis": "LayerNorm normalizes the channels of each token. A norm over the tokens makes "
    "earlier tokens depend on later ones.",
    "mask_value": "Only a score far below all others has probability 0 after the softmax. A "
    "score of 0 contributes exp(0) = 1, so masked tokens keep about as much weight as visible "
    "ones.",
    "time_shift": "GPT-2 predicts the token after each position from that position. With shifted "
    "inputs, every layer reads other tokens than it did in training.",
    "weights_changed": "If a call changes the weights, the next call computes something else, "
    "and no comparison is valid for it.",
    "low_rank_term": "LoRA trains B and A beside a frozen weight. The checkpoint does not have "
    "them, and they have no effect only while B is 0.",
    "id_condition": "GPT-2 uses ids only to look up rows of wte. The caller masks padding with "
    "an attention mask, and no id resets the context.",
    "plain_list": "nn.Module finds parameters in attributes that are modules, and does not "
    "search lists. parameters(), state_dict() and to() leave out these modules.",
    "low_precision": "bfloat16 has 8 bits of precision. One computation in a lower precision "
    "limits the accuracy of everything after it.",
    "softmax_dim": "The attention weights of a query must sum to 1 over the keys. After a "
    "softmax over any other axis they do not, although no shape changes.",
    "mask_after_softmax": "A softmax over unmasked scores includes later tokens in its sum. "
    "Setting their weights to zero afterwards leaves weights that sum to less than 1.",
    "finite_mask": "The softmax of a score that is much lower than the others is 0 in float32. "
    "With a finite value this holds only while no visible score is as low.",
    "no_mask": "GPT-2 was trained to predict the next token from those before it. Without the "
    "mask, each position attends to the token that it should predict, and the hidden states "
    "differ from those in training.",
    "mask_off": "A mask that is shifted by one shows the next token, or hides the token itself. "
    "Both change nearly every hidden state.",
    "scaled_probs": "The result of a head is an average of the values, weighted by attention. With "
    "weights that do not sum up to 1, all results have another size.",
    "no_attn_scale": "Unscaled scores are √d_head times larger, so the softmax is almost one-hot "
    "where it should be smooth.",
    "scale_by_d_model": "The scores of one head are sums of d_head products. Divided by the "
    "square root of the embedding width, they are too small, and attention is too uniform.",
    "wrong_scale": "The factor determines how peaked the softmax is. GPT-2's weights were "
    "trained with 1/√d_head.",
    "attn_upcast": "Casting to a wider type only reduces rounding errors. In float32 models a cast "
    "to float32 has no effect.",
    "n_head_mismatch": "The number of heads is not visible in any shape: c_attn has the same size "
    "for every number. With another number, the softmax runs over other groups of channels.",
    "head_interleaved_qkv": "The order of rows in a fused projection is a convention. The name map "
    "of this model reorders them, and code that copies the tensor unchanged would be wrong.",
    "qk_swapped": "In q·kᵀ, the query and the key differ only by the axes of the mask and of the "
    "softmax. A name-based loader would exchange their weights.",
    "kv_swapped": "Key and value have the same shape. A name-based loader would exchange their "
    "weights.",
    "rmsnorm": "LayerNorm subtracts the mean of the channels first. The mean of GPT-2's residual "
    "stream is not zero, so the result differs.",
    "unbiased_var": "torch.var and torch.std divide by C − 1 by default. For C = 768 every norm is "
    "then 0.07 % too small, and the error adds up over the layers.",
    "eps_outside_sqrt": "GPT-2 computes (x − mean) / √(var + eps). An eps that is added to the "
    "standard deviation has another effect where the variance is small.",
    "bias_before_scale": "GPT-2 computes weight · x̂ + bias. In (x̂ + bias) · weight, the weight "
    "multiplies the checkpoint's bias too.",
    "eps_value": "GPT-2 uses 1e-5. The difference is visible where the variance of the hidden "
    "states is small, which is the case in the first layers.",
    "extra_ln": "A norm that the weights were not trained with rescales the residual stream.",
    "missing_ln": "The projections after a norm expect inputs of unit variance. Without the "
    "norm, they get the residual stream, whose variance grows from layer to layer.",
    "no_final_ln": "The head is the token embedding, and it expects normalized hidden states. "
    "GPT-2 applies ln_f before it, which the original Transformer does not.",
    "post_ln": "The original Transformer and GPT-1 apply the norm after the sum, but GPT-2 moved "
    "it to the input of each branch. The weights were trained for one of the two only.",
    "norm_on_output": "A norm on the output of a branch fixes the variance of what the branch "
    "adds to the residual stream. In GPT-2 the weights of the branch determine it.",
    "swapped_ln": "Loading by name would exchange the weights of the two norms. Both have the "
    "same shape, so no shape check would fail.",
    "erf_gelu": "nn.GELU() is the exact function. The two differ by up to 0.0005, which "
    "accumulates over the layers to a measurable difference in the logits.",
    "relu": "ReLU is zero for every negative input, but GELU is not. The weights of c_proj were "
    "trained with GELU's values.",
    "silu": "SiLU and GELU are similar functions, but they differ by up to 0.2.",
    "other_activation": "The weights of c_proj were trained with the values of the checkpoint's "
    "activation, which its config.json names as activation_function.",
    "parallel_block": "GPT-J and others compute both branches from the same input. In GPT-2 the "
    "input of the MLP includes the result of attention.",
    "missing_residual": "Without the sum, a branch replaces the hidden states instead of adding "
    "to them, so the results of earlier layers are lost.",
    "residual_from_norm": "The branch must be added to the residual stream itself. If it is "
    "added to the normalized copy, every block rescales the stream.",
    "hyper_connections": "With several copies of the hidden states, each branch reads a mixture of "
    "them and adds its result to each with a weight. GPT-2's weights have no such mixture.",
    "scaled_embedding": "The original Transformer multiplies token embeddings by √d_model. GPT-2 "
    "does not, and its position embeddings were trained for unscaled tokens.",
    "sinusoidal_pos": "GPT-2's position embeddings are trained parameters. A fixed formula "
    "computes other values.",
    "no_pos": "Without positions, attention cannot tell the order of tokens other than by the "
    "causal mask.",
    "pos_offset": "Each position has its own trained row of wpe.weight. With an offset, every "
    "token gets the embedding of another position.",
    "untied_head": "In GPT-2 the head and the token embedding are one tensor. A copy computes "
    "the same logits until one of the two is trained.",
    "head_bias": "A bias of zero adds nothing. In training it would become nonzero, and Hugging "
    "Face's GPT-2 has no such parameter.",
    "scaled_logits": "A factor on the logits is an inverse temperature. It changes every "
    "probability, but not the most likely token.",
    "softmax_output": "F.cross_entropy and samplers expect logits. They apply a softmax "
    "themselves. A second one makes training slow and sampling almost uniform.",
    "changed_logits": "GPT-2 returns the result of the head. Operations such as a clamp or a "
    "soft cap change it.",
    "mask_argument": "GPT-2 always applies a causal mask. A call without this argument predicts a "
    "token from the tokens after it, so parity was shown for calls with the argument only.",
    "fixed_length": "A mask or a table of positions that is not cut to the length of the input "
    "fits only a full context. Generation begins with a short prompt and fails at once.",
    "input_shape": "The weights do not depend on the order of the axes of ids and logits, but code "
    "that calls the model has to pass the ids as the model expects them.",
    "logits_method": "GPT-2's model returns the logits. Code that calls model(ids), such as a "
    "training loop or a generator, takes the hidden states for them.",
    "no_forward": "A module without forward cannot be called as model(ids), which training loops, "
    "hooks and libraries do. The weights do not depend on the names of the methods.",
    "last_id_left_out": "The weights do not depend on it, but a generator that reads the logits "
    "after the last id gets those after the one before.",
    "setup_first": "The weights do not depend on it, but code that calls model(ids) without the "
    "method fails, and KV caches of a fixed size are kept on the model.",
    "output_shape": "The weights do not depend on the shape of the logits. Training code often "
    "flattens them for the loss, but code that expects (B, T, V) reads the wrong axis.",
    "last_position_only": "Models that only generate need only the last position. Training and "
    "scoring need all of them.",
    "loss_only": "Training needs only the loss, which is the mean over all tokens. Scoring and "
    "generation need the logits that it is computed from.",
    "dropout_always_on": "F.dropout has training=True by default, so it also drops values in eval "
    "mode. Results then differ between calls.",
    "random_in_forward": "A module that is created in forward gets new random weights at every "
    "call. Nothing can be loaded into it or trained.",
    "train_mode": "A new module is in training mode. Until eval() is called, dropout changes the "
    "logits.",
    "fast_path": "Which code runs depends on the model's mode and on whether gradients are "
    "enabled, so the same model computes different logits in training and in eval mode.",
    "partly_examined": "A model that compat cannot build or call has no logits to compare. Its "
    "block, or those of its parts that can be called with hidden states, are examined alone. The "
    "embeddings, the last norm and the head are not.",
    "untraced": "Operations outside of torch cannot be traced. The logits are compared, but no "
    "deviation can be located.",
    "unexamined": "One check failed with an error of its own. The comparison of hidden states and "
    "logits does not depend on it.",
    "not_compared": "The inputs of the proof reached only one outcome of a condition in the "
    "code. In the other case the model may compute something else.",
    "kv_cache": "With a cache, only the new ids are passed. Their positions follow those of the "
    "cached ids, and they attend to all of them. With this cache, generated text is wrong from "
    "the second new token on. Without the cache, it is right.",
    "kv_cache_chunk": "Many caches are written for one new id at a time, without a causal mask "
    "after the first call. Several ids at once, as in a second prompt, then "
    "attend to those after them.",
    "wrong_gradient": "The logits are GPT-2's, but autograd computes other gradients. "
    "Fine-tuning would not update some parameters, or update them in a wrong direction, and the "
    "loss may decrease nevertheless.",
    "extra_operation": "GPT-2's weights were trained without this operation. Every part after it "
    "reads values that it has not seen in training.",
    "no_qkv_projection": "The projections select what a head compares and what it passes on. The "
    "checkpoint's matrix for this part cannot be loaded anywhere.",
    "other_norm": "A BatchNorm uses statistics of the training data, an InstanceNorm those of each "
    "channel over the tokens, and a GroupNorm those of several tokens. GPT-2's weights expect "
    "channels with mean 0 and variance 1 in each token.",
    "other_attention": "GPT-2's queries and keys were trained for a softmax over the visible keys. "
    "With other weights of the values, every head computes another average.",
    "nan_scores": "NaN spreads through every later operation. 0 · inf is NaN, so a mask is not "
    "multiplied with inf.",
    "mlp_before_attention": "The order of the branches is not visible in any shape. Each branch of "
    "GPT-2 was trained on the residual stream to which the other one was added before.",
    "other_embedding": "The first block was trained on the sum of both vectors.",
    "extra_tokens": "Attention, positions and the mask then count other vectors than the ids. "
    "GPT-2 has no weights for them.",
    "pooled_positions": "GPT-2 predicts the next token at every position. One vector for all "
    "positions depends on later tokens, and has lost which of them was the last.",
    "other_shape": "A tensor is loaded only into a parameter with as many rows and columns.",
    "unknown_part": "compat recognises the parts of a GPT-2 by how values are computed from one "
    "another. The weights of a part that it does not recognise are not loaded.",
    "changed_in_place": "Autograd needs the values that an operation had as input, and raises an "
    "exception if they were overwritten. The model can be used, but not trained.",
    "refused_input": "A GPT-2 is called with texts of any length up to its context, and with any "
    "number of them. Code that raises an exception on some of them cannot be compared there.",
    "unexplained": "The numbers differ, and none of the known deviations explains it.",
}


def explain(code: str) -> str:
    """Describe a deviation: what it is, why it matters for GPT-2's weights, and its fix.

    Raises:
        KeyError: the code is not in the registry.
    """
    size = code.removesuffix("_mismatch")
    fix = f"{size}=<expected>" if size != code else 'F.gelu(x, approximate="tanh")'
    return compose(CODES[code], EXPLANATIONS[code], fix)


def compose(entry: Code, why: str, fix: str = "") -> str:
    """Return the three paragraphs of an explanation.

    Args:
        entry: the texts of the deviation.
        why: why it matters.
        fix: replaces a fix that depends on the finding.
    """
    # Values that only a finding has are named: <found>.
    what, usual_fix = (re.sub(r"{(\w+).*?}", r"<\1>", t) for t in (entry.message, entry.fix))
    fix = fix if entry.fix == "{fix}" else usual_fix
    return f"{what[0].upper()}{what[1:]}.\n\n{why}\n\nFix: {fix}"
