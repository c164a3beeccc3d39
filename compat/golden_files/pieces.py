"""The pieces of GPT-2: each tap as a function of the taps before it.

A piece computes one tap from earlier taps, such as the activation `act` from `fc`. The writer of a
golden file chains all pieces in float64, and the comparison applies single pieces to a candidate's
own arrays. A deviation replaces a piece by a variant of it, which reads other taps or weights,
changes its inputs or its result, or changes a step inside (`normed`, `pattern` and `context`).

Source of the formulas: `transformers/models/gpt2/modeling_gpt2.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from compat.adaptation.anatomy.norms import NormFormula
from compat.adaptation.diagnosis.activations import ACTIVATIONS, canonical_activation
from compat.adaptation.diagnosis.attention_formula import AttentionFormula
from compat.adaptation.diagnosis.modified_reference import causal
from compat.checkpoint.layout import EMBEDDING, HEAD, POSITIONS
from compat.config import GPT2Config
from compat.parity.trace import Trace
from compat.tap import tap_names

TOKENS = "token_embedding"  # stands for the rows of wte.weight that the ids select
# The projection in a block that computes a tap and, for q, k and v, which third of its columns.
PROJECTIONS: Mapping[str, tuple[str, int | None]] = {
    "q": ("attn.c_attn", 0),
    "k": ("attn.c_attn", 1),
    "v": ("attn.c_attn", 2),
    "attn": ("attn.c_proj", None),
    "fc": ("mlp.c_fc", None),
    "mlp": ("mlp.c_proj", None),
}
KEPT = 24  # tensors in the cache, about as many as in two blocks
Read = Callable[[str], Tensor]


class MissingWeightError(LookupError):
    """A piece needs a weight that is neither in the golden file nor in an open checkpoint."""


def cached_reads(read: Read, ids: Tensor) -> Read:
    """Cache the most recent tensors, and provide the token embeddings of the ids as TOKENS."""

    @lru_cache(KEPT)
    def kept(name: str) -> Tensor:
        return read(EMBEDDING)[ids] if name == TOKENS else read(name)

    return kept


@dataclass(frozen=True)
class Weights:
    """The weights, config and token ids with which pieces run.

    Args:
        config: the config of the checkpoint.
        ids: the token ids (B, T).
        read: returns a tensor by its Hugging Face name, or raises MissingWeightError. The name
            TOKENS stands for the token embeddings (B, T, C) of the ids.
        dtype: the data type in which pieces are computed.
        rounded: applied to the result of every operation, to simulate a narrower data type.
    """

    config: GPT2Config
    ids: Tensor
    read: Read
    dtype: torch.dtype = torch.float64
    rounded: Callable[[Tensor], Tensor] = lambda x: x

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name).to(self.dtype)

    def cut(self, rows: int, length: int) -> Weights:
        """Return a copy with the first rows and positions of the ids only."""

        def read(name: str) -> Tensor:
            tensor = self.read(name)
            return tensor[:rows, :length] if name == TOKENS else tensor

        return replace(self, ids=self.ids[:rows, :length], read=read)


Run = Callable[..., Tensor]  # (weights, layer, *inputs) → the tap
Change = Callable[[Weights, Tensor], Tensor]
Softmax = Callable[[Tensor, AttentionFormula], Tensor]  # (scores q·k, mask and scale) → probs


@dataclass(frozen=True)
class Piece:
    """One piece.

    Args:
        inputs: the taps that it reads. "x" is the residual stream at the input of the block, "last"
            that at the output of the last block; all others are taps of the same block.
        run: computes the tap from the weights, the index of the layer and the inputs.
    """

    inputs: tuple[str, ...]
    run: Run

    def of(self, *inputs: str) -> Piece:
        """Return the same function of other taps."""
        return replace(self, inputs=inputs)

    def before(self, change: Change) -> Piece:
        """Return the piece with a change that is applied to each input."""
        return replace(
            self, run=lambda w, i, *inputs: self.run(w, i, *(change(w, x) for x in inputs))
        )

    def then(self, change: Change) -> Piece:
        """Return the piece with a change that is applied to its result."""
        return replace(self, run=lambda w, i, *inputs: change(w, self.run(w, i, *inputs)))

    def with_config(self, **changes: Any) -> Piece:
        """Return the piece with changes of the config."""
        return self._with(lambda w: replace(w, config=replace(w.config, **changes)))

    def with_weights(self, change: Callable[[str, Tensor], Tensor]) -> Piece:
        """Return the piece with changed weights: `change(name, tensor)` replaces each tensor."""
        return self._with(lambda w: replace(w, read=lambda name: change(name, w.read(name))))

    def renamed(self, rename: Callable[[str], str]) -> Piece:
        """Return the piece with other weights: `rename(name)` is read instead of each name."""
        return self._with(lambda w: replace(w, read=lambda name: w.read(rename(name))))

    def _with(self, change: Callable[[Weights], Weights]) -> Piece:
        return replace(self, run=lambda w, i, *inputs: self.run(change(w), i, *inputs))


Pieces = Mapping[str, Piece]  # by the name of a tap without its layer


def normed(kind: str, formula: Callable[[Tensor], Tensor] | None = None) -> Piece:
    """Return the piece `ln_1`, `ln_2` or `ln_f`: a formula, by default GPT-2's, weight and bias."""
    layer = "" if kind == "ln_f" else "h.{}."

    def run(w: Weights, i: int, x: Tensor) -> Tensor:
        name = f"{layer.format(i)}{kind}"
        normalized = w.rounded((formula or NormFormula(eps=w.config.layer_norm_epsilon))(x))
        return w.rounded(normalized * w[f"{name}.weight"]) + w[f"{name}.bias"]

    return Piece({"ln_1": ("x",), "ln_2": ("resid_mid",), "ln_f": ("last",)}[kind], run)


