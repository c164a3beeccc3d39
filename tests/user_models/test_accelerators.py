"""Code for devices that the machine lacks runs on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2Config, GPT2LMHeadModel

from compat import AdaptError, adapt
from compat.user_code import translated
from compat.user_models import load_target, on_available_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has the device")


def flash_attention() -> Tensor:
    """Only kernels of other devices compute this with dropout."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q = torch.ones(1, 1, 3, 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True)[0, 0, :, 0]


USES: dict[str, Callable[[], Tensor]] = {
    "to": lambda: torch.ones(3).to("cuda"),
    "to a device": lambda: torch.ones(3).to(torch.device("cuda", 0), torch.float32),
    "cuda": lambda: torch.ones(3).cuda(),
    "cuda of a number": lambda: torch.ones(3).cuda(0),
    "a factory": lambda: torch.arange(3, device="cuda:0"),
    "the current device": lambda: torch.arange(3, device=torch.cuda.current_device()),
    "after other calls": lambda: [torch.cuda.set_device(0), torch.ones(3)][1],  # type: ignore[func-returns-value]
    "a kernel": flash_attention,
    "a module": lambda: nn.Linear(2, 3, device="cuda").cuda().bias,
    "a module's to": lambda: nn.Linear(2, 3).to("cuda").bias,
}


def run(use: Callable[[], Tensor]) -> Tensor:
    with translated("the model cannot be built"):
        return use()


@pytest.mark.parametrize("name", USES)
def test_a_missing_device_is_replaced_by_the_cpu(name: str) -> None:
    found, replaced = on_available_device(lambda: run(USES[name]))
    assert replaced and found.device.type == "cpu" and found.shape == (3,)


def test_code_without_a_device_runs_unchanged() -> None:
    calls: list[int] = []
    found, replaced = on_available_device(lambda: calls.append(1) or run(lambda: torch.ones(2)))
    assert not replaced and torch.equal(found, torch.ones(2)) and calls == [1]


def test_code_for_many_processes_gets_a_process_group_of_one() -> None:
    def use() -> Tensor:
        total = torch.full((2,), int(os.environ["WORLD_SIZE"]) * dist.get_world_size())
        dist.all_reduce(total)
        return total.to("cuda")

    found, replaced = on_available_device(lambda: run(use))
    assert replaced and found.tolist() == [1, 1] and not dist.is_initialized()


def test_another_error_is_raised_without_a_second_attempt() -> None:
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise AdaptError("no attention")

    with pytest.raises(AdaptError, match="no attention"):
        on_available_device(fails)
    assert calls == [1]


def test_a_statement_that_needs_a_device_is_executed_again(tmp_path: Path) -> None:
    """A script of which only what the class needs is executed, because its data is missing."""
    file = tmp_path / "train.py"
    file.write_text("""
import torch

scale = torch.ones(3).to("cuda")
text = open("missing.txt").read()


class GPT(torch.nn.Module):
    def forward(self, ids):
        return scale
""")

    def scale() -> Tensor:
        found: Tensor = load_target(f"{file}:GPT", [])().forward(None)
        return found

    found, replaced = on_available_device(scale)
    assert replaced and torch.equal(found, torch.ones(3))


def test_a_device_that_only_a_single_sequence_needs_is_replaced(tiny: Path) -> None:
    """The model fails otherwise before, because it takes ids (T,)."""

    class OfOneSequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = GPT2LMHeadModel(GPT2Config.from_pretrained(tiny))

        def forward(self, ids: Tensor) -> Any:
            (T,) = ids.shape
            return self.model(ids[None] + torch.zeros(T).to("cuda").long()).logits[0]

    adaptation, replaced = on_available_device(lambda: adapt(OfOneSequence(), tiny))
    assert replaced and adaptation
