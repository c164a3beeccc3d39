"""Deviations whose parameters are measured on the candidate's own arrays.

Examples are the positions whose embeddings were added, the constants of an activation, and the
block whose weights a piece uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from compat.adaptation.anatomy.norms import NormFormula
from compat.adaptation.diagnosis.attention import described_bias
from compat.adaptation.diagnosis.attention_formula import AttentionFormula
from compat.adaptation.diagnosis.formulas import canonical_activation
from compat.errors import listed
from compat.golden_files.deviations import (
    NORMS,
    TANH_GELU,
    Hypothesis,
    Situation,
    Values,
    about,
    masked,
    one,
)
from compat.golden_files.pieces import (
    GPT2,
    MissingWeightError,
    Piece,
    Weights,
    attention_formula,
    each,
    embedding,
    merge_heads,
    mixture,
    pattern,
    split_heads,
    split_name,
)

SHOWN = 8  # ids or positions in a message
FEWEST = 16  # the fewest values from which a constant is fitted
NEAR = 1e-3  # the largest relative distance at which a tensor of the checkpoint is identified
BLOCKS = 12  # in checkpoints with more blocks, only the weights of adjacent blocks are tried


# Embeddings


@about("embed")
def rows_of_embeddings(s: Situation) -> Iterator[Hypothesis]:
    """Other rows of wpe.weight or of wte.weight, if only one of the two summands is wrong."""
    if s.tap != "embed":
        return
    tokens, wpe, T = s.weights["token_embedding"], s.weights["wpe.weight"], s.found.shape[1]
    positions = _nearest(s.found - tokens, wpe)  # (B, T)
    rows = positions[:1] if bool((positions == positions[:1]).all()) else positions
    yield one(
        "position_ids",
        {"embed": embedding(positions)},
        found=_shown(rows),
        expected=_shown(torch.arange(T)),
    )
    try:
        table, of_row = s.weights.read("wte.weight"), None
    except MissingWeightError:  # only the rows of the file's ids are available
        table, of_row = tokens.flatten(0, 1), s.weights.ids.flatten()
    nearest = _nearest(s.found - wpe[:T], table)
    others = table[nearest].to(tokens.dtype)
    ids = nearest if of_row is None else of_row[nearest]
    yield one(
        "other_ids",
        {"embed": Piece((), lambda w, i: others + wpe[:T])},
        found=_described(ids, s.weights.ids),
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


# Activations


@about("act", needs_inputs=True)
def constants_of_gelu(s: Situation) -> Iterator[Hypothesis]:
    """GELU approximated by tanh or a sigmoid, with constants that are not GPT-2's."""
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
    slope = float(f"{(torch.logit(share) * x).sum() / x.square().sum():.6g}")
    sigmoid = Piece(("fc",), lambda w, i, x: x * torch.sigmoid(slope * x))
    values = {**values, "found": f"x·sigmoid({slope:g}·x)"}
    yield one("gelu_constants", {"act": sigmoid}, fix, **values)


def _formula(root: float, square: float, cube: float) -> str:
    """Write tanh GELU with these coefficients of x, x² and x³ in its usual form."""
    powers = zip((square, cube), ("x²", "x³"), strict=True)
    terms = ["x", *(f"{c / root:.5g}·{power}" for c, power in powers if c and root)]
    inner = f"({' + '.join(terms)})" if len(terms) > 1 else "x"
    return f"0.5·x·(1 + tanh({root:.6g}·{inner}))"


# The weights of other blocks


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


# Projections and residual sums


@about("q", "k", "v", "attn", "fc", "mlp", "logits", needs_inputs=True)
def other_biases(s: Situation) -> Iterator[Hypothesis]:
    """A vector that is added to the result at every token."""
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
    reordered = mixture(merge=lambda heads: merge_heads(heads[:, order]))
    yield one("head_order", {"heads": reordered}, found=text)


# Norms


@about(*NORMS, needs_inputs=True)
def parameters_of_norms(s: Situation) -> Iterator[Hypothesis]:
    """A norm whose weight or bias, fitted by least squares, is another tensor than its own."""
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
    size = found.square().mean().sqrt()
    for name, tensor in known.items():
        distance = (found - tensor).square().mean().sqrt()
        if distance <= NEAR * max(size, tensor.square().mean().sqrt()):
            return name
    return None


def _relative(found: str, own: str) -> str:
    """Shorten a name in the same block: "ln_1.bias of the same block" for "h.3.ln_1.bias"."""
    layer, kind = split_name(own)
    inside = found.removeprefix(f"h.{layer}.")
    return f"{inside} of the same block" if inside != found and kind != "ln_f" else found


# Attention


@about("probs", needs_inputs=True)
def measured_patterns(s: Situation) -> Iterator[Hypothesis]:
    """Masks that differ between sequences, and biases that depend on the distance (ALiBi)."""
    usual = attention_formula(s.weights, s.layer)
    q, k = (split_heads(s.weights, s.inputs[name]) for name in "qk")
    scores = q @ k.mT * usual.scale
    seen = (s.found > 0).any(1, keepdim=True)  # (B, 1, T, T)
    if bool((seen != seen[:1]).any()):
        b, _, t, _ = (seen != usual.allowed).nonzero()[0].tolist()
        hidden = (usual.allowed & ~seen[b, 0])[t].nonzero().flatten().tolist()
        found = listed([str(j) for j in hidden]) or "later tokens too"

        def by_row(scores: Tensor, usual: AttentionFormula) -> Tensor:
            rows = (scores * usual.scale).masked_fill(~seen, torch.finfo(scores.dtype).min)
            return rows.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)

        values: Values = {"row": b, "token": t, "found": found}
        yield one("padding_mask", {"probs": pattern(by_row)}, **values)
    bias = _bias_by_distance(s.found, scores)  # (H, T)
    T = bias.shape[-1]
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)  # (T, T)

    biased = pattern(lambda x, usual: (masked(x, usual) + bias[:, distance]).softmax(-1))
    yield one("position_bias", {"probs": biased}, found=described_bias(bias[:, distance]))


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
