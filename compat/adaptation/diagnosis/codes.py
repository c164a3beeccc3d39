"""The vocabulary of deviations: what each does, what GPT-2 does, and what to change."""

from __future__ import annotations

from dataclasses import dataclass

from compat.adaptation.result import Severity


@dataclass(frozen=True)
class Code:
    """One kind of deviation; `{…}` in the texts is filled in with what was found."""

    severity: Severity
    message: str
    fix: str


CODES: dict[str, Code] = {
    # The MLP
    "erf_gelu": Code(
        "breaks",
        "uses the exact (erf) GELU; GPT-2 uses the tanh form",
        "{paste}",
    ),
    "relu": Code("breaks", "uses ReLU; GPT-2 uses the tanh GELU", 'nn.GELU(approximate="tanh")'),
    "silu": Code("breaks", "uses SiLU; GPT-2 uses the tanh GELU", 'nn.GELU(approximate="tanh")'),
    "other_activation": Code(
        "breaks",
        "the activation is {found}; the checkpoint's is {expected}",
        "use {expected}; for GPT-2 that is nn.GELU(approximate=\"tanh\")",
    ),
    "inner_dim": Code(
        "breaks",
        "the MLP is {found} wide; the checkpoint's is {expected}",
        "make the inner width {expected}",
    ),
    "n_embd_mismatch": Code(
        "breaks", "{name} is {found}; the checkpoint has {expected}", "{name}={expected}"
    ),
    "no_mlp_bias": Code(
        "breaks", "the MLP has no bias; {tensors} have no place", "give its projections bias=True"
    ),
    # Norms
    "unbiased_var": Code(
        "breaks",
        "divides the variance by C − 1; GPT-2's norm divides by C",
        "var(-1, keepdim=True, unbiased=False)",
    ),
    "eps_outside_sqrt": Code(
        "breaks",
        "adds eps = {found:g} to the standard deviation; GPT-2 adds {expected:g} to the variance",
        "(x - mean) / torch.sqrt(var + {expected:g})",
    ),
    "eps_value": Code(
        "breaks",
        "the norm's eps is {found:g}; the checkpoint's is {expected:g}",
        "eps={expected:g}",
    ),
    "rmsnorm": Code(
        "breaks",
        "is an RMSNorm: the mean is not subtracted; GPT-2 has LayerNorm",
        "nn.LayerNorm(C, eps=1e-5)",
    ),
    "no_ln_bias": Code(
        "breaks", "the norm has no bias; {tensors} have no place", "give the norm a bias"
    ),
    "post_ln": Code(
        "breaks",
        "normalises after the sum (post-LN); GPT-2 normalises before the branch: x + f(norm(x))",
        "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))",
    ),
    "norm_on_output": Code(
        "breaks",
        "normalises the branch's result; GPT-2 normalises its input: x + f(norm(x))",
        "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))",
    ),
    "no_final_ln": Code(
        "breaks",
        "no norm between the last block and the head; GPT-2 has ln_f there",
        "logits = head(ln_f(x))",
    ),
    "extra_ln": Code(
        "breaks", "a norm that GPT-2 does not have", "leave it out"
    ),
    "missing_ln": Code(
        "breaks", "no norm where GPT-2 has {tensors}", "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"
    ),
    "swapped_ln": Code(
        "info",
        "the norms are used the other way round than their names say; compat mapped them by use",
        "swap the names, or load by this map",
    ),
    # Attention
    "no_attn_scale": Code(
        "breaks",
        "does not scale the scores; GPT-2 divides them by √{d_head}",
        "(q @ k.transpose(-2, -1)) / math.sqrt(head_size)",
    ),
    "scale_by_d_model": Code(
        "breaks",
        "divides the scores by √{n_embd}, the width; GPT-2 divides by √{d_head}, the head size",
        "divide by math.sqrt(head_size), {d_head} ** 0.5",
    ),
    "wrong_scale": Code(
        "breaks",
        "multiplies the scores by {found:.6g}; GPT-2 by {expected:.6g}",
        "(q @ k.transpose(-2, -1)) * {expected:.6g}",
    ),
    "no_mask": Code(
        "breaks",
        "every token sees the whole text; GPT-2 hides the future",
        "mask the scores above the diagonal with -inf before the softmax, or is_causal=True",
    ),
    "mask_off": Code(
        "breaks",
        "the mask is off: token 5 sees {found}; in GPT-2 it sees 0 to 5",
        "keep torch.tril(torch.ones(T, T)), hide torch.triu(torch.ones(T, T), diagonal=1)",
    ),
    "mask_after_softmax": Code(
        "breaks",
        "masks after the softmax, {effect}; GPT-2 masks the scores",
        "masked_fill(mask, -inf) on the scores, before the softmax",
    ),
    "finite_mask": Code(
        "info",
        "hides the future with {found:g}, which no score came near; a lower score would show it",
        'float("-inf"), or torch.finfo(scores.dtype).min',
    ),
    "softmax_dim": Code(
        "breaks",
        "the softmax sums to one over {found}; GPT-2's over the keys",
        "softmax(scores, dim=-1)",
    ),
    "head_interleaved_qkv": Code(
        "info",
        "stores q, k and v side by side for each head; Hugging Face stores all q, then k, then v",
        "nothing: the map reorders; a plain copy of c_attn would be wrong",
    ),
    "no_head_merge_transpose": Code(
        "breaks",
        "merges the heads without bringing those of one token together",
        "heads.transpose(1, 2).contiguous().view(B, T, C)",
    ),
    "qk_swapped": Code(
        "info",
        "what is called or stored as the query is used as the key; compat mapped by use",
        "nothing, if loaded by this map; else swap them",
    ),
    "kv_swapped": Code(
        "info",
        "what is called or stored as the key is used as the value; compat mapped by use",
        "nothing, if loaded by this map; else swap them",
    ),
    "shared_kv": Code(
        "breaks",
        "one projection serves as key and value; GPT-2 has one for each",
        "scores = q @ k.transpose(-2, -1), heads = softmax(scores) @ v",
    ),
    "no_qkv_bias": Code(
        "breaks",
        "the projections of q, k and v have no bias; {tensors} have no place",
        "qkv_bias=True: give them bias=True",
    ),
    "no_proj_bias": Code(
        "breaks",
        "attention's output projection has no bias; {tensors} have no place",
        "give it bias=True",
    ),
    "attn_upcast": Code(
        "info", "computes the scores in {found}", "nothing; in half precision it is a gain"
    ),
    "n_head_mismatch": Code(
        "breaks", "has {found} heads; the checkpoint has {expected}", "n_head={expected}"
    ),
    # Wiring
    "parallel_block": Code(
        "breaks",
        "attention and MLP read the same tensor; in GPT-2 the MLP reads attention's sum",
        "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))",
    ),
    "missing_residual": Code(
        "breaks", "the branch is not added to its input: no shortcut", "x = x + branch(norm(x))"
    ),
    "residual_from_norm": Code(
        "breaks",
        "the shortcut starts after the norm; in GPT-2 it starts before it",
        "x = x + branch(norm(x)), with x as it came in",
    ),
    "dropout_always_on": Code(
        "breaks",
        "drops values in eval mode too, so that no two runs agree",
        "F.dropout(x, p, training=self.training), or nn.Dropout",
    ),
    "random_in_forward": Code(
        "breaks",
        "draws random numbers as it runs, as where a module is created inside forward; no two "
        "runs agree",
        "create the module in __init__",
    ),
    "train_mode": Code(
        "info",
        "the constructor leaves the model in training mode, in which dropout is at work",
        "model.eval() before you compare or generate",
    ),
    # Embeddings and head
    "sinusoidal_pos": Code(
        "breaks",
        "adds fixed positions; GPT-2 learned its own, and wpe.weight has no place",
        "nn.Embedding({n_positions}, {n_embd})",
    ),
    "rope": Code(
        "breaks",
        "rotates q and k by their position (RoPE); GPT-2 adds learned positions to the embedding",
        "x = wte(ids) + wpe(torch.arange(T)), no rotation",
    ),
    "no_pos": Code(
        "breaks", "has no positions; wpe.weight has no place", "x = wte(ids) + wpe(torch.arange(T))"
    ),
    "pos_offset": Code(
        "breaks", "the first token gets position {found}; in GPT-2 it gets 0", "torch.arange(T)"
    ),
    "scaled_embedding": Code(
        "breaks",
        "multiplies the {what} embedding by {found:.6g}; GPT-2 takes it as it is",
        "x = wte(ids) + wpe(positions)",
    ),
    "context_too_short": Code(
        "info",
        "has room for {found} positions of the checkpoint's {expected}; the rest is cut off",
        "build it with {expected} positions",
    ),
    "vocab_mismatch": Code(
        "breaks",
        "has a vocabulary of {found}; the checkpoint's is {expected}",
        "vocab_size={expected}",
    ),
    "n_layer_mismatch": Code(
        "breaks", "has {found} layers; the checkpoint has {expected}", "n_layer={expected}"
    ),
    "untied_head": Code(
        "info",
        "the head has weights of its own; GPT-2's head is the token embedding, which was copied",
        "head.weight = wte.weight saves {found:,} values",
    ),
    "head_bias": Code(
        "info", "the head has a bias, which GPT-2 lacks; it was set to zero", "bias=False"
    ),
    "last_position_only": Code(
        "info",
        "returns the logits of the last position only; compat put back the others to compare",
        "nothing, if that is what you want; without the cut every position can be compared",
    ),
    "fast_path": Code(
        "breaks",
        "in eval mode without gradients nn.TransformerEncoderLayer takes a fused kernel that "
        "computes something else than the layer's own code, such as the exact GELU",
        "torch.backends.mha.set_fastpath_enabled(False), or a callable that is no nn.GELU",
    ),
    "scaled_logits": Code(
        "breaks",
        "multiplies the logits by {found:.6g}; GPT-2 leaves them as they are",
        "return the logits",
    ),
    "changed_logits": Code(
        "breaks",
        "applies {found} to the logits; GPT-2 leaves them as they are",
        "return the logits",
    ),
    "softmax_output": Code(
        "breaks", "returns {found} of the logits; transformers returns them as they are",
        "return the logits",
    ),
    # What remains
    "shared_parameters": Code(
        "breaks",
        "one set of parameters serves as {tensors}; in GPT-2 each has its own",
        "give each its own module",
    ),
    "random_parameters": Code(
        "breaks",
        "{found} have no counterpart in GPT-2 and keep their initial values",
        "leave them out",
    ),
    "unused_parameters": Code(
        "info", "{found} take no part in the result and keep their values", "leave them out"
    ),
    "no_out_proj": Code(
        "breaks", "attention has no output projection; {tensors} have no place",
        "project the merged heads once more, [C, C]",
    ),
    "no_ln_weight": Code(
        "breaks", "the norm has no weight; {tensors} have no place", "give the norm its weight"
    ),
    "untraced": Code(
        "info",
        "{found}; mapped by the order of module calls, and compared by its logits alone",
        "keep to torch operations on tensors between the ids and the logits",
    ),
    "export_stopped": Code(
        "info", "{found}; traced by make_fx instead", "nothing; it matters to torch.export only"
    ),
    "unexamined": Code(
        "info",
        "a part could not be examined for deviations ({found}); the comparison stands",
        "report it to the authors of compat, with the model",
    ),
    "not_compared": Code(
        "limit",
        "{found}; the proof does not cover what the model computes then",
        "compare on ids that get there: check_parity(model, source, input_ids=…)",
    ),
    "unexplained": Code("breaks", "{found}", "look at the lines around the tap"),
}  # fmt: skip
