"""The engine: a GPT-2 with packed weights, for fast generation and scoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, overload

import torch
from torch import Tensor, nn

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.checkpoint.layout import EMBEDDING, HEAD, POSITIONS
from compat.config import GPT2Config, as_device, dtype_name
from compat.decoding import Decoder
from compat.decoding.draft import PATIENCE, ModelDraft, in_8_bits
from compat.decoding.kernels import ACTIVATIONS, PROMPT, fastest
from compat.decoding.matrices import Pack, in_huge_pages
from compat.decoding.native import NATIVE, transformer_class
from compat.decoding.outliers import without_outliers
from compat.decoding.scoring import Score, score_requests
from compat.decoding.speculative import DraftSource, SpeculativeDecoder, prompt_lookup
from compat.decoding.static import StaticDecoder
from compat.decoding.transformer import Read, Transformer
from compat.errors import CheckpointError, ConfigError, GenerationError, short_repr
from compat.export_view import config_of, hf_tensors, with_head_of
from compat.generation import GenerateOptions, generate, stream
from compat.generation.checks import is_integer
from compat.int8_cache import Int8Cache
from compat.layers import as_ids
from compat.name_map import NameMap

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

Precision = Literal["float32", "bfloat16", "int8"]
Speculation = Literal["auto", "int8", "lookup"] | None


class EngineOptions(TypedDict, total=False):
    """The options of an `Engine`, however it is built."""

    dtype: Precision | torch.dtype
    device: str | torch.device
    max_batch: int | None
    speculate: Speculation


class Engine:
    """GPT-2 on packed weights, with the kernels that are fastest on this machine.

    `Engine(model)` takes a dialect's model, or any module with its name map;
    `Engine.from_pretrained(source)` reads a checkpoint. The weights are read and packed once, so
    that later changes of the model have no effect.

    Args:
        model: holds the weights.
        name_map: needed for a module that is not a dialect's model.
        config: needed for a module that has no `config`, because its tensors do not determine
            `n_head` and other fields.
        dtype: "float32", "bfloat16", or "int8": 8-bit weights, bfloat16 keys and values, and the
            rest in float32.
        device: the device. On the CPU the kernels are selected by measurement; other devices use
            torch's own. On a CUDA device, decode steps are captured as CUDA graphs.
        max_batch: largest number of sequences that are decoded together; kernels are selected for
            it. None: any number, with kernels for one sequence.
        speculate: speculative decoding of a single sequence. Draft tokens come from the same
            weights in 8 bits ("int8"), or from prompt lookup ("lookup"): the tokens that followed
            the last tokens earlier in the text. "int8" also uses prompt lookup when its expected
            gain is larger. "auto": "int8" where a forward pass of several tokens computes
            bit-identical logits, which `native.c` does, unless `dtype` is "int8" or `max_batch`
            is above 1. None: no speculative decoding. The generated tokens are the same. The 8-bit
            weights are packed after the first 32 tokens of single sequences.

    Raises:
        ConfigError: the data type or the kind of speculation is unknown, the device cannot be used,
            or there is no config.
        CompatError: the source cannot be loaded, or the map does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name_map: NameMap | None = None,
        config: GPT2Config | Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if isinstance(model, str | Path | Checkpoint):
            raise ConfigError(
                f"model is {short_repr(model)}, but must be a module. Use "
                "Engine.from_pretrained(source) for a checkpoint."
            )
        tensors = hf_tensors(model, name_map)
        self.config = with_head_of(config_of(model, config), tensors)

        def weight(name: str) -> Tensor:
            tied = name == HEAD and name not in tensors
            return tensors[EMBEDDING if tied else name].make().clone()  # the model may change

        self._pack(weight, **options)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | Checkpoint,
        *,
        revision: str | None = None,
        verify: bool = False,
        n_head: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """Return an engine with the weights of a checkpoint.

        A safetensors file is memory-mapped, and the engine may use parts of it in place for as long
        as it exists: do not truncate or overwrite the file.

        Args:
            source: as in `load_pretrained`, or an open checkpoint. For a packed file, `dtype` is by
                default the precision of the file.
            revision, verify, n_head: see `open_checkpoint`.
            options: as in `Engine`.
        """
        checkpoint = open_checkpoint(source, revision=revision, verify=verify, n_head=n_head)
        engine = cls.__new__(cls)
        engine.config = checkpoint.config
        own = checkpoint.packed.precision if checkpoint.packed else "float32"
        engine._pack(checkpoint.read, checkpoint, **cast(EngineOptions, {"dtype": own, **options}))
        return engine

    def _pack(
        self,
        weight: Callable[[str], Tensor],
        checkpoint: Checkpoint | None = None,
        *,
        dtype: Precision | torch.dtype = "float32",
        device: str | torch.device = "cpu",
        max_batch: int | None = None,
        speculate: Speculation = "auto",
    ) -> None:
        """Read the weights by Hugging Face's names and pack them.

        Args:
            weight: reads a tensor.
            checkpoint: the checkpoint from which it reads. None: a model, which may be divided
                among ranks.
        """
        _check_options(dtype, max_batch, speculate)
        precision = dtype_name(dtype)
        self.dtype: Any = precision
        self.max_batch = max_batch
        config, target = self.config, as_device(device)
        self.device = target
        is_int8 = precision == "int8"
        packed = checkpoint.packed if checkpoint else None
        cache = Int8Cache.of(checkpoint) if checkpoint else None

        def fast(precision: str, rows: int) -> Pack:
            return fastest(precision, rows, torch.get_num_threads(), target)

        if speculate == "auto" and (is_int8 or (max_batch or 1) > 1):
            speculate = None
        pack = fast(precision, rows=4 if speculate else min(max_batch or 1, PROMPT))
        if speculate == "auto":
            speculate = "int8" if pack in NATIVE else None
        self.speculate = speculate
        stored = torch.float32 if precision == "float32" else torch.bfloat16

        def read(name: str) -> list[Any]:
            if checkpoint and packed and is_int8:
                if (quantized := packed.quantized(name, checkpoint.mmap)) is not None:
                    return [in_huge_pages(quantized)]
            is_embedding = name == HEAD and config.tie_word_embeddings and not is_int8
            return [] if is_embedding else [weight(name)]

        def on_device(read: Read) -> Read:
            return lambda name: [tensor.to(target) for tensor in read(name)]

        @torch.no_grad()
        def build(read: Read, is_quantized: bool = True) -> Transformer:
            read = on_device(read)
            embedding = read(EMBEDDING)[0].to(stored), read(POSITIONS)[0].to(stored)
            if not is_quantized:
                read = without_outliers(config, embedding, read)
            kind, in_order = transformer_class(pack, target), checkpoint is None
            return kind(config, embedding, read, pack, ACTIVATIONS[precision], in_order)

        if is_int8 and cache:
            transformer = cache.build(build)
        else:
            is_packed = packed is not None and packed.precision == "int8"
            transformer = build(read, is_quantized=not is_int8 or is_packed)
        self.transformer = transformer

        def draft() -> Transformer:  # it must not keep the engine alive
            pack = fast("draft", rows=1)
            if cache:
                with suppress(CheckpointError, OSError):  # it was changed since it was opened
                    return cache.build(lambda read: in_8_bits(transformer, pack, on_device(read)))
            return in_8_bits(transformer, pack)

        self._draft_sources = [DraftSource(prompt_lookup)]
        if speculate == "int8" and not is_int8:
            source = DraftSource(ModelDraft(transformer, draft), patience=PATIENCE)
            self._draft_sources.append(source)

    def decoder(self) -> Decoder:
        """Return a decoder with its own batch, for `generate`, `stream` and the text functions."""
        if self.speculate is None:
            return StaticDecoder(self.transformer, self.max_batch)
        return SpeculativeDecoder(self.transformer, self._draft_sources, self.max_batch)

    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        **options: Unpack[GenerateOptions],
    ) -> Tensor:
        """Continue token ids (B, T); arguments and errors as in `compat.generate`."""
        return generate(self, input_ids, max_new_tokens=max_new_tokens, **options)

    def stream(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Tensor]:
        """Yield the ids (B,) of one position after another; arguments as in `compat.stream`."""
        return stream(self, input_ids, max_new_tokens=max_new_tokens, **options)

    @overload
    def score(self, input_ids: Tensor, *, greedy: Literal[False] = False) -> Tensor: ...

    @overload
    def score(self, input_ids: Tensor, *, greedy: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def score(self, input_ids: Tensor, *, greedy: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return log-probabilities (B, T − 1), in nats, of tokens (B, T) given those before them.

        Their negative mean is the loss, and its exponential the perplexity.

        Args:
            input_ids: (B, T), as a tensor, a NumPy array or lists; up to `n_positions` + 1 tokens,
                because the last token is only predicted.
            greedy: return a pair: the log-probabilities, and bool (B, T − 1), whether each token is
                the one that greedy decoding chooses there.

        Raises:
            GenerationError: ids are not in the vocabulary, or there are more than `n_positions` +
                1.
        """
        ids = as_ids(input_ids, self.config.vocab_size)
        (B, T), n = ids.shape, self.config.n_positions
        if T > n + 1:
            raise GenerationError(
                f"{T} ids were passed, but a model with {n} positions scores up to {n + 1} ids. "
                "Score a longer text in parts."
            )
        scores = torch.zeros(B, max(0, T - 1), device=ids.device)
        is_greedy = torch.zeros_like(scores, dtype=torch.bool)
        requests = [(row[:1], [row[1:]]) for row in ids.cpu()] if T > 1 else []
        for (row, _), score in score_requests(self.transformer, requests):
            scores[row], is_greedy[row] = score.logprobs, score.is_greedy
        return (scores, is_greedy) if greedy else scores

    def score_continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[Score]:
        """Return scores of several continuations of one context, which is processed once.

        Args:
            context: token ids, at least one.
            continuations: token ids of each, of any lengths from 1; with the context up to
                `n_positions` + 1.

        Returns:
            For each continuation, the log-probabilities (T,) of its tokens in nats, and bool (T,),
            whether greedy decoding would choose each token.

        Raises:
            GenerationError: the context or a continuation is empty, or ids are not in the
                vocabulary or more than `n_positions` + 1.
        """
        found = dict(self.score_requests([(context, continuations)]))
        return [found[0, number] for number in range(len(continuations))]

    @torch.no_grad()
    def score_requests(
        self, requests: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]
    ) -> Iterator[tuple[tuple[int, int], Score]]:
        """Yield the scores of continuations of several contexts, in the order of their computation.

        Contexts of similar lengths are processed together. Each score is as in
        `score_continuations`.

        Args:
            requests: contexts with their continuations.

        Yields:
            A pair, the indices of the request and of the continuation in it, and the score.
        """
        checked = [self._checked_request(*request) for request in requests]
        yield from score_requests(self.transformer, checked)

    def _checked_request(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[Tensor]]:
        if not (len(context) and len(continuations) and all(map(len, continuations))):
            raise GenerationError(
                "the context, a continuation or the list of continuations is empty. Pass at "
                "least one continuation, and at least one token in each and in the context. "
                "Start an empty context from the end-of-text token."
            )
        n, T = self.config.n_positions, len(context) + max(map(len, continuations))
        if T > n + 1:
            raise GenerationError(
                f"the context and its longest continuation have {T} ids, but a model with {n} "
                f"positions scores up to {n + 1} ids. Leave out the beginning of the context."
            )
        texts = (
            as_ids([ids], self.config.vocab_size)[0].cpu() for ids in (context, *continuations)
        )
        first, *others = texts
        return first, others


def _check_options(dtype: Any, max_batch: Any, speculate: Any) -> None:
    precision = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(precision, str) or precision not in ("float32", "bfloat16", "int8"):
        raise ConfigError(
            f"dtype is {short_repr(dtype)}, but must be 'float32', 'bfloat16' or 'int8'"
        )
    if speculate is not None and (
        not isinstance(speculate, str) or speculate not in ("auto", "int8", "lookup")
    ):
        raise ConfigError(
            f"speculate is {short_repr(speculate)}, but must be 'auto', 'int8', 'lookup' or None"
        )
    if max_batch is not None and (not is_integer(max_batch) or max_batch < 1):
        raise ConfigError(
            f"max_batch is {short_repr(max_batch)}, but must be an integer of 1 or more, or None"
        )
