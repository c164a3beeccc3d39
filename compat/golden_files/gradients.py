"""GPT-2's loss and its gradients at every tap and of every parameter, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compat.checkpoint.layout import EMBEDDING
from compat.golden_files.backward import next_token_loss, shares
from compat.golden_files.contents import LOSS
from compat.golden_files.pieces import GPT2, TOKENS, Weights, chain, inputs_of, run_piece
from compat.parity.trace import Trace
from compat.tap import BLOCK_TAPS, tap_names


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
