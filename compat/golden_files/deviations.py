"""Deviations of pieces and decode steps: what a wrong implementation computes instead of GPT-2.

Each deviation is a hypothesis: a code, and one or more pieces of GPT-2 with a change. `diagnose`
runs it on the candidate's own arrays. The codes and messages are those of `adapt` or of `codes`.

The changes in the first sections are known in advance. In the sections that begin with "Fitted", a
parameter of the change is fitted to the candidate's arrays, such as the positions whose embeddings
were added, the constants of an activation, or the block whose weights a piece uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compat.adaptation.anatomy.norms import NormFormula
from compat.adaptation.diagnosis.activations import (
    ACTIVATIONS,
    activation_code,
    canonical_activation,
)
from compat.adaptation.diagnosis.attention_formula import (
    SOFTMAX_AXES,
    AttentionFormula,
    described_bias,
    mask_code,
    scale_code,
)
from compat.checkpoint.layout import EMBEDDING, HEAD, POSITIONS
from compat.config import GPT2Config
from compat.errors import listed
from compat.golden_files.bounds import fitted_factor
from compat.golden_files.pieces import (
    GPT2,
    TOKENS,
    MissingWeightError,
    Piece,
    Pieces,
    Softmax,
    Weights,
    attention_formula,
    cached_reads,
    chain,
    context,
    each,
    embedding,
    head_name,
    merge_heads,
    normed,
    pattern,
    split_heads,
    split_name,
)
from compat.parity.compare import rms

NORMS, QKV = ["ln_1", "ln_2", "ln_f"], ("q", "k", "v")
PRODUCTS = ["q", "k", "v", "probs", "heads", "attn", "fc", "mlp", "logits"]
TANH_GELU = "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))"
EPSILONS = (1e-6, 1e-12, 1e-8, 1e-3, 0.0, 1e-5)
ORDERS = ("kqv", "qvk", "vkq", "kvq", "vqk")
CODE_OF_ORDER = {"kqv": "qk_swapped", "qvk": "kv_swapped"}
SPLIT = "q, k, v = (x @ c_attn.weight + c_attn.bias).split(n_embd)"
SPLIT_FIRST = f"{SPLIT}; then split each into heads"
UNSHARED = "Use as many heads of k and v as of q, and do not repeat any."
SHOWN = 8  # ids or positions in a message
FEWEST = 16  # the fewest values from which a constant is fitted
NEAR = 1e-3  # the largest relative distance at which a tensor of the checkpoint is identified
BLOCKS = 12  # in checkpoints with more blocks, only the weights of adjacent blocks are tried
NEIGHBOURS = ((1, "before"), (-1, "after"))  # by how many tokens the values are shifted
Values = dict[str, Any]
Codes = list[tuple[str, Values]]


@dataclass(frozen=True)
class Hypothesis:
    """A computation that the candidate may perform instead of GPT-2's.

    Args:
        codes: the deviations, each with the values for the placeholders of its message and fix.
        pieces: the replaced pieces, by the name of their tap.
        fix: replaces the fix of the first code, if it is not None.
    """

    codes: Codes
    pieces: Mapping[str, Piece]
    fix: str | None = None


def one(
    code: str, pieces: Mapping[str, Piece], fix: str | None = None, /, **values: Any
) -> Hypothesis:
    """Return a hypothesis with one code and the values for its placeholders."""
    return Hypothesis([(code, values)], pieces, fix)


@dataclass(frozen=True)
class Proposal:
    """A value that the candidate may have computed instead of GPT-2's.

    Args:
        code: the code of the deviation.
        value: the tensor with this deviation.
        values: the values for the placeholders of the code's message and fix.
    """

    code: str
    value: Tensor
    values: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Situation:
    """A tap of the candidate that does not follow from the taps before it.

    Args:
        weights: the weights of the pieces.
        tap: the name of the tap, such as "h.3.act".
        layer: the layer of the tap.
        found: the candidate's array.
        inputs: the candidate's inputs of the piece that computes the tap, by tap name without the
            layer; empty if one of them is missing.
        moved: the block whose weights other pieces of the layer use, or None if they use their own.
    """

    weights: Weights
    tap: str
    layer: int
    found: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    moved: int | None = None


Generator = Callable[[Situation], Iterator[Hypothesis]]
GENERATORS: dict[str, list[tuple[Generator, bool]]] = {}


def about(*names: str, needs_inputs: bool = False) -> Callable[[Generator], Generator]:
    """Register a generator of hypotheses about the pieces that compute these taps.

    Args:
        names: the names of the taps, without the layer.
        needs_inputs: whether the hypotheses are derived from the inputs of the piece.
    """

    def register(generator: Generator) -> Generator:
        for name in names:
            GENERATORS.setdefault(name, []).append((generator, needs_inputs))
        return generator

    return register


def hypotheses(name: str, situation: Situation) -> Iterator[Hypothesis]:
    """Yield the known deviations of the piece that computes a tap."""
    for generator, needs_inputs in GENERATORS.get(name, []):
        if situation.inputs or not needs_inputs:
            yield from generator(situation)


# Embeddings


@about("embed")
def embeddings(s: Situation) -> Iterator[Hypothesis]:
    config, (B, T) = s.weights.config, s.weights.ids.shape
    root, positions = math.sqrt(config.n_embd), torch.arange(T)

    def embedded(run: Callable[..., Tensor]) -> Pieces:
        """Replace the sum of the token embeddings (B, T, C) and position embeddings (T, C)."""
        return {"embed": Piece((), lambda w, i: run(w[TOKENS], w[POSITIONS][:T]))}

    yield one("no_pos", embedded(lambda tokens, wpe: tokens))
    for what, a, b in (("token", root, 1), ("position", 1, root)):
        pieces = embedded(lambda tokens, wpe, a=a, b=b: a * tokens + b * wpe)
        yield one("scaled_embedding", pieces, what=what, found=root)
    for offset in (*range(1, 5), -1):
        if T + offset <= config.n_positions:
            yield one("pos_offset", {"embed": embedding(positions + offset)}, found=offset)
    if B * T <= config.n_positions:
        across = torch.arange(B * T).view(B, T)
        yield one("positions_across_rows", {"embed": embedding(across)})
    for table in _sinusoids(T, config.n_embd):
        pieces = embedded(lambda tokens, wpe, table=table: tokens + table.to(tokens.dtype))
        sizes: Values = {"n_positions": config.n_positions, "n_embd": config.n_embd}
        yield one("sinusoidal_pos", pieces, **sizes)
    for shift, where in NEIGHBOURS:
        pieces = embedded(lambda tokens, wpe, n=shift: tokens.roll(n, 1) + wpe)
        found = f"the embedding of each token comes from the token {where} it"
        yield one("time_shift", pieces, found=found)


def _sinusoids(T: int, C: int) -> Iterator[Tensor]:
    """Yield the fixed position embeddings of Vaswani et al. 2017, §3.5, in two channel orders."""
    rates = 10000 ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * rates
    yield torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :C]
    yield torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :C]


# Norms


@about(*NORMS)
def norms(s: Situation) -> Iterator[Hypothesis]:
    own = split_name(s.tap)[1]
    kinds = [own] if own in NORMS else NORMS
    in_blocks = [kind for kind in kinds if kind != "ln_f"]
    name = s.tap if own in NORMS else "h.0.ln_1"
    eps, C = s.weights.config.layer_norm_epsilon, s.weights.config.n_embd

    def by(formula: Callable[[Tensor], Tensor]) -> Pieces:
        return {kind: normed(kind, formula) for kind in kinds}

    for found in (eps, *(e for e in (*EPSILONS, *_fitted_eps(s)) if abs(e - eps) > 1e-3 * eps)):
        values: Values = {"found": found, "expected": eps, "n_embd": C}
        plain, unbiased = NormFormula(eps=found), NormFormula(unbiased=True, eps=found)
        outside, rms = replace(plain, eps_outside=True), replace(plain, centred=False)
        other = [("eps_value", values)] if found != eps else []
        if other:
            yield Hypothesis(other, by(plain))
            if len(kinds) > 1:  # in long segments, only one deviation at a time is tried
                continue
        yield Hypothesis([("unbiased_var", {}), *other], by(unbiased))
        yield one("eps_outside_sqrt", by(outside), **values)
        both = [("unbiased_var", {}), ("eps_outside_sqrt", values)]
        yield Hypothesis(both, by(replace(unbiased, eps_outside=True)))
        rmsnorm = {**values, "no_bias": ""}
        yield one("rmsnorm", by(rms), **rmsnorm)
        if not other:
            no_bias = ("no_ln_bias", {"tensors": f"{name}.bias"})
            scaled_only = {kind: no_biases(piece) for kind, piece in by(rms).items()}
            yield Hypothesis([("rmsnorm", rmsnorm), no_bias], scaled_only)
    yield one("no_ln_bias", each(kinds, no_biases), tensors=f"{name}.bias")
    yield one("no_ln_weight", each(kinds, unit_weights), tensors=f"{name}.weight")
    tensors = {"tensors": f"{name}.weight and .bias"}
    neither = each(kinds, lambda norm: no_biases(unit_weights(norm)))
    yield Hypothesis([("no_ln_weight", tensors), ("no_ln_bias", tensors)], neither)
    for axis in (1, 0):
        yield one("norm_axis", by(partial(_normalized, axis, eps)), found=f"axis {axis} of 3")
    yield one("extra_ln", each(kinds, _twice))
    if "ln_f" in kinds:
        yield one("no_final_ln", {"ln_f": _identity("last")})
    if in_blocks:
        missing = {kind: _identity(*GPT2[kind].inputs) for kind in in_blocks}
        yield one("missing_ln", missing, tensors=name)
        fix = "Load ln_1 into the norm before attention, and ln_2 into the norm before the MLP."
        yield one("swapped_ln", each(in_blocks, _with_parameters_of_other_norm), fix)


def _identity(tap: str) -> Piece:
    return Piece((tap,), lambda w, i, x: x)


def _twice(piece: Piece) -> Piece:
    return Piece(piece.inputs, lambda w, i, x: piece.run(w, i, piece.run(w, i, x)))


def _with_parameters_of_other_norm(piece: Piece) -> Piece:
    """Replace the weight and bias of a block's norm by those of its other norm."""
    other = {"ln_1": "ln_2", "ln_2": "ln_1"}
    return piece.renamed(lambda name: re.sub("ln_[12]", lambda match: other[match[0]], name))


