"""Models and engines on a GPU compute what they compute on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compat import Engine, generate, load_pretrained
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
