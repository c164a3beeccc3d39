"""Deviations of one piece: what a wrong implementation computes in place of GPT-2's formula.

Each is a hypothesis about one piece or several, which is run on the candidate's own arrays. The
codes and messages are those of `adapt`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compat.adaptation.anatomy.norms import NormFormula
from compat.adaptation.diagnosis.attention_formula import AttentionFormula
from compat.adaptation.diagnosis.blocks import CODE_OF
from compat.adaptation.diagnosis.formulas import ACTIVATIONS, canonical_activation
from compat.config import GPT2Config
from compat.errors import listed
from compat.golden_files.pieces import (
    GPT2,
    Piece,
    Run,
    Weights,
    attention_formula,
    linear,
    merge_heads,
    norm,
    probabilities,
    project,
    split_heads,
)

TANH_GELU = "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))"
EPSILONS = (1e-6, 1e-12, 1e-8, 1e-3, 0.0, 1e-5)
ORDERS = ("kqv", "qvk", "vkq", "kvq", "vqk")
CODE_OF_ORDER = {"kqv": "qk_swapped", "qvk": "kv_swapped"}
SPLIT = "q, k, v = (x @ c_attn.weight + c_attn.bias).split(n_embd)"
Values = dict[str, Any]


@dataclass(frozen=True)
class Hypothesis:
    """What the candidate may compute instead.

    Args:
        codes: the deviations, with the values of their texts.
        pieces: those that are replaced, by the name of their tap.
        fix: replaces the fix of the first code.
    """

    codes: list[tuple[str, Values]]
    pieces: Mapping[str, Piece]
    fix: str | None = None


def one(
    code: str, pieces: Mapping[str, Piece], fix: str | None = None, /, **values: Any
) -> Hypothesis:
    return Hypothesis([(code, values)], pieces, fix)


@dataclass(frozen=True)
class Situation:
    """A tap of the candidate that does not follow from the taps before it.

    Args:
        weights: for the pieces.
        tap: such as "h.3.act".
        layer: its layer.
        found: the candidate's array.
        inputs: the candidate's inputs of the piece by tap name without the layer, as far as it has
            them.
        moved: the block whose weights other pieces of the layer use, if it is not their own.
    """

    weights: Weights
    tap: str
    layer: int
    found: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    moved: int | None = None


Generator = Callable[[Situation], Iterator[Hypothesis]]
GENERATORS: dict[str, list[Generator]] = {}


def about(*names: str) -> Callable[[Generator], Generator]:
    """Register hypotheses about the pieces that end at these taps."""

    def register(generator: Generator) -> Generator:
        for name in names:
            GENERATORS.setdefault(name, []).append(generator)
        return generator

    return register


def hypotheses(name: str, situation: Situation) -> Iterator[Hypothesis]:
    """Everything that is known to go wrong in the piece that ends at a tap."""
    for generator in GENERATORS.get(name, []):
        yield from generator(situation)


# Embeddings


@about("embed")
def embeddings(s: Situation) -> Iterator[Hypothesis]:
    config = s.weights.config
    B, T = s.weights.ids.shape

    def embedded(run: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Piece]:
        return {"embed": Piece((), lambda w, i: run(w["token_embedding"], w["wpe.weight"]))}

    yield one("no_pos", embedded(lambda tokens, wpe: tokens))
    root = math.sqrt(config.n_embd)
    for what, token, position in (("token", root, 1.0), ("position", 1.0, root)):
        run = _scaled_sum(token, position)
        yield one("scaled_embedding", embedded(run), what=what, found=root)
    for offset in (*range(1, 5), -1):
        if T + offset <= config.n_positions:
            yield one("pos_offset", embedded(_offset(offset)), found=offset)
    if B * T <= config.n_positions:
        across = embedded(lambda tokens, wpe: tokens + wpe[: B * T].view(B, T, -1))
        yield one("positions_across_rows", across)
    for table in _sinusoids(T, config.n_embd):
        sizes: Values = {"n_positions": config.n_positions, "n_embd": config.n_embd}
        yield one("sinusoidal_pos", embedded(_plus(table)), **sizes)
    for shift, where in ((1, "before"), (-1, "after")):
        found = f"the embedding of each token comes from the token {where} it"
        yield one("time_shift", embedded(_rolled(shift)), found=found)


def _scaled_sum(token: float, position: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, wpe: token * tokens + position * wpe[: tokens.shape[1]]


def _offset(offset: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, wpe: tokens + wpe.roll(-offset, 0)[: tokens.shape[1]]


def _plus(table: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, wpe: tokens + table.to(tokens.dtype)


def _rolled(shift: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, wpe: tokens.roll(shift, 1) + wpe[: tokens.shape[1]]


def _sinusoids(T: int, C: int) -> Iterator[Tensor]:
    """The fixed position embeddings of Vaswani et al. 2017, §3.5, in two orders of channels."""
    rates = 10000 ** (-torch.arange(0, C, 2, dtype=torch.float64) / C)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * rates
    yield torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :C]
    yield torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :C]


# Norms


@about("ln_1", "ln_2", "ln_f")
def norms(s: Situation) -> Iterator[Hypothesis]:
    own = s.tap.rpartition(".")[2]
    kinds = [own] if own in ("ln_1", "ln_2", "ln_f") else ["ln_1", "ln_2", "ln_f"]
    expected, C = s.weights.config.layer_norm_epsilon, s.weights.config.n_embd

    def formula(f: NormFormula) -> dict[str, Piece]:
        return _norm_pieces(kinds, lambda w, name, x: norm(w, name, x, f))

    usual: Values = {"expected": expected, "n_embd": C}
    unbiased = NormFormula(unbiased=True, eps=expected)
    outside = NormFormula(eps=expected, eps_outside=True)
    both = NormFormula(unbiased=True, eps=expected, eps_outside=True)
    rms = NormFormula(centred=False, eps=expected)
    yield one("unbiased_var", formula(unbiased))
    yield one("eps_outside_sqrt", formula(outside), found=expected, **usual)
    together = [("unbiased_var", {}), ("eps_outside_sqrt", {"found": expected, **usual})]
    yield Hypothesis(together, formula(both))
    yield one("rmsnorm", formula(rms), found=expected, **usual)
    scaled_only = _norm_pieces(kinds, lambda w, name, x: rms(x) * w[f"{name}.weight"])
    codes = [("rmsnorm", {"found": expected, **usual}),
             ("no_ln_bias", {"tensors": f"{_norm_name(s)}.bias"})]  # fmt: skip
    yield Hypothesis(codes, scaled_only)
    for eps in (*EPSILONS, *_fitted_eps(s)):
        if abs(eps - expected) > 1e-3 * expected:
            yield one("eps_value", formula(NormFormula(eps=eps)), found=eps, **usual)
            if len(kinds) > 1:  # in the whole model, only one deviation at a time is tried
                continue
            values = {"found": eps, **usual}
            for code, f in (
                ("unbiased_var", NormFormula(unbiased=True, eps=eps)),
                ("rmsnorm", NormFormula(centred=False, eps=eps)),
            ):
                more = [(code, values)] + ([("eps_value", values)] if code != "rmsnorm" else [])
                yield Hypothesis(more, formula(f))
            for unbias in (False, True):
                f = NormFormula(eps=eps, eps_outside=True, unbiased=unbias)
                more = [("eps_outside_sqrt", values)] + ([("unbiased_var", {})] if unbias else [])
                yield Hypothesis(more, formula(f))
    for parts, code in (("bias", "no_ln_bias"), ("weight", "no_ln_weight")):
        yield one(code, _norm_pieces(kinds, _without(parts)), tensors=f"{_norm_name(s)}.{parts}")
    plain = NormFormula(eps=expected)
    pieces = _norm_pieces(kinds, lambda w, name, x: plain(x))
    tensors = {"tensors": f"{_norm_name(s)}.weight and .bias"}
    yield Hypothesis([("no_ln_weight", tensors), ("no_ln_bias", tensors)], pieces)
    for axis, name in ((1, "1 of 3"), (0, "0 of 3")):
        yield one("norm_axis", _norm_pieces(kinds, _over_axis(axis)), found=f"axis {name}")
    yield one("extra_ln", _norm_pieces(kinds, lambda w, n, x: norm(w, n, norm(w, n, x))))
    if own == "ln_f" or kinds != [own]:
        yield one("no_final_ln", {"ln_f": Piece(("last",), lambda w, i, x: x)})
    if own != "ln_f":
        block = {k: v for k, v in _norm_pieces(kinds, lambda w, n, x: x).items() if k != "ln_f"}
        yield one("missing_ln", block, tensors=_norm_name(s))
        yield one(
            "swapped_ln",
            {k: v for k, v in _norm_pieces(kinds, _swapped).items() if k != "ln_f"},
            "Load the weights of ln_1 into the norm before attention, and ln_2 before the MLP.",
        )


def _norm_name(s: Situation) -> str:
    name = s.tap.rpartition(".")[2]
    return s.tap if name in ("ln_1", "ln_2", "ln_f") else "h.0.ln_1"


NormRun = Callable[[Weights, str, Tensor], Tensor]


def _norm_pieces(kinds: list[str], run: NormRun) -> dict[str, Piece]:
    """The norms of these names, computed by `run(weights, name, x)`."""

    def piece(kind: str) -> Piece:
        def named(w: Weights, i: int, x: Tensor) -> Tensor:
            return run(w, kind if kind == "ln_f" else f"h.{i}.{kind}", x)

        return Piece(GPT2[kind].inputs, named)

    return {kind: piece(kind) for kind in kinds}


def _without(part: str) -> Callable[[Weights, str, Tensor], Tensor]:
    def run(w: Weights, name: str, x: Tensor) -> Tensor:
        y = NormFormula(eps=w.config.layer_norm_epsilon)(x)
        return y * w[f"{name}.weight"] if part == "bias" else y + w[f"{name}.bias"]

    return run


def _over_axis(axis: int) -> Callable[[Weights, str, Tensor], Tensor]:
    def run(w: Weights, name: str, x: Tensor) -> Tensor:
        variance = x.var(axis, keepdim=True, unbiased=False)
        y = (x - x.mean(axis, keepdim=True)) / (variance + w.config.layer_norm_epsilon).sqrt()
        return y * w[f"{name}.weight"] + w[f"{name}.bias"]

    return run


def _swapped(w: Weights, name: str, x: Tensor) -> Tensor:
    other = f"{name[:-1]}{'2' if name.endswith('1') else '1'}"
    return norm(w, other, x)


def _fitted_eps(s: Situation) -> list[float]:
    """The eps with which the candidate's norm follows from its input, in four kinds of norms."""
    x = next((s.inputs[name] for name in GPT2.get(s.tap.rpartition(".")[2], GPT2["embed"]).inputs
              if name in s.inputs), None)  # fmt: skip
    if x is None:
        return []
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
    def thirds(run: Callable[[Weights, int, Tensor, int], Tensor], source: str = "ln_1"
               ) -> dict[str, Piece]:  # fmt: skip
        return {name: _third(run, third, source) for third, name in enumerate("qkv")}

    name = f"h.{s.layer}.attn.c_attn"
    for order in ORDERS:
        roles = ["qkv".index(letter) for letter in order]
        found = {"found": f"{order[0]}, {order[1]} and {order[2]}"}
        moved = thirds(_permuted(roles))
        yield Hypothesis([(CODE_OF_ORDER.get(order, "qkv_order"), found)], moved, SPLIT)
    by_head = thirds(_head_by_head)
    fix = "q, k, v = (x @ c_attn.weight + c_attn.bias).split(n_embd); then split each into heads"
    yield one("head_interleaved_qkv", by_head, fix)
    yield one("transposed_weight", thirds(_reshaped_qkv), tensors=f"{name}.weight")
    own = s.tap.rpartition(".")[2]
    part = own if own in ("q", "k", "v") else "q, k and v"
    without = thirds(_qkv_without_bias)
    yield one("no_qkv_bias", without, tensors=f"{name}.bias", part=part)
    skipped = thirds(lambda w, i, x, third: project(w, i, x, third), "x")
    yield one("missing_ln", skipped, tensors=f"h.{s.layer}.ln_1")
    for halves in (True, False):
        rotated = {
            "q": _third(lambda w, i, x, t, h=halves: _rotated(w, project(w, i, x, t), h), 0),
            "k": _third(lambda w, i, x, t, h=halves: _rotated(w, project(w, i, x, t), h), 1),
        }
        yield one("rope", rotated)
    for formula in (_unit_length, _unit_rms):
        normed = {
            "q": _third(lambda w, i, x, t, f=formula: f(w, project(w, i, x, t)), 0),
            "k": _third(lambda w, i, x, t, f=formula: f(w, project(w, i, x, t)), 1),
        }
        yield one("qk_norm", normed)


