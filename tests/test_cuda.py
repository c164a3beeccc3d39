"""Models and engines on a GPU compute what they compute on the CPU."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from compat import Engine, GenerationError, generate, load_pretrained
from compat.decoding import PlainDecoder, cuda_graphs, decoder_of
from compat.decoding.static import StaticDecoder
from compat.dialects import DIALECTS

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dialect", DIALECTS)
def test_greedy_ids_equal_those_on_the_cpu(dialect: str) -> None:
    ids = torch.arange(10)[None]
    on_cpu = generate(load_pretrained("demo", dialect), ids, max_new_tokens=50, temperature=0)
    model = load_pretrained("demo", dialect, device="cuda")
    assert all(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()])
    on_gpu = generate(model, ids.cuda(), max_new_tokens=50, temperature=0)
    assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_engine_scores_on_a_gpu_match_those_on_the_cpu(dtype: Any) -> None:
    ids = torch.arange(100)[None]
    cpu = Engine.from_pretrained("demo", dtype=dtype)
    gpu = Engine.from_pretrained("demo", dtype=dtype, device="cuda")
    bound = 1e-4 if dtype == "float32" else 0.1  # in nats; not yet measured on a GPU
    assert (gpu.score(ids) - cpu.score(ids)).abs().max() < bound


@pytest.mark.parametrize("speculate", [None, "int8"])
def test_an_engine_on_a_gpu_generates_the_same_ids_as_on_the_cpu(speculate: Any) -> None:
    ids = torch.arange(100)[None]
    cpu = Engine.from_pretrained("demo")
    gpu = Engine.from_pretrained("demo", device="cuda", speculate=speculate)
    expected = generate(cpu, ids, max_new_tokens=50, temperature=0)
    assert torch.equal(generate(gpu, ids, max_new_tokens=50, temperature=0), expected)


PROMPTS = [[5, 17, 60, 8, 1], [44], [9, 0, 0, 71]]


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.02)]
)
@pytest.mark.parametrize("prompts", [PROMPTS, [list(range(100))], [list(range(240))]])
def test_captured_decode_steps_compute_what_a_prefill_computes(
    dtype: Any, bound: float, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "FEWEST_POSITIONS", 8)
    engine = Engine.from_pretrained("demo", dtype=dtype, device="cuda")
    texts = [list(prompt) for prompt in prompts]
    decoder = engine.decoder()
    decoder.start(texts)
    for step in range(12):  # the shortest prompts cross 8 and 16 positions
        for row, text in enumerate(texts):
            text.append(7 * step + row)
        found = decoder.step(torch.tensor([text[-1] for text in texts]))
        expected = engine.decoder().start(texts)
        assert (found - expected).norm() < bound * expected.norm()


def test_a_graph_with_another_positions_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cuda_graphs.DecodeGraph, "_write", lambda self, tokens, _: self.tokens.copy_(tokens)
    )
    engine = Engine.from_pretrained("demo", device="cuda")
    text = list(range(100))
    decoder = engine.decoder()
    decoder.start([text])
    found = decoder.step(torch.tensor([7]))
    expected = engine.decoder().start([[*text, 7]])
    assert (found - expected).norm() > 1e-3 * expected.norm()


def test_threads_decode_at_the_same_time() -> None:
    engine = Engine.from_pretrained("demo", device="cuda")
    prompts = [torch.arange(start, start + 20)[None] for start in range(8)]

    def run(prompt: torch.Tensor) -> torch.Tensor:
        engine.generate(prompt, max_new_tokens=20)  # draws from the global generator
        return engine.generate(prompt, max_new_tokens=60, temperature=0)

    first = Engine.from_pretrained("demo", device="cuda")
    expected = [first.generate(prompt, max_new_tokens=60, temperature=0) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, prompts * 3))
    assert all(map(torch.equal, found, expected * 3))


def test_memory_is_freed_with_the_engine() -> None:
    left = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):  # libraries keep some memory after their first call
            engine = Engine.from_pretrained("demo", device="cuda")
            engine.generate(torch.arange(20)[None], max_new_tokens=10)
            used = torch.cuda.memory_allocated()
            del engine
            left.append(torch.cuda.memory_allocated())
            assert left[-1] < used
    finally:
        gc.enable()
    assert left[2] == left[1]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_non_finite_weights_are_reported_with_their_layer(dialect: str) -> None:
    model = load_pretrained("demo", dialect, device="cuda")
    list(model.parameters())[-3].data.view(-1)[3] = torch.nan
    with pytest.raises(GenerationError, match="not finite"):
        generate(model, torch.arange(10)[None], max_new_tokens=5)


def test_autocast_uses_the_models_own_forward() -> None:
    model = load_pretrained("demo", device="cuda")
    assert isinstance(decoder_of(model), StaticDecoder)
    with torch.autocast("cuda"):
        assert isinstance(decoder_of(model), PlainDecoder)
