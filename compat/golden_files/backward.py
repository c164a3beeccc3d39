"""The backward pass, one piece at a time.

The readers of a tap are the taps that are computed from it. The gradient at a tap is the sum of
one vector-Jacobian product for each reader, which is called a share here. `gradients` computes all
of them for a golden file, and `Backward` computes single ones from a candidate's own gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from compat.checkpoint.layout import EMBEDDING
from compat.config import GPT2Config
from compat.golden_files.contents import GRADIENT, LOSS
from compat.golden_files.pieces import (
    GPT2,
    PROJECTIONS,
    TOKENS,
    MissingWeightError,
    Pieces,
    Weights,
    chain,
    inputs_of,
    run_piece,
    split_name,
)
from compat.parity.trace import Trace
from compat.tap import BLOCK_TAPS, tap_names

if TYPE_CHECKING:
    from compat.golden_files.file import Golden

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, ids) → scalar


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of ids[:, 1:] given logits (B, T, V) at the ids before each."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def causal_part(name: str, gradient: Tensor) -> Tensor:
    """Zero the entries of a gradient that have no effect on earlier gradients.

    The attention probabilities of later keys are always 0. Autograd computes gradients for them,
    but implementations that skip these keys do not.
    """
    return gradient.tril() if name.endswith(".probs") else gradient


def readers_of(name: str, config: GPT2Config) -> list[str]:
    """Return the taps that are computed from a tap or a parameter, or LOSS for the logits."""
    names = tap_names(config.n_layer)
    if name == "logits":
        return [LOSS]
    if name in names:
        return [tap for tap in names if name in inputs_of(tap, GPT2, config.n_layer)]
    module = name.rpartition(".")[0]
    if module == "wte":
        return ["embed", "logits"] if config.tie_word_embeddings else ["embed"]
    if not module.startswith("h."):
        return [{"wpe": "embed", "lm_head": "logits"}.get(module, module)]
    _, layer, path = module.split(".", 2)
    projections = [tap for tap, (module, _) in PROJECTIONS.items() if module == path]
    return [f"h.{layer}.{tap}" for tap in projections or [path]]  # else a norm


def shares(
    tap: str,
    pieces: Pieces,
    weights: Weights,
    values: Mapping[str, Tensor],
    arriving: Tensor,
    wanted: Callable[[str], bool],
) -> Trace:
    """Backpropagate the gradient at a tap through its piece, to the taps and parameters it reads.

    Args:
        tap: the tap that the piece computes.
        pieces: the forward pass to differentiate.
        weights: the weights of the piece.
        values: the inputs of the piece.
        arriving: the gradient at the tap.
        wanted: selects the taps and parameters by name.

    Raises:
        LookupError: the piece reads none of the selected taps and parameters.
    """
    leaves: Trace = {}

    def leaf(name: str, tensor: Tensor) -> Tensor:
        if not wanted(name):
            return tensor
        return leaves.setdefault(name, tensor.detach().requires_grad_())

    watched = replace(weights, read=lambda name: leaf(name, weights[name]))
    with torch.enable_grad():
        inputs = {name: leaf(name, value) for name, value in values.items()}
        found = run_piece(tap, pieces, watched, inputs)
        if not leaves:
            raise LookupError(tap)
        gradients = torch.autograd.grad(found, list(leaves.values()), arriving, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def gradients(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the loss and its gradients by the name of the tap or parameter, in backward order.

    Only the residual stream is kept from the forward pass. Each block is recomputed, so the peak
    memory is that of one block plus the residual stream.
    """
    config, rounded = weights.config, weights.rounded
    names = tap_names(config.n_layer)
    stream: Trace = {}  # the inputs of the blocks, the final norm and the head
    for tap, value in chain(weights):
        if tap in ("embed", "ln_f", "logits") or tap.endswith(".out"):
            stream[tap] = value
    with torch.enable_grad():
        logits = stream.pop("logits").requires_grad_()
        loss = next_token_loss(logits, weights.ids)
        arriving: Trace = {"logits": rounded(torch.autograd.grad(loss, logits)[0])}
    yield LOSS, rounded(loss.detach())
    at_logits = arriving["logits"]  # for the gradient of the tied embedding, at the end
    blocks = [[f"h.{i}.{tap}" for tap in BLOCK_TAPS] for i in range(config.n_layer)]
    for taps in [["ln_f", "logits"], *reversed(blocks), ["embed"]]:
        values = dict(stream)
        for tap in taps[:-1]:
            values[tap] = rounded(run_piece(tap, GPT2, weights, values))
        parameters: Trace = {}
        for tap in reversed(taps):
            gradient = arriving.pop(tap)
            yield tap, gradient
            inputs = {name: values[name] for name in inputs_of(tap, GPT2, config.n_layer)}
            # The gradient of a tied embedding, the largest parameter, is computed at the end.
            found = shares(tap, GPT2, weights, inputs, gradient, lambda name: name != EMBEDDING)
            for name, share in found.items():
                total = arriving if name in names else parameters
                total[name] = rounded(total[name] + share if name in total else share)
        if TOKENS in parameters:
            table = torch.zeros(config.vocab_size, config.n_embd, dtype=weights.dtype)
            if config.tie_word_embeddings:
                torch.mm(at_logits.flatten(0, 1).T, stream["ln_f"].flatten(0, 1), out=table)
            rows = parameters.pop(TOKENS).flatten(0, 1)
            parameters[EMBEDDING] = rounded(table.index_add_(0, weights.ids.flatten(), rows))
        yield from parameters.items()