def _normalized(axis: int, eps: float, x: Tensor) -> Tensor:
    variance = x.var(axis, keepdim=True, unbiased=False)
    return (x - x.mean(axis, keepdim=True)) / (variance + eps).sqrt()


def _fitted_eps(s: Situation) -> list[float]:
    """Fit the eps with which the candidate's norm follows from its input, for four formulas."""
    if not s.inputs:
        return []
    [x] = s.inputs.values()
    weight, bias = s.weights[f"{s.tap}.weight"], s.weights[f"{s.tap}.bias"]
    used = weight.abs() > 1e-3 * weight.abs().max()
    normed = (s.found - bias)[..., used] / weight[used]
    centred = (x - x.mean(-1, keepdim=True))[..., used]
    root = (centred * normed).sum(-1) / normed.square().sum(-1)
    variances = [x.var(-1, unbiased=False), x.var(-1, unbiased=True)]
    inside = [(root.square() - variance).median().item() for variance in variances]
    outside = [(root - variance.sqrt()).median().item() for variance in variances]
    fitted = [e for e in (*inside, *outside) if math.isfinite(e) and e >= 0]
    return list(dict.fromkeys(float(f"{eps:.3g}") for eps in fitted))


# Projections of attention


@about("q", "k", "v")
def qkv(s: Situation) -> Iterator[Hypothesis]:
    name, own = f"h.{s.layer}.attn.c_attn", split_name(s.tap)[1]
    for order in ORDERS:
        moved = {tap: GPT2[third] for tap, third in zip("qkv", order, strict=True)}
        yield Hypothesis([_in_order(order)], moved, SPLIT)

    def columns_by_head(piece: Piece) -> Piece:
        return piece.with_weights(
            lambda name, x: _by_head(s.weights.config, x) if ".c_attn." in name else x
        )

    yield one("head_interleaved_qkv", each("qkv", columns_by_head), SPLIT_FIRST)
    yield one("transposed_weight", each("qkv", reshaped), tensors=f"{name}.weight")
    part = own if own in ("q", "k", "v") else "q, k and v"
    yield one("no_qkv_bias", each("qkv", no_biases), tensors=f"{name}.bias", part=part)
    skipped = each("qkv", lambda piece: piece.of("x"))
    yield one("missing_ln", skipped, tensors=f"h.{s.layer}.ln_1")
    for code, change in (
        ("rope", partial(_rotated, halves=True)),
        ("rope", partial(_rotated, halves=False)),
        ("qk_norm", lambda q: F.normalize(q, dim=-1)),
        ("qk_norm", lambda q: q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
    ):
        yield one(code, each("qk", partial(_with_heads_changed, change)))


def _in_order(order: str) -> tuple[str, Values]:
    """Return the deviation that q, k and v are in another order, with its values."""
    found = f"{order[0]}, {order[1]} and {order[2]}"
    return CODE_OF_ORDER.get(order, "qkv_order"), {"found": found}


def _by_head(config: GPT2Config, x: Tensor) -> Tensor:
    """Reorder concatenated q, k and v as if they were stored head by head."""
    heads = x.view(*x.shape[:-1], config.n_head, 3, config.d_head)
    return heads.transpose(-3, -2).flatten(-3)


def _with_heads_changed(change: Callable[[Tensor], Tensor], piece: Piece) -> Piece:
    """Apply a change to the heads (B, H, T, D) of the queries or keys."""
    return piece.then(lambda w, q: merge_heads(change(split_heads(w, q))))


def _rotated(x: Tensor, halves: bool) -> Tensor:
    """Apply rotary position embeddings, to halves as in GPT-NeoX or to pairs as in GPT-J."""
    D = x.shape[-1] // 2 * 2
    rates = 10000 ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * rates
    a, b = (x[..., : D // 2], x[..., D // 2 :]) if halves else (x[..., 0::2], x[..., 1::2])
    turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)


@about("probs", "heads")
def reading_of_qkv(s: Situation) -> Iterator[Hypothesis]:
    """Propose that attention splits the concatenation of the arrays q, k and v differently."""
    config = s.weights.config

    def pieces(divide: Callable[..., Sequence[Tensor]]) -> Pieces:
        def probs(w: Weights, i: int, *qkv: Tensor) -> Tensor:
            q, k, _ = divide(*qkv)
            return GPT2["probs"].run(w, i, q, k)

        def heads(w: Weights, i: int, probs: Tensor, *qkv: Tensor) -> Tensor:
            return GPT2["heads"].run(w, i, probs, divide(*qkv)[2])

        return {"probs": Piece(QKV, probs), "heads": Piece(("probs", *QKV), heads)}

    by_head = pieces(lambda *qkv: _by_head(config, torch.cat(qkv, dim=-1)).chunk(3, dim=-1))
    yield one("head_interleaved_qkv", by_head, SPLIT_FIRST)
    for order in ORDERS:
        roles = ["qkv".index(letter) for letter in order]
        moved = pieces(lambda *qkv, roles=roles: [qkv[role] for role in roles])
        yield Hypothesis([_in_order(order)], moved, SPLIT)


# The attention pattern


@about("probs")
def attention_patterns(s: Situation) -> Iterator[Hypothesis]:
    config, T = s.weights.config, s.weights.ids.shape[1]
    usual = attention_formula(s.weights, s.layer)
    causal = usual.allowed
    every = torch.ones_like(causal)
    masks = [causal, every, every.tril(1), every.tril(-1), every.triu()]
    scales = [usual.scale, 1.0, config.n_embd**-0.5, 1 / config.d_head]
    mask_values = [0.0, -1.0, 1.0, -10.0]
    if s.inputs:
        q, k = (split_heads(s.weights, s.inputs[name]) for name in "qk")
        seen = (s.found > 0).flatten(0, 1).any(0)
        masks = [m for m in [seen, *masks] if m.any()]
        scales += [fitted for fitted in (_fitted_scale(s.found, q @ k.mT),) if fitted]
        mask_values += _fitted_mask_values(s.found, q @ k.mT, usual) if T > 1 else []
    if not config.scale_attn_by_inverse_layer_idx:
        by_layer = GPT2["probs"].with_config(scale_attn_by_inverse_layer_idx=True)
        yield one("inverse_layer_scale", {"probs": by_layer})
    for allowed in {mask.numpy().tobytes(): mask for mask in masks}.values():  # distinct masks
        for scale in dict.fromkeys(scales):
            for axis, after in ((-1, False), (-1, True), (-2, False), (-3, False)):
                formula = AttentionFormula(allowed, scale, axis, after)
                codes = _codes_of(formula, usual, s.weights)
                # Without q and k, only one deviation at a time is tried.
                if codes and (s.inputs or len(codes) == 1):
                    yield Hypothesis(codes, {"probs": pattern(_by_formula(formula))})
                    if not allowed.any(-1).all():  # some query attends to no key
                        blind = pattern(_by_formula(formula, blind_to_zero=True))
                        yield Hypothesis(codes, {"probs": blind})
    plus_one = {"probs": pattern(_with_formula(plus_one=True))}
    yield one("other_softmax", plus_one, found="1 is added to the sum of exponentials")
    for index, values in _shared_heads(config):
        shared = pattern(split_k=partial(_selected, index))
        yield one("grouped_query_attention", {"probs": shared}, UNSHARED, **values)
    mixed = pattern(split_q=_interleaved, split_k=_interleaved)
    yield one("interleaved_heads", {"probs": mixed})
    for shift, where in NEIGHBOURS:
        moved = pattern(split_k=partial(_moved, shift))
        found = f"each token's key comes from the token {where} it"
        yield one("time_shift", {"probs": moved}, found=found)
    for split_q, split_k in (
        (_unsplit, _unsplit), (_unsplit, split_heads), (split_heads, _unsplit)
    ):  # fmt: skip
        unsplit = pattern(split_q=split_q, split_k=split_k)
        yield one("no_head_split_transpose", {"probs": unsplit})
    for value in dict.fromkeys(mask_values):
        for softmax in (_with_formula(hidden=value), partial(_with_hidden_lowered, value)):
            yield one("mask_value", {"probs": pattern(softmax)}, found=value)


def _with_formula(**changes: Any) -> Softmax:
    """Return a softmax by GPT-2's formula with changes of its fields."""
    return lambda scores, usual: replace(usual, **changes).probabilities(scores)


def _by_formula(formula: AttentionFormula, blind_to_zero: bool = False) -> Softmax:
    """Return a softmax by a formula, optionally with zeros for queries that attend to no key."""

    def softmax(scores: Tensor, usual: AttentionFormula) -> Tensor:
        T = scores.shape[-1]
        allowed = formula.allowed[..., :T, :T]
        probs = replace(formula, allowed=allowed).probabilities(scores)
        return probs.masked_fill(~allowed.any(-1, keepdim=True), 0) if blind_to_zero else probs

    return softmax


def _with_hidden_lowered(value: float, scores: Tensor, usual: AttentionFormula) -> Tensor:
    scaled = scores * usual.scale
    return torch.where(usual.allowed, scaled, scaled + value).softmax(-1)


# Other ways to split heads: (B, T, C) → (B, H, T, D).


def _moved(shift: int, w: Weights, x: Tensor) -> Tensor:
    """Shift the heads along the tokens, and fill with zeros."""
    empty = torch.zeros_like(x[:, :1])
    moved = torch.cat([empty, x[:, :-1]] if shift > 0 else [x[:, 1:], empty], dim=1)
    return split_heads(w, moved)


def _selected(index: Tensor, w: Weights, x: Tensor) -> Tensor:
    return split_heads(w, x)[:, index]


def _interleaved(w: Weights, x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], -1, w.config.n_head).permute(0, 3, 1, 2)


def _unsplit(w: Weights, x: Tensor) -> Tensor:
    """Split the heads without a transpose."""
    B, T, C = x.shape
    return x.reshape(B, w.config.n_head, T, C // w.config.n_head)


def _shared_heads(config: GPT2Config) -> Iterator[tuple[Tensor, Values]]:
    """Yield the head of k and v that each head of q may use if heads share them."""
    H = config.n_head
    heads = torch.arange(H)
    for groups in (g for g in range(1, H) if H % g == 0):
        size, found = H // groups, f"{groups} head{'s' * (groups > 1)}"
        for index in (heads // size * size, heads // size, heads % groups):
            yield index, {"n_head": H, "found": found, "n_embd": config.n_embd}


def _fitted_scale(probs: Tensor, scores: Tensor) -> float | None:
    """Fit the scale of the scores to the logarithms of the probabilities by least squares."""
    T = probs.shape[-1]
    used = (probs > 1e-6) & torch.ones(T, T, dtype=torch.bool).tril()
    count = used.sum(-1, keepdim=True)
    if T < 3 or not bool((count > 1).any()):
        return None
    logs = torch.where(used, probs, 1.0).log()
    x, y = (torch.where(used, t, 0.0) for t in (scores, logs))
    x, y = (t - t.sum(-1, keepdim=True) / count.clamp(min=1) for t in (x, y))
    x, y = torch.where(used, x, 0.0), torch.where(used, y, 0.0)
    fitted = fitted_factor(y, x)
    return fitted if math.isfinite(fitted) and fitted > 0 else None


def _fitted_mask_values(
    probs: Tensor, scores: Tensor, formula: AttentionFormula
) -> Iterator[float]:
    """Fit the value to which masked scores were set, or that was added to them."""
    logs = probs[..., 0, :].clamp(min=1e-300).log()  # the first query attends to itself only
    scaled = scores[..., 0, :] * formula.scale
    if (probs[..., 0, 1:] > 1e-12).all():
        yield round((logs - logs[..., :1] + scaled[..., :1])[..., 1:].mean().item(), 4)
        yield round((logs - logs[..., :1] - scaled + scaled[..., :1])[..., 1:].mean().item(), 4)


def _codes_of(
    formula: AttentionFormula, usual: AttentionFormula, weights: Weights
) -> list[tuple[str, Values]]:
    """Return the deviations of an attention formula from the usual one."""
    codes: list[tuple[str, Values]] = []
    if abs(formula.scale - usual.scale) > 2e-6 * usual.scale:
        codes.append(scale_code(formula.scale, usual.scale, weights.config, 1e-5))
    if formula.after:
        codes.append(
            ("mask_after_softmax", {"effect": "so that the probabilities do not sum to one"})
        )
    if formula.axis != -1:
        codes.append(("softmax_dim", {"found": SOFTMAX_AXES[formula.axis]}))
    code, values = mask_code(formula.allowed)
    if code is not None:
        codes.append((code, values))
    return codes


# Heads and the output projection


@about("heads")
def heads(s: Situation) -> Iterator[Hypothesis]:
    config = s.weights.config

    def together(probs: Piece, heads: Piece) -> Pieces:
        """Replace both steps of attention: `heads` from q, k and v."""

        def run(w: Weights, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return heads.run(w, i, probs.run(w, i, q, k), v)

        return {"heads": Piece(QKV, run)}

    def unmerged(heads: Tensor) -> Tensor:
        B, H, T, D = heads.shape
        return heads.reshape(B, T, H * D)

    def mixed(heads: Tensor) -> Tensor:
        return heads.permute(0, 2, 3, 1).flatten(2)

    yield one("no_head_merge_transpose", {"heads": context(merge=unmerged)})
    yield one("no_head_split_transpose", {"heads": context(_unsplit)})
    unsplit = pattern(split_q=_unsplit, split_k=_unsplit)
    yield one("no_head_split_transpose", together(unsplit, context(_unsplit)))
    both: Codes = [("no_head_split_transpose", {}), ("no_head_merge_transpose", {})]
    yield Hypothesis(both, together(unsplit, context(_unsplit, unmerged)))
    fix, usual = "heads = probs @ v", GPT2["heads"]
    transposed = Piece(usual.inputs, lambda w, i, probs, v: usual.run(w, i, probs.mT, v))
    yield one("shared_kv", {"heads": usual.of("probs", "k")}, fix)
    yield one("softmax_dim", {"heads": transposed}, fix, found="the queries")
    for index, values in _shared_heads(config):
        shared = context(partial(_selected, index))
        yield one("grouped_query_attention", {"heads": shared}, UNSHARED, **values)
    for interleaved in (
        context(_interleaved, mixed), context(merge=mixed), context(_interleaved)
    ):  # fmt: skip
        yield one("interleaved_heads", {"heads": interleaved})
    for shift, where in NEIGHBOURS:
        found = f"each token's values come from the token {where} it"
        yield one("time_shift", {"heads": context(partial(_moved, shift))}, found=found)
    whole = together(GPT2["probs"], usual)["heads"]
    for n_head in (1, 2, 4, 6, 8, 12, 16, 20, 25, 32):
        if n_head != config.n_head and config.n_embd % n_head == 0:
            other = {"heads": whole.with_config(n_head=n_head)}
            yield one("n_head_mismatch", other, found=n_head, expected=config.n_head)


@about("attn")
def output_projection(s: Situation) -> Iterator[Hypothesis]:
    attn, config = GPT2["attn"], s.weights.config
    weight, bias = (f"h.{s.layer}.attn.c_proj.{part}" for part in ("weight", "bias"))
    unmerged = attn.before(lambda w, x: split_heads(w, x).reshape(x.shape))
    backwards = attn.before(lambda w, x: merge_heads(split_heads(w, x).flip(1)))
    order = ", ".join(map(str, reversed(range(config.n_head))))
    yield one("transposed_weight", {"attn": reshaped(attn)}, tensors=weight)
    yield one("no_proj_bias", {"attn": no_biases(attn)}, tensors=bias)
    yield one("no_head_merge_transpose", {"attn": unmerged})
    yield one("head_order", {"attn": backwards}, found=order)
    yield one("no_out_proj", {"attn": _identity("heads")}, tensors=weight, n_embd=config.n_embd)


# The MLP


@about("fc", "mlp")
def mlp_projections(s: Situation) -> Iterator[Hypothesis]:
    for tap, module in (("fc", "mlp.c_fc"), ("mlp", "mlp.c_proj")):
        name = f"h.{s.layer}.{module}"
        yield one("transposed_weight", each([tap], reshaped), tensors=f"{name}.weight")
        yield one("no_mlp_bias", each([tap], no_biases), tensors=f"{name}.bias")
    unnormed = {"fc": GPT2["fc"].of("resid_mid")}
    yield one("missing_ln", unnormed, tensors=f"h.{s.layer}.ln_2")
    yield one("parallel_block", {"fc": GPT2["fc"].of("ln_1")})


@about("act")
def activations(s: Situation) -> Iterator[Hypothesis]:
    expected = canonical_activation(s.weights.config)
    known: dict[str, Callable[[Tensor], Tensor]] = dict(ACTIVATIONS)
    if (slope := _leaky_slope(s)) is not None:
        known[f"leaky_relu with slope {slope:.4g}"] = lambda x: F.leaky_relu(x, slope)
    for name, function in known.items():
        if name != expected:
            fix = TANH_GELU if expected == "gelu_new" else f"Use {expected} as the activation."
            piece = Piece(("fc",), lambda w, i, x, function=function: function(x))
            values = {"found": name, "expected": expected, "fix": fix}
            yield one(activation_code(name, expected), {"act": piece}, None, **values)


def _leaky_slope(s: Situation) -> float | None:
    """Measure the slope of the activation for negative inputs."""
    if not s.inputs or not (negative := s.inputs["fc"] < -0.1).any():
        return None
    return float(f"{(s.found[negative] / s.inputs['fc'][negative]).median().item():.3g}")


# Residual connections


@about("resid_mid", "out")
def residuals(s: Situation) -> Iterator[Hypothesis]:
    for tap, norm in (("resid_mid", "ln_1"), ("out", "ln_2")):
        total, (shortcut, branch) = GPT2[tap], GPT2[tap].inputs
        yield one("missing_residual", {tap: _identity(branch)})
        yield one("residual_from_norm", {tap: total.of(norm, branch)})
        yield one("post_ln", {tap: _normed_sum(norm, shortcut, branch)})
        yield one("norm_on_output", {tap: _sum_with_normed(norm, shortcut, branch)})
        for a, b in ((2, 2), (1, 2), (2, 1)):
            doubled = Piece(total.inputs, lambda w, i, x, y, a=a, b=b: a * x + b * y)
            found = f"the sum is {a} · x + {b} · branch(x), as if x had been changed in place"
            yield one("doubled_residual", {tap: doubled}, found=found)
    yield one("missing_residual", {"out": GPT2["out"].of("x", "mlp")})


def _normed_sum(norm: str, shortcut: str, branch: str) -> Piece:
    return Piece((shortcut, branch), lambda w, i, x, y: GPT2[norm].run(w, i, x + y))


def _sum_with_normed(norm: str, shortcut: str, branch: str) -> Piece:
    return Piece((shortcut, branch), lambda w, i, x, y: x + GPT2[norm].run(w, i, y))


@about("ln_1", "ln_2")
def norm_inputs(s: Situation) -> Iterator[Hypothesis]:
    yield one("parallel_block", {"ln_2": GPT2["ln_2"].of("x")})
    yield one("parallel_block", {"ln_2": _identity("ln_1")})
    yield one("post_ln", {"ln_1": _normed_sum("ln_1", "x", "attn")})
    yield one("post_ln", {"ln_2": _normed_sum("ln_2", "resid_mid", "mlp")})


# The head


@about("logits")
def head(s: Situation) -> Iterator[Hypothesis]:
    logits = GPT2["logits"]

    def changed(change: Callable[..., Tensor]) -> Pieces:
        return {"logits": logits.then(lambda w, x: change(x))}

    yield one("no_final_ln", {"logits": logits.of("last")})
    softmax, log_softmax = changed(lambda x: x.softmax(-1)), changed(lambda x: x.log_softmax(-1))
    yield one("softmax_output", softmax, found="the softmax")
    yield one("softmax_output", log_softmax, found="the logarithm of the softmax")
    lowered = changed(lambda x: x - x.amax(-1, keepdim=True))
    yield one("changed_logits", lowered, found="a subtraction of each row's maximum")
    yield one("changed_logits", changed(_centred), found="a subtraction of each row's mean")
    tensors = head_name(s.weights.config)
    yield one("transposed_head", {"logits": reshaped(logits)}, tensors=tensors)
    largest = [float(f"{s.found.abs().max().item():.3g}")] if s.inputs else []
    for cap in dict.fromkeys([30.0, 50.0, *largest]):
        soft = changed(lambda x, c=cap: c * torch.tanh(x / c))
        yield one("changed_logits", soft, found=f"a soft cap (tanh) at {cap:g}")
        hard = changed(lambda x, c=cap: x.clamp(-c, c))
        yield one("changed_logits", hard, found=f"a clamp at {cap:g}")
    for shift, where in NEIGHBOURS:
        found = f"the logits of each token are those of the token {where} it"
        yield one("time_shift", changed(lambda x, n=shift: x.roll(n, 1)), found=found)


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


# Weights that were changed


def no_biases(piece: Piece) -> Piece:
    return piece.with_weights(lambda name, x: torch.zeros_like(x) if name.endswith(".bias") else x)


def unit_weights(piece: Piece) -> Piece:
    return piece.with_weights(lambda name, x: torch.ones_like(x) if name.endswith(".weight") else x)


def reshaped(piece: Piece) -> Piece:
    """Reinterpret the memory of a piece's matrix [in, out] as [out, in]."""
    return piece.with_weights(lambda name, x: x.reshape(x.shape[::-1]).T if x.ndim == 2 else x)


@about("embed", "v", "attn", "mlp")
def processed_weights(s: Situation) -> Iterator[Hypothesis]:
    """Propose the default weight processing of TransformerLens (`load_and_process_state_dict`)."""

    def value_bias(w: Weights, i: int) -> Tensor:
        """Return the bias of the values, plus the projected bias of the norm."""
        return GPT2["v"].run(w, i, w[f"h.{i}.ln_1.bias"])

    def unbiased(w: Weights, i: int, x: Tensor) -> Tensor:
        return GPT2["v"].run(w, i, x) - value_bias(w, i)

    def biased(w: Weights, i: int, x: Tensor) -> Tensor:
        return GPT2["attn"].run(w, i, x + value_bias(w, i))

    values = {"v": Piece(("ln_1",), unbiased)}
    yield one("processed_weights", values, found="the values have no bias")
    for tap, piece in (
        ("embed", GPT2["embed"]), ("attn", Piece(("heads",), biased)), ("mlp", GPT2["mlp"])
    ):  # fmt: skip
        found = "what is added to the residual stream has the mean 0 over its channels"
        centred = piece.then(lambda w, x: _centred(x))
        yield one("processed_weights", {tap: centred}, found=found)


# Precision


@about(*PRODUCTS)
def low_precision(s: Situation) -> Iterator[Hypothesis]:
    """Propose matrix products of rounded operands, as on GPUs and TPUs by default."""
    fix = (
        "Compute products in float32: torch.backends.cuda.matmul.allow_tf32 = False, or "
        'jax.config.update("jax_default_matmul_precision", "highest")'
    )
    for found, bits in (("TF32", 10), ("bfloat16", 7)):
        for to_integer in (torch.round, _ties_away, torch.trunc):
            narrow = partial(_with_mantissa, bits, to_integer)
            pieces = each(PRODUCTS, partial(_with_rounded_operands, narrow))
            yield one("low_precision", pieces, fix, found=found, expected="float32")
    matrices = [name for name in PRODUCTS if name not in ("probs", "heads")]
    for bits, axis, size, scope in (
        (8, None, 0, "one scale"),
        (8, 0, 0, "one scale for each output"),
        (8, 1, 0, "one scale for each input"),
        *((b, 1, n, f"one scale for each {n} inputs") for b in (8, 4) for n in (32, 64, 128)),
    ):
        change = partial(_quantized, bits, axis, size)
        pieces = each(matrices, lambda piece, change=change: piece.with_weights(change))
        yield one("quantized_weights", pieces, found=scope, bits=bits)


def _quantized(bits: int, axis: int | None, size: int, name: str, tensor: Tensor) -> Tensor:
    """Quantize a matrix to integers times a scale, and return the dequantized matrix.

    Args:
        bits: the width of the integers.
        axis: the axis of [in, out] along which weights share a scale; None if all weights do.
        size: the number of inputs that share a scale, or 0 for the whole axis.
        name: the name of the tensor.
        tensor: a tensor of the checkpoint; vectors are returned unchanged.
    """
    if tensor.ndim != 2:
        return tensor
    is_head = name in (EMBEDDING, HEAD)
    matrix = tensor.T if is_head else tensor  # [in, out]
    parts = matrix.reshape(-1, size, matrix.shape[1]) if size else matrix
    magnitude = parts.abs()
    scale = magnitude.max() if axis is None else magnitude.amax(axis, keepdim=True)
    scale = scale / (2 ** (bits - 1) - 1)
    rounded: Tensor = ((parts / scale).round() * scale).view_as(matrix)
    return rounded.mT if is_head else rounded


def _with_rounded_operands(narrow: Callable[[Tensor], Tensor], piece: Piece) -> Piece:
    narrowed = piece.before(lambda w, x: narrow(x))
    return narrowed.with_weights(lambda name, x: narrow(x) if x.ndim == 2 else x)


def _with_mantissa(bits: int, to_integer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Round numbers to a mantissa of `bits` bits."""
    mantissa, exponent = torch.frexp(x)
    factor = 2.0 ** (bits + 1)
    return torch.ldexp(to_integer(mantissa * factor) / factor, exponent)


def _ties_away(x: Tensor) -> Tensor:
    return x.sign() * (x.abs() + 0.5).floor()


# Fitted: the rows of the embeddings


@about("embed")
def rows_of_embeddings(s: Situation) -> Iterator[Hypothesis]:
    """Propose other rows of wpe.weight or of wte.weight, if only one of the summands is wrong."""
    if s.tap != "embed":
        return
    tokens, wpe, T = s.weights[TOKENS], s.weights[POSITIONS], s.found.shape[1]
    positions = _nearest(s.found - tokens, wpe)  # (B, T)
    rows = positions[:1] if bool((positions == positions[:1]).all()) else positions
    yield one(
        "position_ids",
        {"embed": embedding(positions)},
        found=_shown(rows),
        expected=_shown(torch.arange(T)),
    )
    try:
        table = s.weights.read(EMBEDDING)
        id_of_row = torch.arange(len(table))
    except MissingWeightError:  # only the rows of the file's ids are available
        table, id_of_row = tokens.flatten(0, 1), s.weights.ids.flatten()
    nearest = _nearest(s.found - wpe[:T], table)
    others = table[nearest].to(tokens.dtype)
    yield one(
        "other_ids",
        {"embed": Piece((), lambda w, i: others + wpe[:T])},
        found=_described(id_of_row[nearest], s.weights.ids),
    )


def _nearest(rows: Tensor, table: Tensor) -> Tensor:
    """Return the index (B, T) of the row of a table (N, C) that is nearest to each of (B, T, C)."""
    return torch.cdist(rows.float(), table.float()).argmin(-1)


def _shown(numbers: Tensor) -> str:
    """Return the first numbers of each row as text: "0, 2, 3, … | 4, 5, 6, …"."""
    rows = numbers.reshape(-1, numbers.shape[-1])[:2].tolist()
    return " | ".join(
        ", ".join(map(str, row[:SHOWN])) + (", …" if len(row) > SHOWN else "") for row in rows
    )


def _described(found: Tensor, ids: Tensor) -> str:
    """Describe which ids (B, T) were used instead of the right ones."""
    rows = [row.tolist() for row in ids]
    order = [rows.index(row) if (row := mine.tolist()) in rows else -1 for mine in found]
    if -1 not in order:
        names = listed([str(b) for b in order]), listed([str(b) for b in range(len(ids))])
        return f"the sequences {names[0]} instead of {names[1]}"
    offset = int(found[0, 0] - ids[0, 0])
    if torch.equal(found, ids + offset):
        return f"each id {'plus' if offset > 0 else 'minus'} {abs(offset)}"
    return f"the ids {_shown(found)} instead of {_shown(ids)}"


# Fitted: the constants of an activation


@about("act", needs_inputs=True)
def constants_of_gelu(s: Situation) -> Iterator[Hypothesis]:
    """Propose GELU approximated by tanh or a sigmoid, with constants that are not GPT-2's."""
    x, y = s.inputs["fc"].flatten(), s.found.flatten()
    share = y / x  # Φ(x) in GELU(x) = x · Φ(x)
    used = (x.abs() > 0.05) & (x.abs() < 4) & (share > 0.02) & (share < 0.98)
    if used.sum() < FEWEST:
        return
    x, share = x[used], share[used]
    powers = torch.stack([x, x**2, x**3], dim=-1)
    fitted = torch.linalg.lstsq(powers, torch.atanh(2 * share - 1)[:, None]).solution[:, 0]
    terms = [float(f"{c:.6g}") if abs(c) > 1e-5 else 0.0 for c in fitted.tolist()]

    def tanh_gelu(w: Weights, i: int, x: Tensor) -> Tensor:
        inner = terms[0] * x + terms[1] * x**2 + terms[2] * x**3
        return 0.5 * x * (1 + torch.tanh(inner))

    root = math.sqrt(2 / math.pi)
    other = canonical_activation(s.weights.config)
    gelu_new = other == "gelu_new"
    values: Values = {
        "found": _formula(*terms),
        "expected": _formula(root, 0, 0.044715 * root) if gelu_new else other,
    }
    fix = TANH_GELU if gelu_new else f"Use {values['expected']} as the activation."
    yield one("gelu_constants", {"act": Piece(("fc",), tanh_gelu)}, fix, **values)
    slope = float(f"{fitted_factor(torch.logit(share), x):.6g}")
    sigmoid = Piece(("fc",), lambda w, i, x: x * torch.sigmoid(slope * x))
    values = {**values, "found": f"x·sigmoid({slope:g}·x)"}
    yield one("gelu_constants", {"act": sigmoid}, fix, **values)


def _formula(root: float, square: float, cube: float) -> str:
    """Write tanh GELU with these coefficients of x, x² and x³ in its usual form."""
    powers = zip((square, cube), ("x²", "x³"), strict=True)
    terms = ["x", *(f"{c / root:.5g}·{power}" for c, power in powers if c and root)]
    inner = f"({' + '.join(terms)})" if len(terms) > 1 else "x"
    return f"0.5·x·(1 + tanh({root:.6g}·{inner}))"


# Fitted: the block whose weights are used


@about("ln_1", "ln_2", "q", "k", "v", "attn", "fc", "mlp", needs_inputs=True)
def other_blocks(s: Situation) -> Iterator[Hypothesis]:
    kind = split_name(s.tap)[1]
    if s.moved is not None:
        tried = [s.moved]
    elif (n_layer := s.weights.config.n_layer) <= BLOCKS:
        tried = [j for j in range(n_layer) if j != s.layer]
    else:
        tried = [j for j in (s.layer - 1, s.layer + 1, 0) if 0 <= j < n_layer and j != s.layer]
    for j in tried:
        for part in ("", "weight", "bias"):
            rename = partial(_in_block, j, part)
            pieces = each([kind], lambda piece, rename=rename: piece.renamed(rename))
            yield one("other_block", pieces, other=j, part_of=part)


def _in_block(j: int, part: str, name: str) -> str:
    """Return the name of the same parameter in block j, if the name ends with `part`."""
    return re.sub(r"^h\.\d+\.", f"h.{j}.", name) if name.endswith(part) else name


# Fitted: vectors and factors of projections, sums and heads


@about("q", "k", "v", "attn", "fc", "mlp", "logits", needs_inputs=True)
def other_biases(s: Situation) -> Iterator[Hypothesis]:
    """Propose a vector that is added to the result at every token."""
    kind = split_name(s.tap)[1]
    try:
        plain = GPT2[kind].run(s.weights, s.layer, *s.inputs.values())
    except MissingWeightError:
        return
    rest = (s.found - plain).flatten(0, -2)
    if len(rest) < FEWEST:
        return
    shift = rest.mean(0)
    yield one("other_bias", {kind: GPT2[kind].then(lambda w, y: y + shift)}, tensors=s.tap)


@about("resid_mid", "out", needs_inputs=True)
def weights_of_sums(s: Situation) -> Iterator[Hypothesis]:
    kind = split_name(s.tap)[1]
    terms = torch.stack([term.flatten() for term in s.inputs.values()], dim=-1)
    fitted = torch.linalg.lstsq(terms, s.found.flatten()[:, None]).solution[:, 0].tolist()
    a, b = (float(f"{c:.6g}") for c in fitted)
    if not math.isclose(a, b, rel_tol=1e-5):  # a common factor is another deviation
        piece = Piece(GPT2[kind].inputs, lambda w, i, x, y: a * x + b * y)
        yield one("residual_weights", {kind: piece}, found=f"{a:g}", branch=f"{b:g}")


@about("heads", needs_inputs=True)
def order_of_heads(s: Situation) -> Iterator[Hypothesis]:
    expected = s.inputs["probs"] @ split_heads(s.weights, s.inputs["v"])  # (B, H, T, D)
    found = split_heads(s.weights, s.found)
    mine, theirs = (t.transpose(0, 1).flatten(1) for t in (found, expected))
    order = torch.cdist(mine, theirs).argmin(-1)
    text = ", ".join(map(str, order.tolist()))
    reordered = context(merge=lambda heads: merge_heads(heads[:, order]))
    yield one("head_order", {"heads": reordered}, found=text)


# Fitted: the parameters of a norm


@about(*NORMS, needs_inputs=True)
def parameters_of_norms(s: Situation) -> Iterator[Hypothesis]:
    """Propose norms whose weight or bias, fitted by least squares, is another tensor."""
    [x], name, own = s.inputs.values(), s.tap, split_name(s.tap)[1]
    normed = NormFormula(eps=s.weights.config.layer_norm_epsilon)(x).flatten(0, -2)
    y = s.found.flatten(0, -2)
    if len(y) < FEWEST:
        return
    centred = normed - normed.mean(0)
    slope = (centred * y).sum(0) / centred.square().sum(0)
    shift = y.mean(0) - slope * normed.mean(0)
    n_layer = s.weights.config.n_layer
    norms = ["ln_f", *(f"h.{i}.{kind}" for i in range(n_layer) for kind in ("ln_1", "ln_2"))]
    norms = [name, *(other for other in norms if other != name)]
    weights = {f"{n}.weight": s.weights[f"{n}.weight"] for n in norms}
    weights |= {"1 + weight": 1 + weights[f"{name}.weight"], "1": torch.ones_like(slope)}
    biases = {f"{n}.bias": s.weights[f"{n}.bias"] for n in norms} | {"0": torch.zeros_like(shift)}
    scale, offset = _same(slope, weights), _same(shift, biases)
    if scale is None or offset is None:
        return
    wrong = {part: found for part, found in (("weight", scale), ("bias", offset))
             if found != f"{name}.{part}"}  # fmt: skip
    if not wrong:
        return
    parameters = {f"{name}.weight": weights[scale], f"{name}.bias": biases[offset]}
    piece = GPT2[own].with_weights(lambda tensor, _: parameters[tensor])
    found = listed([_relative(found, name) for found in wrong.values()])
    tensors = listed([f"{name}.{part}" for part in wrong])
    yield one("norm_parameters", {own: piece}, found=found, tensors=tensors)


def _same(found: Tensor, known: Mapping[str, Tensor]) -> str | None:
    """Return the name of the tensor that equals a fitted one, or None."""
    for name, tensor in known.items():
        if rms(found - tensor) <= NEAR * max(rms(found), rms(tensor)):
            return name
    return None


def _relative(found: str, own: str) -> str:
    """Shorten a name in the same block: "ln_1.bias of the same block" for "h.3.ln_1.bias"."""
    layer, kind = split_name(own)
    inside = found.removeprefix(f"h.{layer}.")
    return f"{inside} of the same block" if inside != found and kind != "ln_f" else found


# Fitted: masks and biases of attention


@about("probs", needs_inputs=True)
def measured_patterns(s: Situation) -> Iterator[Hypothesis]:
    """Propose masks that differ between sequences, and biases by distance (ALiBi)."""
    usual = attention_formula(s.weights, s.layer)
    q, k = (split_heads(s.weights, s.inputs[name]) for name in "qk")
    scores = q @ k.mT * usual.scale
    seen = (s.found > 0).any(1, keepdim=True)  # (B, 1, T, T)
    if bool((seen != seen[:1]).any()):
        b, _, t, _ = (seen != usual.allowed).nonzero()[0].tolist()
        hidden = (usual.allowed & ~seen[b, 0])[t].nonzero().flatten().tolist()
        found = listed([str(j) for j in hidden]) or "later tokens too"
        by_row = _by_formula(replace(usual, allowed=seen), blind_to_zero=True)
        values: Values = {"row": b, "token": t, "found": found}
        yield one("padding_mask", {"probs": pattern(by_row)}, **values)
    bias = _bias_by_distance(s.found, scores)  # (H, T)
    T = bias.shape[-1]
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)  # (T, T)
    bias = bias[:, distance]  # (H, T, T)
    biased = pattern(_with_formula(bias=bias))
    yield one("position_bias", {"probs": biased}, found=described_bias(bias))


def _bias_by_distance(probs: Tensor, scores: Tensor) -> Tensor:
    """Return the bias (H, T) that is added to the scores at each distance, 0 at distance 0."""
    T = probs.shape[-1]
    log = probs.clamp(min=1e-300).log() - scores  # up to a constant for each query
    bias = torch.zeros(probs.shape[1], T, dtype=probs.dtype)
    own = log.diagonal(dim1=-2, dim2=-1)  # (B, H, T)
    for distance in range(1, T):
        there = log.diagonal(-distance, -2, -1) - own[..., distance:]
        used = probs.diagonal(-distance, -2, -1) > 1e-6
        total = torch.where(used, there, 0.0).sum((0, 2))
        bias[:, distance] = total / used.sum((0, 2)).clamp(min=1)
    return bias


# Decode steps through a KV cache, if the forward pass without a cache is right


def step_logits(weights: Weights, steps: Tensor, values: Values) -> Iterator[Proposal]:
    """Yield the logits (B, N, V) of the decode steps under each known deviation.

    Args:
        weights: the weights of the checkpoint, and the ids before the decode steps.
        steps: the ids (B, N) of the decode steps.
        values: the values for the placeholders of the code's message and fix.

    Raises:
        MissingWeightError: a weight is not available.
    """
    (_, T), N = weights.ids.shape, steps.shape[1]
    ids = torch.cat([weights.ids, steps], dim=1)
    extended = replace(weights, ids=ids, read=cached_reads(weights.read, ids), dtype=torch.float32)
    for found, pieces in _deviations_of_steps(extended, T, N):
        for tap, value in chain(extended, {**GPT2, **pieces}):
            if tap == "logits":
                yield Proposal("kv_cache", value[:, T:].double(), {**values, "found": found})


def _deviations_of_steps(w: Weights, T: int, N: int) -> Iterator[tuple[str, Pieces]]:
    past, n = torch.arange(T), torch.arange(N)
    for found, positions in (
        ("every step has position 0", 0 * n),
        (f"every step has position {T}", T + 0 * n),
        ("the positions of the steps start at 0 again", n),
        (f"the first step has position {T - 1}, but in GPT-2 position {T}", T - 1 + n),
        (f"the first step has position {T + 1}, but in GPT-2 position {T}", T + 1 + n),
    ):
        if positions.max() < w.config.n_positions:
            yield found, {"embed": embedding(torch.cat([past, positions]))}
    if T + N < w.config.n_positions:
        found = "with a cache, the positions start at 1"
        yield found, {"embed": embedding(1 + torch.cat([past, T + n]))}
    usual = attention_formula(w, 0).allowed  # (T + N, T + N)
    own = torch.eye(T + N, dtype=torch.bool)
    row, column = torch.arange(T + N)[:, None], torch.arange(T + N)
    step = row >= T
    for found, hidden in (
        ("a step attends to itself only", step),
        ("a step attends to the prompt and to itself, but not to earlier steps",
         step & (column >= T)),
        ("a step attends to the steps only, and not to the prompt", step & (column < T)),
        ("a step does not attend to the first token", step & (column == 0)),
        ("a step does not attend to the last token of the prompt", step & (column == T - 1)),
    ):  # fmt: skip
        yield found, {"probs": pattern(_with_formula(allowed=usual & (~hidden | own)))}
    for token, found in ((0, "the first token"), (T - 1, "the last token of the prompt")):
        yield f"the keys and values of {found} are 0 in the cache", _with_zeros(T, token)


def _with_zeros(T: int, token: int) -> Pieces:
    """Replace the key and value of a token by zeros, for the queries from position T on."""

    def without(w: Weights, x: Tensor) -> Tensor:
        return split_heads(w, x.index_fill(1, torch.tensor([token]), 0.0))

    def in_steps(changed: Piece, usual: Piece, axis: int) -> Piece:
        def run(w: Weights, i: int, *inputs: Tensor) -> Tensor:
            before, after = (piece.run(w, i, *inputs) for piece in (usual, changed))
            return torch.cat(
                [before.narrow(axis, 0, T), after.narrow(axis, T, after.shape[axis] - T)], axis
            )

        return Piece(usual.inputs, run)

    return {
        "probs": in_steps(pattern(split_k=without), GPT2["probs"], 2),
        "heads": in_steps(context(without), GPT2["heads"], 1),
    }