def _third(run: Callable[..., Tensor], third: int, source: str = "ln_1") -> Piece:
    return Piece((source,), lambda w, i, x: run(w, i, x, third))


def _permuted(roles: list[int]) -> Callable[[Weights, int, Tensor, int], Tensor]:
    return lambda w, i, x, third: project(w, i, x, roles[third])


def _head_by_head(w: Weights, i: int, x: Tensor, third: int) -> Tensor:
    """Columns that are read as q, k and v of the first head, then of the second, and so on."""
    y = linear(w, f"h.{i}.attn.c_attn", x)
    B, T, C = x.shape
    return y.view(B, T, w.config.n_head, 3, w.config.d_head)[..., third, :].reshape(B, T, C)


def _reshaped_qkv(w: Weights, i: int, x: Tensor, third: int) -> Tensor:
    name = f"h.{i}.attn.c_attn"
    weight = w[f"{name}.weight"]
    y = x @ weight.reshape(weight.shape[1], weight.shape[0]).T + w[f"{name}.bias"]
    return y.chunk(3, dim=-1)[third]


def _qkv_without_bias(w: Weights, i: int, x: Tensor, third: int) -> Tensor:
    bias = w[f"h.{i}.attn.c_attn.bias"].chunk(3)[third]
    return project(w, i, x, third) - bias


