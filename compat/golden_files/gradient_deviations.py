"""Deviations of the backward pass that gradients show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional as F

from compat.adaptation.diagnosis.activations import canonical_activation
from compat.adaptation.diagnosis.attention_formula import AttentionFormula
from compat.golden_files.backward import Backward, Loss, next_token_loss, readers_of
from compat.golden_files.bounds import fitted_factor
from compat.golden_files.codes import CODES, MESSAGES
from compat.golden_files.contents import LOSS
from compat.golden_files.deviations import NORMS, Proposal, Situation, hypotheses
from compat.golden_files.pieces import GPT2, Pieces, labelled_inputs, normed, pattern, split_name
from compat.tap import tap_names

# The part of the model that a share of the gradient comes from, by the tap it arrives through.
BRANCHES = {
    "ln_1": "the attention branch",
    "resid_mid": "the residual connection past attention",
    "ln_2": "the MLP branch",
    "out": "the residual connection past the MLP",
    "logits": "the head",
    "embed": "the token embedding",
}


def losses(T: int) -> dict[str, Loss]:
    """Return losses that differ from GPT-2's, by their description in a message."""

    def total(logits: Tensor, ids: Tensor) -> Tensor:
        return next_token_loss(logits, ids) * ids[:, 1:].numel()

    def against(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    each, every = "the sum over the positions", "the sum over all tokens"
    found: dict[str, Loss] = {
        every: total,
        f"{each}, averaged over the sequences": lambda x, ids: total(x, ids) / len(ids),
        f"{every}, divided by B · {T} instead of B · {T - 1}": (
            lambda x, ids: total(x, ids) / ids.numel()
        ),
        "measured in bits": lambda x, ids: next_token_loss(x, ids) / math.log(2),
        "computed against the input ids instead of the next ids": against,
        "computed with the first id as the target of the last position": (
            lambda x, ids: against(x, ids.roll(-1, 1))
        ),
        "computed against the ids two positions ahead": (
            lambda x, ids: against(x[:, :-2], ids[:, 2:])
        ),
    }
    if T == 2:
        found.popitem()
    return found


def loss_values(logits: Tensor, ids: Tensor) -> Iterator[Proposal]:
    """Yield the values of losses that differ from GPT-2's."""
    for found, loss in losses(ids.shape[1]).items():
        yield Proposal("other_loss", loss(logits, ids), {"found": found})


@dataclass(frozen=True)
class WrongGradient:
    """A gradient that does not follow from the gradients at later taps.

    Args:
        backward: GPT-2's backward pass, on the candidate's gradients at later taps.
        name: the name of the tap or parameter.
        found: the candidate's gradient.
        expected: the gradient by GPT-2's backward pass.
    """

    backward: Backward
    name: str
    found: Tensor
    expected: Tensor

    @property
    def is_parameter(self) -> bool:
        return self.name not in tap_names(self.backward.weights.config.n_layer)


def proposals(wrong: WrongGradient, only: str | None = None) -> Iterator[Proposal]:
    """Yield the known deviations of a gradient whose weights and taps are recorded.

    Args:
        wrong: the wrong gradient.
        only: the code to try, or None for all.
    """
    if not wrong.found.any():
        yield Proposal("no_gradient", torch.zeros_like(wrong.expected), {"tensors": wrong.name})
        return
    for code, kind in KINDS:  # the expensive ones last
        if only in (None, code):
            with suppress(LookupError):
                yield from kind(wrong)


def _other_losses(wrong: WrongGradient) -> Iterator[Proposal]:
    if wrong.name == "logits":
        for text, loss in losses(wrong.backward.weights.ids.shape[1]).items():
            value = replace(wrong.backward, loss=loss).gradient(wrong.name)
            yield Proposal("other_loss", value, {"found": text})


def _missing_shares(wrong: WrongGradient) -> Iterator[Proposal]:
    if len(readers_of(wrong.name, wrong.backward.weights.config)) < 2:
        return
    shares = wrong.backward.shares(wrong.name)
    for n in range(1, len(shares)):
        for missing in combinations(shares, n):
            value = torch.stack([s for r, s in shares.items() if r not in missing]).sum(0)
            kinds = [split_name(reader)[1] for reader in missing]
            words = " and ".join(BRANCHES.get(kind, kind) for kind in kinds)
            yield Proposal("missing_gradient", value, {"found": words, "tensors": wrong.name})


def _factor(wrong: WrongGradient) -> Iterator[Proposal]:
    if factor := fitted_factor(wrong.found, wrong.expected):
        weights = wrong.backward.weights
        B, T = weights.ids.shape
        cause = _cause(factor, wrong.name, B, T, weights.config.d_head)
        values = {"found": float(f"{factor:.4g}"), "cause": cause, "tensors": wrong.name}
        yield Proposal("scaled_gradient", factor * wrong.expected, values)


def _decay(wrong: WrongGradient) -> Iterator[Proposal]:
    if wrong.is_parameter:
        weight = wrong.backward.weights.read(wrong.name).double()
        decay = float(f"{fitted_factor(wrong.found - wrong.expected, weight):.4g}")
        values = {"found": decay, "tensors": wrong.name}
        yield Proposal("weight_decay", wrong.expected + decay * weight, values)


def _gradients_of_some_tokens(wrong: WrongGradient) -> Iterator[Proposal]:
    """Yield gradients of some tokens only, as if the other tokens' were overwritten."""
    if not wrong.is_parameter:
        return
    B, T = wrong.backward.weights.ids.shape
    last = slice(max(T - 2, 0), T)  # the last id is only a target, so its position has no gradient
    for words, b, t in (
        ("the last sequence", slice(B - 1, B), slice(T)),
        ("the first sequence", slice(0, 1), slice(T)),
        ("the last position", slice(B), last),
        ("the last token of the last sequence", slice(B - 1, B), last),
    ):
        only = torch.zeros(B, T, dtype=torch.float64)
        only[b, t] = 1
        value = wrong.backward.gradient(wrong.name, only)
        yield Proposal("partial_gradient", value, {"found": words, "tensors": wrong.name})


def _typed_derivatives(wrong: WrongGradient) -> Iterator[Proposal]:
    """Yield the effects of mistakes in a hand-written derivative of tanh GELU."""
    readers = readers_of(wrong.name, wrong.backward.weights.config)
    if [split_name(reader)[1] for reader in readers] != ["act"]:
        return
    x, arriving = wrong.backward.forward(wrong.name), wrong.backward.known(readers[0])
    if arriving is None or canonical_activation(wrong.backward.weights.config) != "gelu_new":
        return
    root = math.sqrt(2 / math.pi)
    tanh = torch.tanh(root * (x + 0.044715 * x**3))
    inner = root * (1 + 3 * 0.044715 * x**2)  # the derivative of the argument of the tanh
    slope = root * (1 + 0.044715 * x**2)
    for found, value in (
        ("without the factor 3 of the cube", 1 + tanh + x * (1 - tanh**2) * slope),
        ("without the square of the tanh", 1 + tanh + x * (1 - tanh) * inner),
        ("without the factor √(2/π)", 1 + tanh + x * (1 - tanh**2) * inner / root),
        ("without the factor x", 1 + tanh + (1 - tanh**2) * inner),
        ("without the derivative of the tanh", 1 + tanh),
    ):  # fmt: skip
        text = f"the derivative of tanh GELU, {found}"
        values = {"found": text, "tensors": wrong.name}
        yield Proposal("wrong_backward", 0.5 * value * arriving, values)


def _other_functions(wrong: WrongGradient) -> Iterator[Proposal]:
    for text, pieces in _other_pieces(wrong):
        with suppress(LookupError, RuntimeError):  # for example mismatched shapes
            value = replace(wrong.backward, pieces={**GPT2, **pieces}).gradient(wrong.name)
            yield Proposal("wrong_backward", value, {"found": text, "tensors": wrong.name})


KINDS: tuple[tuple[str, Callable[[WrongGradient], Iterator[Proposal]]], ...] = (
    ("other_loss", _other_losses),
    ("missing_gradient", _missing_shares),
    ("scaled_gradient", _factor),
    ("weight_decay", _decay),
    ("partial_gradient", _gradients_of_some_tokens),
    ("wrong_backward", _typed_derivatives),
    ("wrong_backward", _other_functions),
)


def _cause(factor: float, name: str, B: int, T: int, D: int) -> str:
    """Return the likely cause of a factor, as the end of a sentence."""
    known = {
        B * (T - 1): "as if the loss were summed over all tokens",
        T - 1: "as if the loss were summed over the positions",
        (T - 1) / T: "as if the loss were divided by B · T instead of B · (T − 1)",
        1 / (B * T): "as if it were averaged over the tokens instead of summed",
        1 / B: "as if it were averaged over the sequences instead of summed",
        B: "as if it were summed over the sequences twice",
    }
    if name.endswith((".q", ".k")):
        root = math.sqrt(D)
        known |= {root: "so that the scores' 1/√d_head is missing in the backward pass",
                  1 / root: "so that the scores' 1/√d_head is applied twice"}  # fmt: skip
    for value, cause in known.items():
        if math.isclose(factor, value, rel_tol=1e-4):
            return f", {cause}"
    steps = round(1 / factor) if 0 < factor < 1 else 0
    if steps > 1 and math.isclose(1 / factor, steps, rel_tol=1e-4):
        return f", as with {steps} steps of gradient accumulation"
    if factor > 1.5 and math.isclose(factor, round(factor), rel_tol=1e-4):
        return f", as if the gradients of {round(factor)} backward passes were added up"
    return ", as with gradient clipping or loss scaling"


def _other_pieces(wrong: WrongGradient) -> Iterator[tuple[str, Pieces]]:
    """Yield pieces whose derivative may have been used instead, with a description."""
    backward, config = wrong.backward, wrong.backward.weights.config
    kinds = [split_name(reader)[1] for reader in readers_of(wrong.name, config) if reader != LOSS]
    if wrong.is_parameter:  # the gradient arrives through later pieces too
        kinds += [later for kind in kinds for later in _later(kind)]
    norms, eps = [kind for kind in NORMS if kind in kinds], config.layer_norm_epsilon
    for text, constants in (
        ("the norm's mean and variance are treated as constants", (True, True)),
        ("the norm's mean is treated as a constant", (True, False)),
        ("the norm's variance is treated as a constant", (False, True)),
    ):
        if norms:
            formula = partial(_normalized, *constants, eps)
            yield text, {kind: normed(kind, formula) for kind in norms}
    if "probs" in kinds:
        text = "the softmax's denominator is treated as a constant"
        yield text, {"probs": pattern(_softmax)}
    layer = 0 if wrong.is_parameter else split_name(wrong.name)[0]
    for kind in dict.fromkeys(kinds):
        if kind in ("embed", "resid_mid", "out", "logits"):
            continue
        reader = kind if kind == "ln_f" else f"h.{layer}.{kind}"
        inputs = {
            n: backward.forward(own) for n, own in labelled_inputs(reader, config.n_layer).items()
        }
        situation = Situation(backward.weights, reader, layer, backward.forward(reader), inputs)
        for hypothesis in hypotheses(kind, situation):
            texts = [MESSAGES.get(c, CODES[c].message).format(**{"tensors": reader, **v})
                     for c, v in hypothesis.codes if "other" not in v]  # fmt: skip
            if texts:
                yield re.sub(r"\bh\.\d+\.", "", " and ".join(texts)), hypothesis.pieces


def _later(kind: str) -> list[str]:
    """Return the taps between a tap of a block and the output of the block."""
    order = ["ln_1", "q", "probs", "heads", "attn", "resid_mid", "ln_2", "fc", "act", "mlp"]
    return order[order.index(kind) + 1 :] if kind in order else []


def _normalized(mean: bool, variance: bool, eps: float, x: Tensor) -> Tensor:
    """Normalize with a mean or variance through which no gradient flows."""
    mu, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    mu, var = (mu.detach() if mean else mu), (var.detach() if variance else var)
    return (x - mu) / (var + eps).sqrt()


def _softmax(scores: Tensor, usual: AttentionFormula) -> Tensor:
    """Compute a softmax with a denominator through which no gradient flows."""
    scores = (scores * usual.scale).masked_fill(~usual.allowed, -math.inf)
    return (scores - scores.logsumexp(-1, keepdim=True).detach()).exp()
