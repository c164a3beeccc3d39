"""The codes of deviations: those of `adapt`, and those that only arrays can show."""

from __future__ import annotations

from compat.adaptation.diagnosis import explanations
from compat.adaptation.diagnosis.diagnose import CODES as ADAPT_CODES
from compat.adaptation.diagnosis.registry import Code

# Code, and why it matters. `adapt` traces code, where these cannot occur or cannot be seen.
ARRAYS_ONLY = {
    "transposed_weight": (
        Code(
            "breaks",
            "{tensors} is used transposed: the checkpoint stores it as [in, out], and GPT-2 "
            "computes x @ weight",
            "y = x @ weight + bias  # or transpose it once when it is loaded",
        ),
        "Hugging Face's GPT-2 stores its projections as Conv1D, [in, out], but nn.Linear and most "
        "other frameworks expect [out, in]. attn.c_proj is square, so that no shape shows it.",
    ),
    "wrong_tap": (
        Code(
            "breaks",
            "the array holds the values of {found}, not those of {expected}",
            "Store {found} under its own name, or rename the array.",
        ),
        "A hidden state that is recorded at another place agrees with nothing, although the model "
        "is right. hidden_states[-1] of transformers, for example, is the result of ln_f, and not "
        "of the last block.",
    ),
    "scaled_tap": (
        Code(
            "breaks",
            "the array holds {found:.6g} times the values of {expected}",
            "Record the value before the factor, or divide the array by {found:.6g}.",
        ),
        "Some implementations multiply a tensor early, such as the queries by 1/√d_head before the "
        "product with the keys. The result can be right, but the array is not the tap.",
    ),
    "qkv_order": (
        Code(
            "breaks",
            "q, k and v hold GPT-2's {found}: the projection is divided in another order",
            "q, k, v = (x @ c_attn.weight + c_attn.bias).split(n_embd)",
        ),
        "The three have the same shape, so that an exchange shows in the numbers only. The columns "
        "of c_attn are all of q, then all of k, then all of v.",
    ),
    "positions_across_rows": (
        Code(
            "breaks",
            "positions continue from one sequence of the batch to the next, but in GPT-2 every "
            "sequence begins at position 0",
            "wpe[t]  # t is the index within the sequence, not within the flattened batch",
        ),
        "A loop over all B · T tokens has one index for both. The position is its remainder after "
        "division by T.",
    ),
}
CODES: dict[str, Code] = {**ADAPT_CODES, **{name: code for name, (code, _) in ARRAYS_ONLY.items()}}


def explain(code: str) -> str:
    """What a deviation is, why it matters, and its fix; as text.

    Raises:
        KeyError: there is no such code.
    """
    if code not in ARRAYS_ONLY:
        return explanations.explain(code)
    entry, why = ARRAYS_ONLY[code]
    return explanations.compose(entry, why)


# `adapt` maps these by their use, so that they do not change its numbers; in arrays they do.
MESSAGES = {
    "qk_swapped": "the queries and the keys are exchanged: q, k and v hold GPT-2's {found}",
    "kv_swapped": "the keys and the values are exchanged: q, k and v hold GPT-2's {found}",
    "head_interleaved_qkv": "the columns of c_attn are read head by head, but Hugging Face stores "
    "all of q, then k, then v",
    "swapped_ln": "the two norms of the block have each other's weights",
    "shared_kv": "the heads are weighted sums of the keys, but in GPT-2 of the values",
}
