"""The codes of deviations: those of `adapt`, and those that only arrays can show."""

from __future__ import annotations

from compat.adaptation.diagnosis import explanations
from compat.adaptation.diagnosis.diagnose import CODES as ADAPT_CODES
from compat.adaptation.diagnosis.registry import Code

# By code: the message, the fix, and why it matters. `adapt` traces code, where these deviations
# cannot occur or cannot be seen.
ARRAYS_ONLY = {
    "transposed_weight": (
        "{tensors} is used transposed: the checkpoint stores it as [in, out], and GPT-2 "
        "computes x @ weight",
        "y = x @ weight + bias  # or transpose it once when it is loaded",
        "Hugging Face's GPT-2 stores its projections as Conv1D, [in, out], but nn.Linear and most "
        "other frameworks expect [out, in]. attn.c_proj is square, so that no shape shows it.",
    ),
    "wrong_tap": (
        "the array holds the values of {found}, not those of {expected}",
        "Store {found} under its own name, or rename the array.",
        "A hidden state that is recorded at another place agrees with nothing, although the model "
        "is right. hidden_states[-1] of transformers, for example, is the result of ln_f, and not "
        "of the last block.",
    ),
    "scaled_tap": (
        "the array holds {found:.6g} times the values of {expected}",
        "Record the value before the factor, or divide the array by {found:.6g}.",
        "Some implementations multiply a tensor early, such as the queries by 1/√d_head before the "
        "product with the keys. The result can be right, but the array is not the tap.",
    ),
    "qkv_order": (
        "GPT-2's {found} are used as q, k and v: the projection is divided in another order",
        "q, k, v = (x @ c_attn.weight + c_attn.bias).split(n_embd)",
        "The three have the same shape, so that an exchange shows in the numbers only. The columns "
        "of c_attn are all of q, then all of k, then all of v.",
    ),
    "positions_across_rows": (
        "positions continue from one sequence of the batch to the next, but in GPT-2 every "
        "sequence begins at position 0",
        "wpe[t]  # t is the index within the sequence, not within the flattened batch",
        "A loop over all B · T tokens has one index for both. The position is its remainder after "
        "division by T.",
    ),
    "position_ids": (
        "the tokens have the positions {found}, but in GPT-2 {expected}",
        "positions = torch.arange(T)  # with a cache: torch.arange(past, past + T)",
        "Every token gets the row of wpe.weight of its place in the sequence. A counter that is "
        "not advanced, or advanced twice, shows at once in the first tap.",
    ),
    "other_ids": (
        "the token embeddings are those of {found}",
        "Run the port on input_ids of the golden file, with rows of wte.weight counted from 0.",
        "Hidden states can be compared only if they were computed from the same ids in the same "
        "order. Languages that count from 1 easily read the row before.",
    ),
    "gelu_constants": (
        "the activation is {found}, but GPT-2's is {expected}",
        "{expected}",
        "The constants of the tanh approximation are √(2/π) and 0.044715. A typing error in them "
        "changes hidden states by less than 1%, so that text still looks right.",
    ),
    "norm_parameters": (
        "the norm computes with {found} in place of {tensors}",
        "y = normed * weight + bias  # the norm's own, as the checkpoint stores them",
        "All norms have the same shapes, so that an exchange shows in the numbers only. Some "
        "models, such as Gemma, store weight − 1 and multiply by 1 + weight; GPT-2 does not.",
    ),
    "other_block": (
        "blocks compute with the weights of other blocks: {pairs}",
        "Load h.0 into the first block, h.1 into the second, and so on.",
        "All blocks have the same shapes. Names that are sorted as text put h.10 before h.2, and a "
        "closure in a loop can see the last index only.",
    ),
    "padding_mask": (
        "the mask differs between the sequences: in sequence {row}, token {token} does not "
        "attend to token {found}",
        "Use the causal mask alone: the golden ids have no padding.",
        "A mask that is derived from the ids, such as by comparing them with a padding id, hides "
        "tokens that the reference attends to.",
    ),
    "position_bias": (
        "{found}, but in GPT-2 the scores do not depend on the distance",
        "Remove the bias.",
        "GPT-2 knows positions from wpe.weight only. ALiBi and T5 add to the scores instead.",
    ),
    "other_softmax": (
        "the softmax is another: {found}, so that the weights do not sum to one",
        "scores.softmax(dim=-1)",
        "Some models let a head attend to nothing by one more key with the score 0.",
    ),
    "inverse_layer_scale": (
        "the scores of layer i are also divided by i + 1, but the checkpoint's config has "
        "scale_attn_by_inverse_layer_idx = false",
        "(q @ k.transpose(-2, -1)) / math.sqrt(d_head)",
        "The option exists in transformers, but OpenAI's GPT-2 checkpoints do not use it.",
    ),
    "transposed_head": (
        "{tensors} is read as [width, vocabulary], but the checkpoint stores it as "
        "[vocabulary, width]",
        "logits = x @ wte.weight.T",
        "The head is the token embedding, whose rows are tokens.",
    ),
    "quantized_weights": (
        "the matrices are rounded to {bits} bits with {found}, but the checkpoint's are not",
        "Compute with the weights of the checkpoint.",
        "Rounding to 8 bits changes hidden states by about 1%. compat has bounds for the types "
        "float32, float16 and bfloat16 only.",
    ),
    "other_bias": (
        "the same vector is added to {tensors} at every token, as by another bias than the "
        "checkpoint's",
        "y = x @ weight + bias  # the head of GPT-2 has no bias",
        "A bias that belongs to another layer, or one that the checkpoint does not have, shifts "
        "all tokens alike.",
    ),
    "residual_weights": (
        "the residual sum is {found} · x + {branch} · branch(x), but in GPT-2 x + branch(x)",
        "x = x + branch(norm(x))",
        "Some models scale what a branch adds, such as LayerScale. GPT-2 does so only when its "
        "weights are initialised.",
    ),
    "head_order": (
        "the heads are merged in the order {found}",
        "heads.transpose(1, 2).reshape(B, T, C)  # head 0 first",
        "The output projection expects the channels of head 0 first, then those of head 1.",
    ),
    "interleaved_heads": (
        "the channels of the heads are interleaved: channel c belongs to head c % n_head, but "
        "in GPT-2 to head c // d_head",
        "q.view(B, T, n_head, d_head)  # not (B, T, d_head, n_head)",
        "Both orders have the same shapes. In GPT-2, the channels of a head are side by side.",
    ),
    "zeroed": (
        "{found} of {tensors} is 0 everywhere, and all other values are right",
        "Remove the hook or the mask that sets it to 0.",
        "Ablation and pruning set heads or neurons to 0. Unlike dropout, they do not scale what "
        "is left.",
    ),
    "processed_weights": (
        "the weights were changed so that the model predicts the same through other hidden "
        "states: {found}",
        "HookedTransformer.from_pretrained_no_processing(…)",
        "TransformerLens by default folds the norms' weights and the biases of the values into the "
        "projections, and centres everything that writes to the residual stream, and the logits. "
        "Probabilities stay the same, but hidden states and logits are not GPT-2's.",
    ),
    "extra_factor": (
        "{expected} is multiplied by {found:.6g}, and what follows computes with the product, "
        "but GPT-2 has no such factor",
        "Remove the factor.",
        "Some models scale the residual stream, such as by 1/√2 after every sum.",
    ),
}
# Codes of gradients, which only golden files with gradients can show.
GRADIENTS = {
    "other_loss": (
        "the loss is {found}, but the golden one is the mean cross-entropy of each next id",
        "loss = cross_entropy(logits[:, :-1], ids[:, 1:])  # the mean over B · (T − 1)",
        "Every gradient is proportional to the loss that it starts from, so that a sum in place of "
        "a mean acts like another learning rate.",
    ),
    "no_gradient": (
        "the gradient is zero at {tensors}, where GPT-2's is not",
        "Look for a detached tensor, or for a gradient that is computed and never stored.",
        "Parameters without a gradient keep their values in training.",
    ),
    "missing_gradient": (
        "the gradient of {tensors} lacks the share that comes from {found}",
        "Add the gradients of all places that read the tensor: grad += share.",
        "A tensor that is read in several places gets the sum of their gradients: the residual "
        "stream from the branch and from the connection past it, the tied embedding from the head "
        "and from the ids.",
    ),
    "scaled_gradient": (
        "the gradient of {tensors} is {found:.6g} times GPT-2's{cause}",
        "Divide the gradient by {found:.6g}, or remove the factor.",
        "The direction is right. With SGD the factor acts like another learning rate; where only "
        "some gradients have it, training goes elsewhere.",
    ),
    "wrong_backward": (
        "the backward pass at {tensors} is that of another function: {found}",
        "Derive the backward pass from the forward pass that the port computes.",
        "The forward pass is right, but the derivative written for it belongs to another formula. "
        "The model predicts like GPT-2 and does not train like it.",
    ),
    "partial_gradient": (
        "the gradient of {tensors} is that of {found} only",
        "Add the gradients of all tokens: grad += share, not grad = share.",
        "A parameter is used by every token of every sequence, and its gradient is the sum.",
    ),
    "weight_decay": (
        "{found} times the parameter is added to the gradient of {tensors}",
        "Dump the gradients before weight decay is added.",
        "L2 regularization belongs to the optimizer. The golden gradients are those of the loss.",
    ),
}
ARRAY_CODES = {**ARRAYS_ONLY, **GRADIENTS}
CODES = {
    **ADAPT_CODES,
    **{name: Code("breaks", message, fix) for name, (message, fix, _) in ARRAY_CODES.items()},
}


def explain(code: str) -> str:
    """What a deviation is, why it matters, and its fix; as text.

    Raises:
        KeyError: there is no such code.
    """
    if code not in ARRAY_CODES:
        return explanations.explain(code)
    return explanations.compose(CODES[code], ARRAY_CODES[code][2])


# `adapt` maps these by their use, so that they do not change its numbers; in arrays they do.
MESSAGES = {
    "qk_swapped": "the queries and the keys are exchanged: GPT-2's {found} are used as q, k and v",
    "kv_swapped": "the keys and the values are exchanged: GPT-2's {found} are used as q, k and v",
    "head_interleaved_qkv": "the columns of c_attn are read head by head, but Hugging Face stores "
    "all of q, then k, then v",
    "swapped_ln": "the two norms of the block have each other's weights",
    "no_qkv_bias": "the projection of {part} has no bias, but the checkpoint has {tensors}",
    "extra_ln": "the norm is applied twice, but in GPT-2 once",
    "grouped_query_attention": "{n_head} query heads share {found} heads of keys and values, but "
    "in GPT-2 every head has its own",
    "shared_kv": "the heads are weighted sums of the keys, but in GPT-2 of the values",
}
