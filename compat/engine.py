"""An engine: a checkpoint or a model, packed for this machine, ready to generate and to score."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.config import GPT2Config
from compat.decoding import Decoder
from compat.decoding.compiled import CompiledTransformer
from compat.decoding.kernels import ACTIVATIONS, PROMPT, fastest
from compat.decoding.matrices import Pack
from compat.decoding.speculative import Guesser, ModelDraft, SpeculativeDecoder, lookup
from compat.decoding.static import StaticDecoder
from compat.decoding.transformer import Embedding, Read, Transformer
from compat.errors import ConfigError, GenerationError, short_repr
from compat.export_view import config_of, hf_tensors, with_head_of
from compat.generation import generate, stream
from compat.generation.checks import is_whole
from compat.layers import as_ids
from compat.name_map import NameMap

Precision = Literal["float32", "bfloat16", "int8"]
CHUNK = 128  # positions whose logits are held at once in scoring


class Engine:
    """GPT-2 run as fast as this machine can, with logits that are proved to be the model's.

    Args:
        model_or_source: a dialect's model, any module with a name map, an open checkpoint, or a
            source as in `load_pretrained`. The weights are read once and packed; later changes of
            the model are not seen. A safetensors file is mapped, and parts of it may be used
            where they lie for as long as the engine: do not cut it short or write into it.
        dtype: "float32", "bfloat16", or "int8": 8-bit weights, bfloat16 keys and values, and the
            rest in float32.
        device: where it computes. On the CPU the kernels are chosen by measurement; elsewhere they
            are torch's own.
        max_batch: sequences at once, for which the kernels are then chosen; None for any number,
            with kernels for one.
        compile: compile the pass of one id, for one sequence at a time, with `torch.compile`: takes
            about half a minute and a C++ compiler, and pays for long texts in int8.
        speculate: guess ahead, for one sequence at a time: "int8" by the same weights in 8 bits,
            "lookup" by what the text had before, the former too where that promises more. The
            ids are the same as without.
        name_map: of a module that is not a dialect's.
        config: of a module that has none; it tells `n_head` and the like.

    Raises:
        ConfigError: an unknown data type or way to speculate, a device that is not there, no
            config, or no compiler that works.
        CompatError: the source cannot be loaded, or the map does not fit.
    """

    def __init__(
        self,
        model_or_source: nn.Module | Checkpoint | str | Path,
        *,
        dtype: Precision = "float32",
        device: str | torch.device = "cpu",
        max_batch: int | None = None,
        compile: bool = False,
        speculate: Literal["int8", "lookup"] | None = None,
        name_map: NameMap | None = None,
        config: GPT2Config | Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(dtype, str) or dtype not in ("float32", "bfloat16", "int8"):
            raise ConfigError(
                f"dtype is {short_repr(dtype)}; expected 'float32', 'bfloat16' or 'int8'"
            )
        named = speculate is None or isinstance(speculate, str)
        if not named or speculate not in (None, "int8", "lookup"):
            raise ConfigError(
                f"speculate is {short_repr(speculate)}; expected 'int8', 'lookup' or None"
            )
        if max_batch is not None and (not is_whole(max_batch) or max_batch < 1):
            raise ConfigError(
                f"max_batch is {short_repr(max_batch)}; expected an integer of 1 or more"
            )
        self.dtype, self.max_batch, self.speculate = dtype, max_batch, speculate
        self.device = _usable(device)
        if compile and (speculate or self.device.type != "cpu"):
            raise ConfigError("compile is for the CPU, and without speculate")
        self.config, stored_at = _weights(model_or_source, name_map, config)

        def read(name: str) -> Tensor:
            return stored_at(name).to(self.device)

        def fast(precision: str, rows: int) -> Pack:
            return fastest(precision, rows, torch.get_num_threads(), self.device)

        pack = fast(dtype, rows=4 if speculate else min(max_batch or 1, PROMPT))
        stored = torch.float32 if dtype == "float32" else torch.bfloat16
        with torch.no_grad():
            rows = Embedding.of(read, stored)
            kind = CompiledTransformer if compile else Transformer
            self.transformer = kind(self.config, rows, read, pack, ACTIVATIONS[dtype])
            self._guessers = [Guesser(lookup)]
            if speculate == "int8":
                pack = fast("draft", rows=1)
                draft = Transformer(self.config, rows, read, pack, ACTIVATIONS["draft"])
                self._guessers.append(Guesser(ModelDraft(draft)))

    def decoder(self) -> Decoder:
        """A batch of its own; `generate` and the like ask for it."""
        if self.speculate is None:
            return StaticDecoder(self.transformer, self.max_batch)
        return SpeculativeDecoder(self.transformer, self._guessers)

    def generate(self, input_ids: Tensor, **settings: Any) -> Tensor:
        """Continue ids (B, T); settings and errors as in `compat.generate`."""
        return generate(self, input_ids, **settings)

    def stream(self, input_ids: Tensor, **settings: Any) -> Any:
        """The ids (B,) of one new position after another; as in `compat.stream`."""
        return stream(self, input_ids, **settings)

    @overload
    def score(self, input_ids: Tensor, *, greedy: Literal[False] = False) -> Tensor: ...

    @overload
    def score(self, input_ids: Tensor, *, greedy: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def score(self, input_ids: Tensor, *, greedy: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities of ids (B, T), each given those before it: (B, T − 1), in nats.

        Their negative mean is the loss, and exp of that the perplexity.

        Args:
            input_ids: (B, T), as a tensor, a NumPy array or lists; up to `n_positions` + 1 ids,
                because the last one is only predicted.
            greedy: return a pair: the log-probabilities, and bool (B, T − 1), whether each id is
                the one that greedy decoding chooses there.

        Raises:
            GenerationError: ids that the vocabulary lacks, or more than `n_positions` + 1.
        """
        given = as_ids(input_ids, self.config.vocab_size)
        (B, T), ids, n = given.shape, given.to(self.device), self.config.n_positions
        if T > n + 1:
            raise GenerationError(
                f"{T} ids; the model has {n} positions, and scores up to {n + 1} ids"
            )
        cache = self.transformer.new_cache(B)
        scores = torch.zeros(B, T - 1, device=self.device)
        is_greedy = torch.zeros(B, T - 1, dtype=torch.bool, device=self.device)
        for start in range(0, T - 1, CHUNK):
            positions = slice(start, min(start + CHUNK, T - 1))
            logits = self.transformer.logits(self.transformer(ids[:, positions], cache, start))
            following = ids[:, 1:][:, positions]  # (B, T of this piece)
            scores[:, positions] = logits.log_softmax(-1).gather(2, following[..., None])[..., 0]
            is_greedy[:, positions] = logits.max(dim=-1).indices == following
        scores, is_greedy = scores.to(given.device), is_greedy.to(given.device)
        return (scores, is_greedy) if greedy else scores


