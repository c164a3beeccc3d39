"""The models on a GPU."""

from __future__ import annotations

import pytest
import torch

from compat import generate, load_pretrained
from compat.dialects import DIALECTS

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dialect", DIALECTS)
def test_greedy_ids_are_those_of_the_cpu(dialect: str) -> None:
    ids = torch.arange(10)[None]
    on_cpu = generate(load_pretrained("demo", dialect), ids, max_new_tokens=50, temperature=0)
    model = load_pretrained("demo", dialect, device="cuda")
    assert all(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()])
    on_gpu = generate(model, ids.cuda(), max_new_tokens=50, temperature=0)
    assert torch.equal(on_gpu.cpu(), on_cpu)