def projection(weights: Weights, i: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return the weight [in, out] and the bias (out,) of a projection, in their own data type."""
    module, third = PROJECTIONS[kind]
    weight, bias = (weights.read(f"h.{i}.{module}.{part}") for part in ("weight", "bias"))
    if third is None:
        return weight, bias
    columns = slice(third * weights.config.n_embd, (third + 1) * weights.config.n_embd)
    return weight[:, columns], bias[columns]


def projected(kind: str, source: str) -> Piece:
    """Return the piece of a projection of another tap: (B, T, in) → (B, T, out)."""

    def run(w: Weights, i: int, x: Tensor) -> Tensor:
        weight, bias = projection(w, i, kind)
        return w.rounded(x @ weight.to(w.dtype)) + bias.to(w.dtype)

    return Piece((source,), run)


def split_heads(weights: Weights, x: Tensor) -> Tensor:
    """(B, T, C) → (B, H, T, D)."""
    B, T, _ = x.shape
    return x.reshape(B, T, weights.config.n_head, -1).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """(B, H, T, D) → (B, T, C)."""
    return heads.transpose(1, 2).flatten(2)


def attention_formula(weights: Weights, i: int) -> AttentionFormula:
    """Return the mask and the scale of GPT-2's attention in one layer."""
    return causal(weights.ids.shape[1], weights.config.attention_scale(i))


def pattern(
    softmax: Softmax = lambda scores, formula: formula.probabilities(scores),
    split_q: Change = split_heads,
    split_k: Change = split_heads,
) -> Piece:
    """Return the piece `probs`: attention probabilities (B, H, T, T) from q and k (B, T, C).

    Args:
        softmax: computes the probabilities from the scores before scale and mask.
        split_q: splits q into heads (B, H, T, D).
        split_k: splits k into heads (B, H, T, D).
    """

    def run(w: Weights, i: int, q: Tensor, k: Tensor) -> Tensor:
        return softmax(w.rounded(split_q(w, q) @ split_k(w, k).mT), attention_formula(w, i))

    return Piece(("q", "k"), run)


def context(
    split_v: Change = split_heads, merge: Callable[[Tensor], Tensor] = merge_heads
) -> Piece:
    """Return the piece `heads`: the context (B, T, C) from the probabilities and v (B, T, C).

    Args:
        split_v: splits v into heads (B, H, T, D).
        merge: concatenates the results of all heads.
    """
    return Piece(("probs", "v"), lambda w, i, probs, v: merge(probs @ split_v(w, v)))


def embedding(positions: Tensor | None = None) -> Piece:
    """Return the piece `embed`, with the positions 0 to T − 1 or other ones."""

    def run(w: Weights, i: int) -> Tensor:
        rows = slice(w.ids.shape[1]) if positions is None else positions
        return w[TOKENS] + w[POSITIONS][rows]

    return Piece((), run)


def _act(w: Weights, i: int, x: Tensor) -> Tensor:
    name, rounded = canonical_activation(w.config), w.rounded
    if name == "gelu_new":  # written out as in many ports, so that it rounds like them
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return rounded(x / 2) * rounded(1 + rounded(torch.tanh(inner)))
    return ACTIVATIONS[name](x)


def head_name(config: GPT2Config) -> str:
    """Return the name of the head's weight, which is the token embedding if they are tied."""
    return EMBEDDING if config.tie_word_embeddings else HEAD


GPT2: Pieces = {
    "embed": embedding(),
    "ln_1": normed("ln_1"),
    "q": projected("q", "ln_1"),
    "k": projected("k", "ln_1"),
    "v": projected("v", "ln_1"),
    "probs": pattern(),
    "heads": context(),
    "attn": projected("attn", "heads"),
    "resid_mid": Piece(("x", "attn"), lambda w, i, x, attn: x + attn),
    "ln_2": normed("ln_2"),
    "fc": projected("fc", "ln_2"),
    "act": Piece(("fc",), _act),
    "mlp": projected("mlp", "act"),
    "out": Piece(("resid_mid", "mlp"), lambda w, i, x, mlp: x + mlp),
    "ln_f": normed("ln_f"),
    "logits": Piece(("ln_f",), lambda w, i, x: x @ w[head_name(w.config)].T),
}


def each(names: Iterable[str], change: Callable[..., Piece]) -> Pieces:
    """Return GPT-2's pieces of these names, each with the same change."""
    return {name: change(GPT2[name]) for name in names}


def split_name(tap: str) -> tuple[int, str]:
    """Split a tap into layer and name: (3, "act") for "h.3.act", (0, "ln_f") for "ln_f"."""
    _, layer, name = tap.split(".") if tap.startswith("h.") else ("", "0", tap)
    return int(layer), name


def cut(tap: str, value: Tensor, rows: int, length: int) -> Tensor:
    """Select the first rows and positions of a tap, which do not depend on later positions."""
    return value[:rows, :, :length, :length] if tap.endswith("probs") else value[:rows, :length]


def inputs_of(tap: str, pieces: Pieces, n_layer: int) -> list[str]:
    """Return the full names of the taps from which a tap is computed."""
    i, name = split_name(tap)
    entering = f"h.{i - 1}.out" if i else "embed"
    named = {"x": entering, "last": f"h.{n_layer - 1}.out"}
    return [named.get(own, f"h.{i}.{own}" if own != "ln_f" else own) for own in pieces[name].inputs]


def labelled_inputs(tap: str, n_layer: int) -> dict[str, str]:
    """Return the full names of the inputs of GPT-2's piece, by their names in the piece."""
    return dict(zip(GPT2[split_name(tap)[1]].inputs, inputs_of(tap, GPT2, n_layer), strict=True))


def run_piece(tap: str, pieces: Pieces, weights: Weights, values: Mapping[str, Tensor]) -> Tensor:
    """Compute one tap from the values of its inputs.

    Raises:
        MissingWeightError: a weight is not available.
    """
    i, name = split_name(tap)
    inputs = [values[own] for own in inputs_of(tap, pieces, weights.config.n_layer)]
    return pieces[name].run(weights, i, *inputs)


def chain(weights: Weights, pieces: Pieces = GPT2) -> Iterator[tuple[str, Tensor]]:
    """Run the whole model and yield every tap in execution order.

    Args:
        weights: the weights, and the ids from which the model runs.
        pieces: the pieces of the model.
    """
    values: Trace = {}
    for tap in tap_names(weights.config.n_layer):
        if tap.endswith(".ln_1"):  # a new block: keep the residual stream only
            n_layer = weights.config.n_layer
            values = {name: values[name] for name in inputs_of(tap, GPT2, n_layer)}
        values[tap] = weights.rounded(run_piece(tap, pieces, weights, values))
        yield tap, values[tap]


def segment(tap: str, pieces: Pieces, n_layer: int, known: Callable[[str], bool]) -> list[str]:
    """Return the taps to compute for a tap from the known ones, itself included.

    They are in execution order.
    """
    needed, wanted = {tap}, [tap]
    while wanted:
        for name in inputs_of(wanted.pop(), pieces, n_layer):
            if name not in needed and not known(name):
                needed.add(name)
                wanted.append(name)
    return [name for name in tap_names(n_layer) if name in needed]


def run_segment(
    names: Sequence[str], pieces: Pieces, weights: Weights, known: Callable[[str], Tensor]
) -> Tensor:
    """Compute the taps of a segment and return the last one.

    Args:
        names: the taps of the segment, as returned by `segment`.
        pieces: the pieces of the model.
        weights: the weights of the pieces.
        known: returns the known taps from which the segment is computed.

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