def _rotated(w: Weights, q: Tensor, halves: bool) -> Tensor:
    """Rotary position embeddings, of halves as in GPT-NeoX or of neighbours as in GPT-J."""
    x = split_heads(w, q)  # (B, H, T, D)
    D = x.shape[-1] // 2 * 2
    rates = 10000 ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * rates
    a, b = (x[..., : D // 2], x[..., D // 2 :]) if halves else (x[..., 0::2], x[..., 1::2])
    turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    joined = torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)
    return merge_heads(joined)


def _unit_length(w: Weights, q: Tensor) -> Tensor:
    return merge_heads(F.normalize(split_heads(w, q), dim=-1))


def _unit_rms(w: Weights, q: Tensor) -> Tensor:
    x = split_heads(w, q)
    return merge_heads(x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


@about("probs", "heads")
def reading_of_qkv(s: Situation) -> Iterator[Hypothesis]:
    """Right q, k and v side by side, which attention divides in another way."""
    H, D = s.weights.config.n_head, s.weights.config.d_head

    def by_head(w: Weights, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The columns as q, k and v of the first head, then of the second, and so on."""
        fused = torch.cat([q, k, v], dim=-1).view(*q.shape[:2], H, 3, D)
        return [part.flatten(-2) for part in fused.unbind(-2)]

    def pieces(read: Callable[..., list[Tensor]]) -> dict[str, Piece]:
        def probs(w: Weights, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = read(w, q, k, v)
            return probabilities(w, q, k, attention_formula(w, i))

        def heads(w: Weights, i: int, probs: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return merge_heads(probs @ split_heads(w, read(w, q, k, v)[2]))

        inputs = ("q", "k", "v")
        return {"probs": Piece(inputs, probs), "heads": Piece(("probs", *inputs), heads)}

    fix = "q, k, v = (x @ c_attn.weight + c_attn.bias).split(n_embd); then split each into heads"
    yield one("head_interleaved_qkv", pieces(by_head), fix)
    for order in ORDERS:
        roles = ["qkv".index(letter) for letter in order]
        found = {"found": f"{order[0]}, {order[1]} and {order[2]}"}
        moved = pieces(lambda w, *x, roles=roles: [x[role] for role in roles])
        yield Hypothesis([(CODE_OF_ORDER.get(order, "qkv_order"), found)], moved, SPLIT)


# The attention pattern


@about("probs")
def attention_patterns(s: Situation) -> Iterator[Hypothesis]:
    config, T = s.weights.config, s.weights.ids.shape[1]
    usual = attention_formula(s.weights, s.layer)
    causal = usual.allowed
    every = torch.ones_like(causal)
    masks = [causal, every, every.tril(1), every.tril(-1), every.triu()]
    scales = [usual.scale, 1.0, config.n_embd**-0.5, 1 / config.d_head]
    scores = None
    if s.tap.endswith("probs") and {"q", "k"} <= s.inputs.keys():
        q, k = (split_heads(s.weights, s.inputs[name]) for name in "qk")
        scores = q @ k.mT
        seen = (s.found > 0).flatten(0, 1).any(0)
        masks = [m for m in [seen, *masks] if m.any()]
        scales += [fitted for fitted in (_fitted_scale(s.found, scores),) if fitted]
    if not config.scale_attn_by_inverse_layer_idx:
        other = replace(config, scale_attn_by_inverse_layer_idx=True)
        by_layer = Piece(("q", "k"), lambda w, i, q, k: _scaled_for(w, i, q, k, other))
        yield one("inverse_layer_scale", {"probs": by_layer})
    for allowed in _distinct(masks):
        for scale in dict.fromkeys(scales):
            for axis, after in ((-1, False), (-1, True), (-2, False), (-3, False)):
                formula = AttentionFormula(allowed, scale, axis, after)
                codes = _codes_of(formula, usual, s.weights)
                # Without q and k, only one deviation at a time is tried.
                if codes and (scores is not None or len(codes) == 1):
                    yield Hypothesis(codes, {"probs": _attention_piece(formula)})
                    if not allowed.any(-1).all():  # a query without a key has no weights
                        yield Hypothesis(codes, {"probs": _attention_piece(formula, blind=0.0)})
    plus_one = Piece(("q", "k"), _with_one_more(usual))
    yield one("other_softmax", {"probs": plus_one}, found="1 is added to the sum of exponentials")
    yield from _shared_or_mixed_heads("probs", s)
    for shift in (1, -1):
        moved = Piece(("q", "k"), _of_moved_keys(usual, shift))
        found = f"each token's key comes from the token {'before' if shift > 0 else 'after'} it"
        yield one("time_shift", {"probs": moved}, found=found)
    for which in ("qk", "q", "k"):
        unsplit = Piece(("q", "k"), _of_unsplit(usual, which))
        yield one("no_head_split_transpose", {"probs": unsplit})
    for axis in (-2, -3):
        formula = AttentionFormula(causal, usual.scale)
        found = {-2: "the queries", -3: "the heads"}[axis]
        run = _masked_before(formula, axis)
        yield one("softmax_dim", {"probs": Piece(("q", "k"), run)}, found=found)
    values = [0.0, -1.0, 1.0, -10.0]
    if scores is not None and T > 1:
        values += _fitted_mask_values(s.found, scores, usual)
    for value in dict.fromkeys(values):
        for added in (False, True):
            piece = Piece(("q", "k"), _soft_mask(usual, value, added))
            yield one("mask_value", {"probs": piece}, found=value)


def _distinct(masks: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for mask in masks:
        if not any(torch.equal(mask, other) for other in found):
            found.append(mask)
    return found


def _attention_piece(formula: AttentionFormula, blind: float | None = None) -> Piece:
    """Attention by a formula; `blind` is the weight of every key where a query has no key."""

    def run(w: Weights, i: int, q: Tensor, k: Tensor) -> Tensor:
        sized = _sized(formula, q)
        probs = probabilities(w, q, k, sized)
        without = ~sized.allowed.any(-1, keepdim=True)
        return probs if blind is None else probs.masked_fill(without, blind)

    return Piece(("q", "k"), run)


def _sized(formula: AttentionFormula, q: Tensor) -> AttentionFormula:
    T = q.shape[1]
    return AttentionFormula(formula.allowed[:T, :T], formula.scale, formula.axis, formula.after)


def _masked_before(formula: AttentionFormula, axis: int) -> Run:
    """A softmax over another axis of scores that are masked as in GPT-2."""

    def run(w: Weights, i: int, q: Tensor, k: Tensor) -> Tensor:
        scores = split_heads(w, q) @ split_heads(w, k).mT * formula.scale
        hidden = ~formula.allowed[: q.shape[1], : q.shape[1]]
        return scores.masked_fill(hidden, -math.inf).softmax(axis).nan_to_num(0.0)

    return run


def _of_unsplit(formula: AttentionFormula, which: str) -> Run:
    """Attention of queries or keys that are split into heads without a transpose."""

    def run(w: Weights, i: int, q: Tensor, k: Tensor) -> Tensor:
        left, right = (
            _unsplit(w, x) if name in which else split_heads(w, x)
            for name, x in zip("qk", (q, k), strict=True)
        )
        return _sized(formula, q).probabilities(left @ right.mT)

    return run


def _scaled_for(w: Weights, i: int, q: Tensor, k: Tensor, config: GPT2Config) -> Tensor:
    formula = AttentionFormula(attention_formula(w, i).allowed, config.attention_scale(i))
    return probabilities(w, q, k, formula)


def _with_one_more(formula: AttentionFormula) -> Run:
    """A softmax with one more key, whose score is 0."""

    def run(w: Weights, i: int, q: Tensor, k: Tensor) -> Tensor:
        scores = split_heads(w, q) @ split_heads(w, k).mT * formula.scale
        scores = scores.masked_fill(~_sized(formula, q).allowed, -math.inf)
        return F.pad(scores, (1, 0)).softmax(-1)[..., 1:]

    return run


def _of_moved_keys(formula: AttentionFormula, shift: int) -> Run:
    return lambda w, i, q, k: probabilities(w, q, _moved(k, shift), _sized(formula, q))


def _moved(x: Tensor, shift: int) -> Tensor:
    """Every token has the values of the one before it, or after it; zeros at the end."""
    empty = torch.zeros_like(x[:, :1])
    return torch.cat([empty, x[:, :-1]] if shift > 0 else [x[:, 1:], empty], dim=1)


def _shared_or_mixed_heads(tap: str, s: Situation) -> Iterator[Hypothesis]:
    """Heads that share keys and values, and heads whose channels are interleaved."""
    H, D = s.weights.config.n_head, s.weights.config.d_head

    def interleaved(w: Weights, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], D, H).permute(0, 3, 1, 2)  # (B, H, T, D)

    def weights_of(w: Weights, i: int, q: Tensor, k: Tensor, index: Tensor | None) -> Tensor:
        formula = _sized(attention_formula(w, i), q)
        if index is not None:
            return formula.probabilities(split_heads(w, q) @ split_heads(w, k)[:, index].mT)
        return formula.probabilities(interleaved(w, q) @ interleaved(w, k).mT)

    def merged(w: Weights, heads: Tensor, mixed: bool) -> Tensor:
        return heads.permute(0, 2, 3, 1).flatten(2) if mixed else merge_heads(heads)

    def mixed_heads(split: bool, merge: bool) -> Run:
        def run(w: Weights, i: int, probs: Tensor, v: Tensor) -> Tensor:
            values = interleaved(w, v) if split else split_heads(w, v)
            return merged(w, probs @ values, merge)

        return run

    def shared_values(index: Tensor) -> Run:
        return lambda w, i, probs, v: merge_heads(probs @ split_heads(w, v)[:, index])

    def shared_keys(index: Tensor | None) -> Run:
        return lambda w, i, q, k: weights_of(w, i, q, k, index)

    heads = torch.arange(H)
    fix = "k and v have as many heads as q: do not repeat them."
    for groups in (g for g in range(1, H) if H % g == 0):
        size = H // groups
        values: Values = {"n_head": H, "found": groups, "n_embd": s.weights.config.n_embd}
        for index in (heads // size * size, heads // size, heads % groups):
            pieces = {
                "probs": Piece(("q", "k"), shared_keys(index)),
                "heads": Piece(("probs", "v"), shared_values(index)),
            }
            yield one("grouped_query_attention", {tap: pieces[tap]}, fix, **values)
    if tap == "probs":
        yield one("interleaved_heads", {"probs": Piece(("q", "k"), shared_keys(None))})
        return
    for split, merge in ((True, True), (False, True), (True, False)):
        yield one("interleaved_heads", {"heads": Piece(("probs", "v"), mixed_heads(split, merge))})


def _soft_mask(formula: AttentionFormula, value: float, added: bool) -> Run:
    """Hidden scores are set to a value, or it is added to them."""

    def run(w: Weights, i: int, q: Tensor, k: Tensor) -> Tensor:
        scores = split_heads(w, q) @ split_heads(w, k).mT * formula.scale
        hidden = ~formula.allowed[: q.shape[1], : q.shape[1]]
        masked = torch.where(hidden, scores + value if added else value, scores)
        return masked.softmax(-1)

    return run


def _fitted_scale(probs: Tensor, scores: Tensor) -> float | None:
    """The factor of the scores, by least squares from the logarithms of probabilities."""
    T = probs.shape[-1]
    used = (probs > 1e-6) & torch.ones(T, T, dtype=torch.bool).tril()
    count = used.sum(-1, keepdim=True)
    if T < 3 or not bool((count > 1).any()):
        return None
    logs = torch.where(used, probs, 1.0).log()
    x, y = (torch.where(used, t, 0.0) for t in (scores, logs))
    x, y = (t - t.sum(-1, keepdim=True) / count.clamp(min=1) for t in (x, y))
    x, y = torch.where(used, x, 0.0), torch.where(used, y, 0.0)
    fitted = ((x * y).sum() / x.square().sum()).item()
    return fitted if math.isfinite(fitted) and fitted > 0 else None


def _fitted_mask_values(
    probs: Tensor, scores: Tensor, formula: AttentionFormula
) -> Iterator[float]:
    """The value to which hidden scores were set, or that was added to them."""
    logs = probs[..., 0, :].clamp(min=1e-300).log()  # the first query sees only itself
    scaled = scores[..., 0, :] * formula.scale
    if (probs[..., 0, 1:] > 1e-12).all():
        yield round((logs - logs[..., :1] + scaled[..., :1])[..., 1:].mean().item(), 4)
        yield round((logs - logs[..., :1] - scaled + scaled[..., :1])[..., 1:].mean().item(), 4)


def _codes_of(
    formula: AttentionFormula, usual: AttentionFormula, weights: Weights
) -> list[tuple[str, Values]]:
    """The deviations of a formula of attention."""
    config, T = weights.config, len(usual.allowed)
    codes: list[tuple[str, Values]] = []
    allowed, scale = formula.allowed, formula.scale
    if abs(scale - usual.scale) > 2e-6 * usual.scale:
        sizes = {"d_head": config.d_head, "n_embd": config.n_embd}
        code = "wrong_scale"
        if abs(scale - 1) < 1e-5:
            code = "no_attn_scale"
        elif abs(scale * math.sqrt(config.n_embd) - 1) < 1e-5:
            code = "scale_by_d_model"
        codes.append((code, {"found": scale, "expected": usual.scale, **sizes}))
    if formula.after:
        codes.append(
            ("mask_after_softmax", {"effect": "so that the probabilities do not sum to one"})
        )
    if formula.axis != -1:
        names = {-2: "the queries", -3: "the heads", -4: "the batch"}
        codes.append(("softmax_dim", {"found": names[formula.axis]}))
    if T > 1 and allowed.all():
        codes.append(("no_mask", {}))
    elif not torch.equal(allowed, usual.allowed):
        width = int(allowed[-1].sum())
        window = torch.ones_like(allowed).tril() & torch.ones_like(allowed).triu(1 - width)
        token = min(5, T - 1)
        if 1 < width < T and torch.equal(allowed, window):
            codes.append(("sliding_window", {"found": width}))
        else:
            codes.append(("mask_off", {"token": token, "found": _attended(allowed[token])}))
    return codes


def _attended(row: Tensor) -> str:
    tokens: list[int] = row.nonzero().flatten().tolist()
    if not tokens:
        return "no token"
    if tokens == list(range(tokens[0], tokens[-1] + 1)):
        return f"tokens {tokens[0]} to {tokens[-1]}"
    return f"tokens {listed([str(token) for token in tokens])}"


# Heads and the output projection


@about("heads")
def heads(s: Situation) -> Iterator[Hypothesis]:
    config = s.weights.config

    def unmerged(w: Weights, i: int, probs: Tensor, v: Tensor) -> Tensor:
        return (probs @ split_heads(w, v)).reshape(v.shape)

    def unsplit_value(w: Weights, i: int, probs: Tensor, v: Tensor) -> Tensor:
        return merge_heads(probs @ _unsplit(w, v))

    def unsplit_all(w: Weights, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _unsplit(w, q) @ _unsplit(w, k).mT
        probs = _sized(attention_formula(w, i), q).probabilities(scores)
        return merge_heads(probs @ _unsplit(w, v))

    def unsplit_and_unmerged(w: Weights, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _unsplit(w, q) @ _unsplit(w, k).mT
        mixed = _sized(attention_formula(w, i), q).probabilities(scores) @ _unsplit(w, v)
        return mixed.reshape(v.shape)

    def keys_as_values(w: Weights, i: int, probs: Tensor, k: Tensor) -> Tensor:
        return merge_heads(probs @ split_heads(w, k))

    def queries(w: Weights, i: int, probs: Tensor, v: Tensor) -> Tensor:
        return merge_heads(probs.mT @ split_heads(w, v))

    yield one("no_head_merge_transpose", {"heads": Piece(("probs", "v"), unmerged)})
    yield one("no_head_split_transpose", {"heads": Piece(("probs", "v"), unsplit_value)})
    yield one("no_head_split_transpose", {"heads": Piece(("q", "k", "v"), unsplit_all)})
    both = {"heads": Piece(("q", "k", "v"), unsplit_and_unmerged)}
    yield Hypothesis([("no_head_split_transpose", {}), ("no_head_merge_transpose", {})], both)
    fix = "heads = probs @ v"
    yield one("shared_kv", {"heads": Piece(("probs", "k"), keys_as_values)}, fix)
    yield one("softmax_dim", {"heads": Piece(("probs", "v"), queries)}, fix, found="the queries")
    yield from _shared_or_mixed_heads("heads", s)
    for shift in (1, -1):
        moved = Piece(("probs", "v"), _of_moved_values(shift))
        found = f"each token's values come from the token {'before' if shift > 0 else 'after'} it"
        yield one("time_shift", {"heads": moved}, found=found)
    for n_head in (1, 2, 4, 6, 8, 12, 16, 20, 25, 32):
        if n_head != config.n_head and config.n_embd % n_head == 0:
            piece = Piece(("q", "k", "v"), _with_heads(n_head))
            yield one("n_head_mismatch", {"heads": piece}, found=n_head, expected=config.n_head)


def _unsplit(w: Weights, x: Tensor) -> Tensor:
    """(B, T, C) reshaped to (B, H, T, D) without a transpose."""
    B, T, C = x.shape
    return x.reshape(B, w.config.n_head, T, C // w.config.n_head)


def _of_moved_values(shift: int) -> Run:
    return lambda w, i, probs, v: merge_heads(probs @ split_heads(w, _moved(v, shift)))


def _with_heads(n_head: int) -> Run:
    def run(w: Weights, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, T, C = q.shape
        q, k, v = (t.reshape(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        usual = attention_formula(w, i)
        scale = usual.scale * math.sqrt(w.config.d_head * n_head / C)
        formula = AttentionFormula(usual.allowed[:T, :T], scale)
        return merge_heads(formula.probabilities(q @ k.mT) @ v)

    return run


@about("attn")
def output_projection(s: Situation) -> Iterator[Hypothesis]:
    name = f"h.{s.layer}.attn.c_proj"

    def module(i: int) -> str:
        return f"h.{i}.attn.c_proj"

    def transposed(w: Weights, i: int, x: Tensor) -> Tensor:
        return x @ w[f"{module(i)}.weight"].T + w[f"{module(i)}.bias"]

    def unmerged(w: Weights, i: int, x: Tensor) -> Tensor:
        return linear(w, module(i), split_heads(w, x).reshape(x.shape))

    def without_bias(w: Weights, i: int, x: Tensor) -> Tensor:
        return x @ w[f"{module(i)}.weight"]

    def reversed_heads(w: Weights, i: int, x: Tensor) -> Tensor:
        return linear(w, module(i), merge_heads(split_heads(w, x).flip(1)))

    order = ", ".join(map(str, reversed(range(s.weights.config.n_head))))
    for code, run, values in (
        ("transposed_weight", transposed, {"tensors": f"{name}.weight"}),
        ("no_proj_bias", without_bias, {"tensors": f"{name}.bias"}),
        ("no_head_merge_transpose", unmerged, {}),
        ("head_order", reversed_heads, {"found": order}),
        ("no_out_proj", lambda w, i, x: x,
         {"tensors": f"{name}.weight", "n_embd": s.weights.config.n_embd}),
    ):  # fmt: skip
        yield one(code, {"attn": Piece(("heads",), run)}, None, **values)


# The MLP


@about("fc", "mlp")
def mlp_projections(s: Situation) -> Iterator[Hypothesis]:
    for tap, module in (("fc", "mlp.c_fc"), ("mlp", "mlp.c_proj")):
        name = f"h.{s.layer}.{module}"
        inputs = GPT2[tap].inputs
        transposed = Piece(inputs, _reshaped(module))
        yield one("transposed_weight", {tap: transposed}, tensors=f"{name}.weight")
        without = Piece(inputs, _without_bias(module))
        yield one("no_mlp_bias", {tap: without}, tensors=f"{name}.bias")
    fc = GPT2["fc"].run
    yield one("missing_ln", {"fc": Piece(("resid_mid",), fc)}, tensors=f"h.{s.layer}.ln_2")
    yield one("parallel_block", {"fc": Piece(("ln_1",), fc)})


def _reshaped(module: str) -> Run:
    """The memory of a weight [in, out] read as [out, in]."""

    def run(w: Weights, i: int, x: Tensor) -> Tensor:
        weight = w[f"h.{i}.{module}.weight"]
        return x @ weight.reshape(weight.shape[1], weight.shape[0]).T + w[f"h.{i}.{module}.bias"]

    return run


def _without_bias(module: str) -> Run:
    return lambda w, i, x: x @ w[f"h.{i}.{module}.weight"]


@about("act")
def activations(s: Situation) -> Iterator[Hypothesis]:
    expected = canonical_activation(s.weights.config)
    known: dict[str, Callable[[Tensor], Tensor]] = dict(ACTIVATIONS)
    if (slope := _leaky_slope(s)) is not None:
        known[f"leaky_relu with slope {slope:.4g}"] = lambda x: F.leaky_relu(x, slope)
    for name, function in known.items():
        if name != expected:
            code = CODE_OF.get(name) if expected == "gelu_new" else None
            fix = TANH_GELU if expected == "gelu_new" else f"Use {expected} as the activation."
            piece = Piece(("fc",), lambda w, i, x, function=function: function(x))
            values = {"found": name, "expected": expected, "fix": fix}
            yield one(code or "other_activation", {"act": piece}, None, **values)


def _leaky_slope(s: Situation) -> float | None:
    """The slope of the activation for negative values, if it is one."""
    if "fc" not in s.inputs:
        return None
    negative = s.inputs["fc"] < -0.1
    if not negative.any():
        return None
    return float(f"{(s.found[negative] / s.inputs['fc'][negative]).median().item():.3g}")


# Residual connections


@about("resid_mid", "out")
def residuals(s: Situation) -> Iterator[Hypothesis]:
    for tap, branch, shortcut, normed in (
        ("resid_mid", "attn", "x", "ln_1"),
        ("out", "mlp", "resid_mid", "ln_2"),
    ):

        def named(w: Weights, i: int, y: Tensor, normed: str = normed) -> Tensor:
            return norm(w, f"h.{i}.{normed}", y)

        alone = Piece((branch,), lambda w, i, y: y)
        yield one("missing_residual", {tap: alone})
        from_norm = Piece((normed, branch), lambda w, i, x, y: x + y)
        yield one("residual_from_norm", {tap: from_norm})
        post = Piece((shortcut, branch), lambda w, i, x, y, named=named: named(w, i, x + y))
        yield one("post_ln", {tap: post})
        after = Piece((shortcut, branch), lambda w, i, x, y, named=named: x + named(w, i, y))
        yield one("norm_on_output", {tap: after})
        for run in (_doubled(2, 2), _doubled(1, 2), _doubled(2, 1)):
            yield one("doubled_residual", {tap: Piece((shortcut, branch), run)})
    past = Piece(("x", "mlp"), lambda w, i, x, y: x + y)
    yield one("missing_residual", {"out": past})


def _doubled(shortcut: int, branch: int) -> Run:
    return lambda w, i, x, y: shortcut * x + branch * y


@about("ln_1", "ln_2")
def norm_inputs(s: Situation) -> Iterator[Hypothesis]:
    second = GPT2["ln_2"].run
    yield one("parallel_block", {"ln_2": Piece(("x",), second)})
    yield one("parallel_block", {"ln_2": Piece(("ln_1",), lambda w, i, y: y)})
    after = Piece(("x", "attn"), lambda w, i, x, y: norm(w, f"h.{i}.ln_1", x + y))
    yield one("post_ln", {"ln_1": after})
    after = Piece(("resid_mid", "mlp"), lambda w, i, x, y: norm(w, f"h.{i}.ln_2", x + y))
    yield one("post_ln", {"ln_2": after})


# The head


@about("logits")
def head(s: Situation) -> Iterator[Hypothesis]:
    logits = GPT2["logits"].run
    yield one("no_final_ln", {"logits": Piece(("last",), logits)})
    for found, function in (
        ("the softmax", lambda x: x.softmax(-1)),
        ("the logarithm of the softmax", lambda x: x.log_softmax(-1)),
    ):
        piece = Piece(("ln_f",), lambda w, i, x, f=function: f(logits(w, i, x)))
        yield one("softmax_output", {"logits": piece}, None, found=found)
    for found, row in (("maximum", lambda x: x.amax(-1, keepdim=True)), ("mean", _mean)):
        lowered = Piece(("ln_f",), lambda w, i, x, r=row: logits(w, i, x) - r(logits(w, i, x)))
        what = f"a subtraction of each row's {found}"
        yield one("changed_logits", {"logits": lowered}, found=what)
    reshaped = Piece(("ln_f",), _reshaped_head)
    yield one("transposed_head", {"logits": reshaped}, tensors=_head_name(s.weights))
    caps = [30.0, 50.0]
    if "ln_f" in s.inputs:
        caps.append(float(f"{s.found.abs().max().item():.3g}"))
    for value in dict.fromkeys(caps):
        soft = Piece(("ln_f",), lambda w, i, x, c=value: c * torch.tanh(logits(w, i, x) / c))
        hard = Piece(("ln_f",), lambda w, i, x, c=value: logits(w, i, x).clamp(-c, c))
        for name, piece in (("a soft cap (tanh)", soft), ("a clamp", hard)):
            yield one("changed_logits", {"logits": piece}, found=f"{name} at {value:g}")
    for shift, where in ((1, "before"), (-1, "after")):
        piece = Piece(("ln_f",), lambda w, i, x, n=shift: logits(w, i, x).roll(n, 1))
        found = f"the logits of each token are those of the token {where} it"
        yield one("time_shift", {"logits": piece}, None, found=found)


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _head_name(w: Weights) -> str:
    return "wte.weight" if w.config.tie_word_embeddings else "lm_head.weight"


def _reshaped_head(w: Weights, i: int, x: Tensor) -> Tensor:
    """The memory of the head [vocabulary, width] read as [width, vocabulary]."""
    weight = w[_head_name(w)]
    return x @ weight.reshape(weight.shape[1], weight.shape[0])


# Weights that were changed without an effect on predictions


@about("embed", "v", "attn", "mlp")
def processed_weights(s: Situation) -> Iterator[Hypothesis]:
    """What TransformerLens makes of a checkpoint by default (`load_and_process_state_dict`)."""

    def centred(run: Run) -> Run:
        def result(w: Weights, i: int, *inputs: Tensor) -> Tensor:
            y = run(w, i, *inputs)
            return y - _mean(y)

        return result

    def bias(w: Weights, i: int) -> Tensor:
        """Of the values, with what the bias of the norm adds to them."""
        return project(w, i, w[f"h.{i}.ln_1.bias"], 2)

    def with_value_bias(w: Weights, i: int, x: Tensor) -> Tensor:
        return linear(w, f"h.{i}.attn.c_proj", x + bias(w, i))

    without = Piece(("ln_1",), lambda w, i, x: project(w, i, x, 2) - bias(w, i))
    yield one("processed_weights", {"v": without}, found="the values have no bias")
    for tap, run in (
        ("embed", GPT2["embed"].run),
        ("attn", with_value_bias),
        ("mlp", GPT2["mlp"].run),
    ):
        found = "the channels of what is written to the residual stream have the mean 0"
        yield one("processed_weights", {tap: Piece(GPT2[tap].inputs, centred(run))}, found=found)


# Precision


@about("q", "k", "v", "probs", "heads", "attn", "fc", "mlp", "logits")
def low_precision(s: Situation) -> Iterator[Hypothesis]:
    """Products of matrices whose factors are rounded first, as GPUs and TPUs do by default."""
    fix = (
        "Compute products in float32: torch.backends.cuda.matmul.allow_tf32 = False, or "
        'jax.config.update("jax_default_matmul_precision", "highest")'
    )
    for found, bits in (("TF32", 10), ("bfloat16", 7)):
        for to_integer in (torch.round, _ties_away, torch.trunc):
            pieces = {
                name: Piece(GPT2[name].inputs, _of_rounded_factors(name, bits, to_integer))
                for name in ("q", "k", "v", "probs", "heads", "attn", "fc", "mlp", "logits")
            }
            yield one("low_precision", pieces, fix, found=found, expected="float32")
    scopes = {None: "one scale", 0: "a scale for each output", 1: "a scale for each input"}
    roundings = [(8, axis, 0, scope) for axis, scope in scopes.items()]
    roundings += [
        (bits, 1, size, f"a scale for {size} inputs") for bits in (8, 4) for size in (32, 64, 128)
    ]
    for bits, axis, size, scope in roundings:
        pieces = {
            name: Piece(GPT2[name].inputs, _of_few_bits(name, bits, axis, size))
            for name in ("q", "k", "v", "attn", "fc", "mlp", "logits")
        }
        yield one("quantized_weights", pieces, found=scope, bits=bits)


def _of_few_bits(name: str, bits: int, axis: int | None, size: int) -> Run:
    """A piece whose matrix is rounded to integers times a scale.

    Args:
        name: of the piece.
        bits: of an integer.
        axis: of [in, out], along which the weights share a scale; None if all do.
        size: the number of inputs that share a scale; 0 stands for a whole axis.
    """
    largest = 2 ** (bits - 1) - 1

    def run(w: Weights, i: int, *inputs: Tensor) -> Tensor:
        def read(label: str) -> Tensor:
            tensor = w.read(label)
            if tensor.ndim != 2 or label == "token_embedding":
                return tensor
            matrix = tensor.T if name == "logits" else tensor  # [in, out]
            parts = matrix.reshape(-1, size, matrix.shape[1]) if size else matrix
            magnitude = parts.abs()
            scale = magnitude.max() if axis is None else magnitude.amax(axis, keepdim=True)
            rounded = ((parts / (scale / largest)).round() * (scale / largest)).view_as(matrix)
            back: Tensor = rounded.T if name == "logits" else rounded
            return back

        return GPT2[name].run(replace(w, read=read), i, *inputs)

    return run


def _of_rounded_factors(name: str, bits: int, to_integer: Callable[[Tensor], Tensor]) -> Run:
    """A piece whose factors have a mantissa of so many bits."""

    def rounded(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        factor = 2.0 ** (bits + 1)
        return torch.ldexp(to_integer(mantissa * factor) / factor, exponent)

    def run(w: Weights, i: int, *inputs: Tensor) -> Tensor:
        def read(label: str) -> Tensor:
            tensor = w.read(label)
            return rounded(tensor) if tensor.ndim == 2 else tensor

        narrow = replace(w, read=read)
        return GPT2[name].run(narrow, i, *(rounded(x) for x in inputs))

    return run


def _ties_away(x: Tensor) -> Tensor:
    return x.sign() * (x.abs() + 0.5).floor()