@dataclass(frozen=True)
class Backward:
    """Computes gradients from the gradients at later taps.

    Args:
        weights: the weights of the pieces.
        golden: the taps of the forward pass, and the gradients that replace unknown ones at the end
            of a block.
        known: returns the gradient at a tap from which earlier ones are computed, or None if it is
            not known.
        pieces: the forward pass to differentiate.
        loss: the loss at which the backward pass starts.
    """

    weights: Weights
    golden: Golden
    known: Callable[[str], Tensor | None]
    pieces: Pieces = field(default_factory=lambda: GPT2)
    loss: Loss = next_token_loss

    def forward(self, tap: str) -> Tensor:
        """Return a tap of the forward pass in float64."""
        return self.golden.read(tap).double()

    def gradient(self, name: str, only: Tensor | None = None) -> Tensor:
        """Return the gradient at a tap or of a parameter, which is the sum of all shares.

        Args:
            name: the name of the tap or parameter.
            only: a mask (B, T) of the tokens whose gradients at the readers are used; by default
                all.

        Raises:
            MissingWeightError, KeyError: a weight, a tap or a gradient is not available.
        """
        return causal_part(name, torch.stack(list(self.shares(name, only).values())).sum(0))

    def shares(self, name: str, only: Tensor | None = None) -> dict[str, Tensor]:
        """Return the share of each reader in the gradient, see `gradient`."""
        return {
            reader: self._share(name, reader, only)
            for reader in readers_of(name, self.weights.config)
        }

    def _share(self, name: str, reader: str, only: Tensor | None) -> Tensor:
        if reader == LOSS:
            logits = self.forward("logits").clone().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(self.loss(logits, self.weights.ids), logits)[0]
        inputs = inputs_of(reader, self.pieces, self.weights.config.n_layer)
        values: Trace = {tap: self.forward(tap) for tap in inputs}
        arriving = self._arriving(reader)
        if only is not None:
            arriving = arriving * only.view(*only.shape, *[1] * (arriving.ndim - 2))
        weights = self.weights
        if name not in tap_names(weights.config.n_layer):
            weights = replace(weights, read=self._parameter)
        rows = name == EMBEDDING and reader == "embed"
        wanted = TOKENS if rows else name
        found = shares(reader, self.pieces, weights, values, arriving, lambda n: n == wanted)
        if not rows:
            return found[name]
        table = torch.zeros(self.golden.arrays[GRADIENT + name].shape, dtype=arriving.dtype)
        return table.index_add_(0, self.weights.ids.flatten(), found[TOKENS].flatten(0, 1))

    def _parameter(self, name: str) -> Tensor:
        """Read a parameter, or return zeros: the gradient of a weight does not depend on it."""
        try:
            return self.weights.read(name)
        except MissingWeightError:
            return torch.zeros(self.golden.arrays[GRADIENT + name].shape)

    def _arriving(self, tap: str) -> Tensor:
        """Return the known gradient at a reader, or compute it from that of the block's output."""
        if (found := self.known(tap)) is not None:
            return found
        i, name = split_name(tap)
        last = name == "out" and i == self.weights.config.n_layer - 1
        if name in ("out", "logits") and not last:
            return self.golden.read(GRADIENT + tap).double()
        return self.gradient(tap)
