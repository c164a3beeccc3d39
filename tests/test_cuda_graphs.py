"""What a CUDA graph captures, and when, on the CPU: each replay runs the captured step again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from compat import load_pretrained
from compat.decoding import cuda_graphs
from compat.decoding.cuda_graphs import CudaTransformer
from compat.decoding.draft import weights_of
from compat.decoding.fast_path import transformer_of
from compat.decoding.matrices import Blas
from compat.decoding.static import StaticDecoder
from compat.decoding.transformer import Transformer
from tests.conftest import MakeCheckpoint

PROMPTS = [[5, 17, 60, 8, 1, 90, 33], [44], [9, 0, 0, 71]]
TOKENS = [[3, 1, 4], [1, 5, 9], [2, 6, 5]]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The results of all captured steps."""
    results: list[Tensor] = []

    def captured(step: Callable[[], Tensor], device: torch.device) -> tuple[object, Tensor]:
        result = step()
        results.append(result)
        return (lambda: result.copy_(step())), result

    monkeypatch.setattr(cuda_graphs, "captured", captured)
    yield results


@pytest.fixture
def both(make_checkpoint: MakeCheckpoint) -> tuple[CudaTransformer, Transformer]:
    plain = transformer_of(load_pretrained(make_checkpoint(n_positions=64), "conv1d"))
    embedding = plain.wte, plain.wpe
    return CudaTransformer(plain.config, embedding, weights_of(plain), Blas, torch.float32), plain


def decoded(transformer: Transformer, prompts: list[list[int]]) -> list[Tensor]:
    """Return the logits of a prefill and three decode steps."""
    decoder = StaticDecoder(transformer)
    B = len(prompts)
    return [decoder.start(prompts), *(decoder.step(torch.tensor(ids[:B])) for ids in TOKENS)]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], [[5, 6], [7, 8]]])
def test_replayed_steps_compute_what_the_transformer_computes(
    both: tuple[CudaTransformer, Transformer], captures: list[Tensor], prompts: list[list[int]]
) -> None:
    with_graphs, plain = both
    found, expected = decoded(with_graphs, prompts), decoded(plain, prompts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(captures) == 1  # one graph for all steps


def test_a_step_that_ignores_its_inputs_is_noticed(
    both: tuple[CudaTransformer, Transformer],
    captures: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_graphs, plain = both
    write = cuda_graphs.DecodeGraph._write
    monkeypatch.setattr(cuda_graphs.DecodeGraph, "_write", lambda *_: None)
    found, expected = decoded(with_graphs, PROMPTS), decoded(plain, PROMPTS)
    assert all(
        (a - b).norm() > 0.01 * b.norm() for a, b in zip(found[1:], expected[1:], strict=True)
    )
    monkeypatch.setattr(cuda_graphs.DecodeGraph, "_write", write)
    torch.testing.assert_close(decoded(with_graphs, PROMPTS), expected, rtol=1e-5, atol=1e-5)


def test_longer_texts_and_smaller_batches_have_graphs_of_their_own(
    both: tuple[CudaTransformer, Transformer],
    captures: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "FEWEST_POSITIONS", 4)
    found = []
    for transformer in both:
        decoder = StaticDecoder(transformer)
        logits = [decoder.start([*PROMPTS, [2]])]
        for ended in ([], [1], [0, 2]):
            logits.append(decoder.step(torch.full((len(logits[-1]),), 7)))
            rows = [row for row in range(len(logits[-1])) if row not in ended]
            decoder.keep(torch.tensor(rows))
            logits.append(decoder.step(torch.arange(len(rows))))
        found.append(logits)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    # The longest text has 7 to 12 tokens, until the one of 4 to 8 remains alone.
    assert [len(result) for result in captures] == [4, 4, 1]


def test_the_next_text_uses_the_cache_and_its_graphs_again(
    both: tuple[CudaTransformer, Transformer], captures: list[Tensor]
) -> None:
    with_graphs, plain = both
    decoded(with_graphs, [[1] * 40, [2] * 40, [3] * 40])  # which leaves its keys and values
    torch.testing.assert_close(
        decoded(with_graphs, PROMPTS), decoded(plain, PROMPTS), rtol=1e-5, atol=1e-5
    )
    assert len(captures) == 1
    with_graphs.new_cache(3).kv.fill_(torch.nan)
    torch.testing.assert_close(
        decoded(with_graphs, PROMPTS), decoded(plain, PROMPTS), rtol=1e-5, atol=1e-5
    )


def test_two_texts_at_once_have_two_caches(
    both: tuple[CudaTransformer, Transformer], captures: list[Tensor]
) -> None:
    with_graphs, plain = both
    decoded(with_graphs, PROMPTS[:1])
    decoders = [StaticDecoder(with_graphs), StaticDecoder(with_graphs)]
    expected = [decoded(plain, [prompt]) for prompt in PROMPTS[:2]]
    found = [[decoder.start([prompt])] for decoder, prompt in zip(decoders, PROMPTS, strict=False)]
    for ids in TOKENS:
        for decoder, logits in zip(decoders, found, strict=True):
            logits.append(decoder.step(torch.tensor(ids[:1])))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(captures) == 2