def _usable(device: str | torch.device) -> torch.device:
    """The device, once something was put there.

    Raises:
        ConfigError: it is unknown, or not there.
    """
    if not isinstance(device, str | torch.device):
        raise ConfigError(f"device is {short_repr(device)}; expected a torch.device or its name")
    try:
        there = torch.zeros(1, device=device)
        there.cpu()  # "meta" has nothing to give back
        return there.device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device is {str(device)!r}, which cannot be used: {reason}") from error


def _weights(
    model_or_source: nn.Module | Checkpoint | str | Path,
    name_map: NameMap | None,
    config: GPT2Config | Mapping[str, Any] | None,
) -> tuple[GPT2Config, Read]:
    """The config, and what gives the tensors under Hugging Face's names.

    A safetensors file is mapped: packing its pages makes no other copy of them.
    """
    if isinstance(model_or_source, Checkpoint):
        return model_or_source.config, model_or_source.read
    if not isinstance(model_or_source, nn.Module):
        checkpoint = open_checkpoint(model_or_source)
        checkpoint.mmap = checkpoint.can_be_mapped
        return checkpoint.config, checkpoint.read
    tensors = hf_tensors(model_or_source, name_map)
    found = with_head_of(config_of(model_or_source, config), tensors)
    return found, lambda name: tensors[name].make().clone()  # the model may change
