"""The pieces of GPT-2: each tap as a function of the taps before it.

A piece is what lies between two taps, such as the activation between `fc` and `act`. The writer of
a golden file chains all pieces in float64, and the comparison applies one piece to a candidate's
own arrays. A deviation replaces one piece by another.

Source of the formulas: `transformers/models/gpt2/modeling_gpt2.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compat.adaptation.anatomy.norms import NormFormula
from compat.adaptation.diagnosis.attention_formula import AttentionFormula
from compat.adaptation.diagnosis.formulas import ACTIVATIONS, canonical_activation
from compat.adaptation.diagnosis.modified_reference import causal
from compat.config import GPT2Config
from compat.parity.trace import Trace
from compat.tap import tap_names


class MissingWeightError(LookupError):
    """A piece needs a tensor that is neither in the golden file nor in an open checkpoint."""


@dataclass(frozen=True)
class Weights:
    """Where pieces get their weights, their sizes and their ids from.

    Args:
        config: of the checkpoint.
        ids: (B, T).
        read: returns a tensor by its Hugging Face name, or raises MissingWeightError. The name
            "token_embedding" stands for the rows (B, T, C) of wte.weight that the ids select.
        dtype: in which pieces are computed.
        rounded: applied to the result of every operation, to simulate a narrower data type.
    """

    config: GPT2Config
    ids: Tensor
    read: Callable[[str], Tensor]
    dtype: torch.dtype = torch.float64
    rounded: Callable[[Tensor], Tensor] = lambda x: x

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name).to(self.dtype)

    def cut(self, rows: int, length: int) -> Weights:
        """The same for the first rows and positions of the ids."""

        def read(name: str) -> Tensor:
            tensor = self.read(name)
            return tensor[:rows, :length] if name == "token_embedding" else tensor

        return replace(self, ids=self.ids[:rows, :length], read=read)


Run = Callable[..., Tensor]  # (weights, layer, *inputs) → the tap


@dataclass(frozen=True)
class Piece:
    """One piece.

    Args:
        inputs: the taps that it reads: "x" is the residual stream that enters the block, "last" the
            one that leaves the last block, and all others are of the same block.
        run: computes the tap from the weights, the number of the layer and the inputs.
    """

    inputs: tuple[str, ...]
    run: Run


Pieces = Mapping[str, Piece]  # by the name of a tap without its layer


def norm(weights: Weights, name: str, x: Tensor, formula: NormFormula | None = None) -> Tensor:
    """A LayerNorm of the channels, (…, C) → (…, C)."""
    formula = formula or NormFormula(eps=weights.config.layer_norm_epsilon)
    normalized = weights.rounded(formula(x))
    return weights.rounded(normalized * weights[f"{name}.weight"]) + weights[f"{name}.bias"]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """A projection with the weight [in, out] of the checkpoint, (B, T, in) → (B, T, out)."""
    return weights.rounded(x @ weights[f"{name}.weight"]) + weights[f"{name}.bias"]


def project(weights: Weights, i: int, x: Tensor, third: int) -> Tensor:
    """q, k or v, which are the thirds of c_attn's columns: (B, T, C) → (B, T, C)."""
    name, C = f"h.{i}.attn.c_attn", weights.config.n_embd
    columns = slice(third * C, (third + 1) * C)
    weight, bias = weights.read(f"{name}.weight"), weights.read(f"{name}.bias")
    return weights.rounded(x @ weight[:, columns].to(x.dtype)) + bias[columns].to(x.dtype)


def split_heads(weights: Weights, x: Tensor) -> Tensor:
    """(B, T, C) → (B, H, T, D)."""
    B, T, _ = x.shape
    return x.reshape(B, T, weights.config.n_head, -1).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """(B, H, T, D) → (B, T, C)."""
    return heads.transpose(1, 2).flatten(2)


def attention_formula(weights: Weights, i: int) -> AttentionFormula:
    """The mask and the scale of GPT-2's attention in one layer."""
    return causal(weights.ids.shape[1], weights.config.attention_scale(i))


def probabilities(weights: Weights, q: Tensor, k: Tensor, formula: AttentionFormula) -> Tensor:
    """q and k (B, T, C) → the weights of attention (B, H, T, T)."""
    scores = weights.rounded(split_heads(weights, q) @ split_heads(weights, k).mT)
    return formula.probabilities(scores)


def _embed(w: Weights, i: int) -> Tensor:
    return w["token_embedding"] + w["wpe.weight"][: w.ids.shape[1]]


def _probs(w: Weights, i: int, q: Tensor, k: Tensor) -> Tensor:
    return probabilities(w, q, k, attention_formula(w, i))


def _heads(w: Weights, i: int, probs: Tensor, v: Tensor) -> Tensor:
    return merge_heads(probs @ split_heads(w, v))


def _act(w: Weights, i: int, x: Tensor) -> Tensor:
    name, rounded = canonical_activation(w.config), w.rounded
    if name == "gelu_new":  # written out, as in many ports, for the sake of its roundings
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return rounded(x / 2) * rounded(1 + rounded(torch.tanh(inner)))
    return ACTIVATIONS[name](x)


