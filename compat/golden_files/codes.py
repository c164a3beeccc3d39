"""The codes of deviations: those of `adapt`, and those that occur in arrays only."""

from __future__ import annotations

from compat.adaptation.diagnosis import explanations
from compat.adaptation.diagnosis.diagnose import CODES as ADAPT_CODES
from compat.adaptation.diagnosis.registry import Code

# By code: the message, the fix, and why it matters. These deviations cannot occur in code that
# `adapt` traces, or are not visible there.
ARRAYS_ONLY = {
    "transposed_weight": (
        "{tensors} is used transposed, but the checkpoint stores it as [in, out], and GPT-2 "
        "computes x @ weight",
        "y = x @ weight + bias  # or transpose the weight once, when it is loaded",
        "Hugging Face's GPT-2 stores its projections as Conv1D, [in, out], but nn.Linear and most "
        "other frameworks expect [out, in]. attn.c_proj is square, so no shape error occurs there.",
    ),
    "wrong_tap": (
        "the array holds the values of {found}, not those of {expected}",
        "Store {found} under its own name, or rename the array.",
        "If a hidden state is recorded at another place in the model, the comparison fails "
        "although the model is right. For example, hidden_states[-1] of transformers is the output "
        "of ln_f, not of the last block.",
    ),
    "scaled_tap": (
        "the array holds {found:.6g} times the values of {expected}",
        "Record the value before the factor, or divide the array by {found:.6g}.",
        "Some implementations scale a tensor earlier than GPT-2, such as the queries by 1/√d_head "
        "before the product with the keys. The result can be right although the array differs.",
    ),
    "qkv_order": (
        "GPT-2's {found} are used as q, k and v, because the projection is split in another order",
        "q, k, v = (x @ c_attn.weight + c_attn.bias).split(n_embd)",
        "All three have the same shape, so no shape error occurs. The columns of c_attn are all of "
        "q, then all of k, then all of v.",
    ),
    "positions_across_rows": (
        "positions continue from one sequence of the batch to the next, but in GPT-2 every "
        "sequence begins at position 0",
        "wpe[t]  # t is the index within the sequence, not within the flattened batch",
        "A loop over all B · T tokens has a single index for sequence and position. The position "
        "is index % T.",
    ),
    "other_ids": (
        "the token embeddings are those of {found}",
        "Run the port on input_ids of the golden file, and index the rows of wte.weight from 0.",
        "Hidden states can be compared only if they were computed from the same ids in the same "
        "order. In languages whose indices start at 1, off-by-one errors are common.",
    ),
    "gelu_constants": (
        "the activation is {found}, but GPT-2's is {expected}",
        "{expected}",
        "The constants of the tanh approximation are √(2/π) and 0.044715. A typo in them changes "
        "hidden states by less than 1%, and generated text still looks right.",
    ),
    "norm_parameters": (
        "the norm uses {found} instead of {tensors}",
        "y = normed * weight + bias  # the norm's own, as the checkpoint stores them",
        "All norms have the same shapes, so no shape error occurs. Some models, such as Gemma, "
        "store weight − 1 and multiply by 1 + weight, but GPT-2 does not.",
    ),
    "other_block": (
        "blocks use the weights of other blocks: {pairs}",
        "Load h.0 into the first block, h.1 into the second, and so on.",
        "All blocks have the same shapes, so no shape error occurs. Names that are sorted as text "
        "put h.10 before h.2, and closures in a loop all refer to the last index.",
    ),
    "padding_mask": (
        "the mask differs between the sequences, and in sequence {row}, token {token} does not "
        "attend to token {found}",
        "Use only the causal mask, because the golden ids have no padding.",
        "A mask that is derived from the ids, for example by comparing them with a padding id, "
        "hides tokens that the reference attends to.",
    ),
    "inverse_layer_scale": (
        "the scores of layer i are divided by i + 1, but the checkpoint's config has "
        "scale_attn_by_inverse_layer_idx = false",
        "(q @ k.transpose(-2, -1)) / math.sqrt(d_head)",
        "transformers has this option, but OpenAI's GPT-2 checkpoints do not use it.",
    ),
    "transposed_head": (
        "{tensors} is read as [width, vocabulary], but the checkpoint stores it as "
        "[vocabulary, width]",
        "logits = x @ wte.weight.T",
        "The head is the token embedding, which has one row for each token.",
    ),
    "quantized_weights": (
        "the matrices are rounded to {bits} bits with {found}, but the checkpoint's are not",
        "Use the weights of the checkpoint without quantization.",
        "Rounding to 8 bits changes hidden states by about 1%. compat only has bounds for float32, "
        "float16 and bfloat16.",
    ),
    "other_bias": (
        "{tensors} differs by the same vector at every token, so its bias is not the checkpoint's",
        "y = x @ weight + bias  # the head of GPT-2 has no bias",
        "A bias of another layer, or one that the checkpoint does not have, shifts all tokens by "
        "the same vector.",
    ),
    "head_order": (
        "the heads are merged in the order {found}",
        "heads.transpose(1, 2).reshape(B, T, C)  # head 0 first",
        "The output projection expects the channels of head 0 first, then those of head 1, and so "
        "on.",
    ),
    "interleaved_heads": (
        "the channels of the heads are interleaved, so channel c belongs to head c % n_head, but "
        "in GPT-2 it belongs to head c // d_head",
        "q.view(B, T, n_head, d_head)  # not (B, T, d_head, n_head)",
        "Both orders have the same shapes. In GPT-2, the channels of a head are contiguous.",
    ),
    "zeroed": (
        "{found} of {tensors} is 0 everywhere, and all other values are right",
        "Remove the hook or the mask that sets it to 0.",
        "Ablation and pruning set heads or neurons to 0. Unlike dropout, they do not scale the "
        "other values.",
    ),
    "processed_weights": (
        "the weights were processed so that the probabilities stay the same but hidden states "
        "change ({found})",
        "HookedTransformer.from_pretrained_no_processing(…)",
        "By default, TransformerLens folds the norms' weights and the biases of the values into "
        "the projections, and centres the logits and everything that is added to the residual "
        "stream. Probabilities stay the same, but hidden states and logits differ from GPT-2's.",
    ),
    "extra_factor": (
        "{expected} is multiplied by {found:.6g}, and later layers use the product, but GPT-2 has "
        "no such factor",
        "Remove the factor {found:.6g}.",
        "Some models scale the residual stream, for example by 1/√2 after every sum.",
    ),
}
# Codes of gradients, for golden files with gradients.
GRADIENTS = {
    "other_loss": (
        "the loss is {found}, but the golden loss is the mean cross-entropy of each next id",
        "loss = cross_entropy(logits[:, :-1], ids[:, 1:])  # the mean over B · (T − 1)",
        "Every gradient is proportional to the loss, so a sum instead of a mean acts like another "
        "learning rate.",
    ),
    "no_gradient": (
        "the gradient of {tensors} is zero, but GPT-2's is not",
        "Look for a detached tensor, or for a gradient that is computed but never stored.",
        "Parameters without a gradient keep their values in training.",
    ),
    "missing_gradient": (
        "the gradient of {tensors} lacks the contribution of {found}",
        "grad += contribution  # for every operation that reads the tensor",
        "The gradient of a tensor is the sum over all operations that read it. For the residual "
        "stream, these are the branch and the residual connection. For the tied embedding, these "
        "are the head and the embedding of the ids.",
    ),
    "scaled_gradient": (
        "the gradient of {tensors} is {found:.6g} times GPT-2's{cause}",
        "Divide the gradient by {found:.6g}, or remove the factor.",
        "The direction is right. With SGD, the factor acts like another learning rate. If only "
        "some gradients have it, the model trains differently.",
    ),
    "wrong_backward": (
        "the backward pass at {tensors} is the derivative of another function ({found})",
        "Derive the backward pass from the formula of the port's own forward pass.",
        "The forward pass is right, but its hand-written derivative belongs to another formula. "
        "The model predicts like GPT-2 but trains differently.",
    ),
    "partial_gradient": (
        "the gradient of {tensors} is that of {found} only",
        "grad += contribution  # for every token, instead of grad = contribution",
        "A parameter is used by every token of every sequence, and its gradient is the sum over "
        "all of them.",
    ),
    "weight_decay": (
        "{found} times the parameter is added to the gradient of {tensors}",
        "Record the gradients before weight decay is added.",
        "Weight decay is part of the optimizer. The golden gradients are those of the loss alone.",
    ),
}
ARRAY_CODES = {**ARRAYS_ONLY, **GRADIENTS}
CODES = {
    **ADAPT_CODES,
    **{name: Code("breaks", message, fix) for name, (message, fix, _) in ARRAY_CODES.items()},
}


def explain(code: str) -> str:
    """Explain in text what a deviation is, why it matters, and how to fix it.

    Raises:
        KeyError: the code is unknown.
    """
    if code not in ARRAY_CODES:
        return explanations.explain(code)
    return explanations.compose(CODES[code], ARRAY_CODES[code][2])


# Messages that replace those of `adapt`, which maps these tensors by their use, so that its results
# are right nevertheless.
MESSAGES = {
    "qk_swapped": "the queries and the keys are exchanged (GPT-2's {found} are used as q, k and v)",
    "kv_swapped": "the keys and the values are exchanged (GPT-2's {found} are used as q, k and v)",
    "head_interleaved_qkv": "the columns of c_attn are read head by head, but Hugging Face stores "
    "all of q, then all of k, then all of v",
    "swapped_ln": "the two norms of the block use each other's weights",
    "no_qkv_bias": "the projection of {part} has no bias, but the checkpoint has {tensors}",
    "extra_ln": "the norm is applied twice, but GPT-2 applies it once",
    "grouped_query_attention": "{n_head} query heads share {found} of keys and values, but "
    "in GPT-2 every head has its own",
    "shared_kv": "the heads are weighted sums of the keys, but GPT-2 sums the values",
}