def _logits(w: Weights, i: int, x: Tensor) -> Tensor:
    tied = w.config.tie_word_embeddings
    return x @ w["wte.weight" if tied else "lm_head.weight"].T


GPT2: Pieces = {
    "embed": Piece((), _embed),
    "ln_1": Piece(("x",), lambda w, i, x: norm(w, f"h.{i}.ln_1", x)),
    "q": Piece(("ln_1",), lambda w, i, x: project(w, i, x, 0)),
    "k": Piece(("ln_1",), lambda w, i, x: project(w, i, x, 1)),
    "v": Piece(("ln_1",), lambda w, i, x: project(w, i, x, 2)),
    "probs": Piece(("q", "k"), _probs),
    "heads": Piece(("probs", "v"), _heads),
    "attn": Piece(("heads",), lambda w, i, x: linear(w, f"h.{i}.attn.c_proj", x)),
    "resid_mid": Piece(("x", "attn"), lambda w, i, x, attn: x + attn),
    "ln_2": Piece(("resid_mid",), lambda w, i, x: norm(w, f"h.{i}.ln_2", x)),
    "fc": Piece(("ln_2",), lambda w, i, x: linear(w, f"h.{i}.mlp.c_fc", x)),
    "act": Piece(("fc",), _act),
    "mlp": Piece(("act",), lambda w, i, x: linear(w, f"h.{i}.mlp.c_proj", x)),
    "out": Piece(("resid_mid", "mlp"), lambda w, i, x, mlp: x + mlp),
    "ln_f": Piece(("last",), lambda w, i, x: norm(w, "ln_f", x)),
    "logits": Piece(("ln_f",), _logits),
}


def split_name(tap: str) -> tuple[int, str]:
    """The layer and the name within it: (3, "act") for "h.3.act", (0, "ln_f") for "ln_f"."""
    _, layer, name = tap.split(".") if tap.startswith("h.") else ("", "0", tap)
    return int(layer), name


def cut(tap: str, value: Tensor, rows: int, length: int) -> Tensor:
    """A tap for the first rows and positions of the ids: GPT-2 is causal."""
    value = value[:rows, :, :length, :length] if tap.endswith("probs") else value[:rows, :length]
    return value


def inputs_of(tap: str, pieces: Pieces, n_layer: int) -> list[str]:
    """The full names of the taps that a tap is computed from."""
    i, name = split_name(tap)
    entering = f"h.{i - 1}.out" if i else "embed"
    named = {"x": entering, "last": f"h.{n_layer - 1}.out"}
    return [named.get(own, f"h.{i}.{own}" if own != "ln_f" else own) for own in pieces[name].inputs]


def run_piece(tap: str, pieces: Pieces, weights: Weights, values: Mapping[str, Tensor]) -> Tensor:
    """One tap from the values of its inputs.

    Raises:
        MissingWeightError: a weight is not available.
    """
    i, name = split_name(tap)
    inputs = [values[own] for own in inputs_of(tap, pieces, weights.config.n_layer)]
    return pieces[name].run(weights, i, *inputs)


def chain(weights: Weights, pieces: Pieces = GPT2) -> Iterator[tuple[str, Tensor]]:
    """Every tap in execution order, computed from the ids on.

    Args:
        weights: of the checkpoint.
        pieces: what to compute.
    """
    values: Trace = {}
    for tap in tap_names(weights.config.n_layer):
        if tap.endswith(".ln_1"):  # a new block, of which only the residual stream is known
            n_layer = weights.config.n_layer
            values = {name: values[name] for name in inputs_of(tap, GPT2, n_layer)}
        values[tap] = weights.rounded(run_piece(tap, pieces, weights, values))
        yield tap, values[tap]


def segment(tap: str, pieces: Pieces, n_layer: int, known: Callable[[str], bool]) -> list[str]:
    """The taps to compute for a tap, itself included, up to those whose values are known.

    In execution order.
    """
    needed, wanted = {tap}, [tap]
    while wanted:
        for name in inputs_of(wanted.pop(), pieces, n_layer):
            if name not in needed and not known(name):
                needed.add(name)
                wanted.append(name)
    return [name for name in tap_names(n_layer) if name in needed]


def run_segment(
    names: list[str], pieces: Pieces, weights: Weights, known: Callable[[str], Tensor]
) -> Tensor:
    """Compute the taps of a segment and return the last one.

    Args:
        names: from `segment`.
        pieces: what to compute.
        weights: of the checkpoint.
        known: returns the values from which the segment starts.

    Raises:
        MissingWeightError: a weight is not available.
    """
    n_layer, values = weights.config.n_layer, {}
    for tap in names:
        for name in inputs_of(tap, pieces, n_layer):
            if name not in values:
                values[name] = known(name)
        values[tap] = run_piece(tap, pieces, weights, values)
    return values[names[-1]]
