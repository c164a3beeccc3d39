"""Run a user's code for other machines: for devices that are missing, or for many processes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compat.errors import AdaptError

Result = TypeVar("Result")

_DEVICE = re.compile(r"(cuda|mps|xpu)(:\d+)?")
# What torch says where a device is used that this machine does not have.
_MISSING = re.compile(
    r"compiled with (CUDA|XPU) enabled|NVIDIA driver|support for mps|MPS backend|'_cuda_\w+'"
    r"|arguments from the '(CUDA|MPS|XPU)' backend|Cannot access accelerator device"
    r"|No available kernel"
)
# What code raises that torchrun has to start, such as `dist.get_world_size()`.
_NO_GROUP = re.compile(
    "Default process group has not been initialized|KeyError: '(WORLD_SIZE|(LOCAL_)?RANK)'"
)
# Functions of torch.cuda in the place of those that need a device.
_IDLE: dict[str, Any] = {
    "synchronize": lambda *_, **__: None,
    "set_device": lambda *_, **__: None,
    "reset_peak_memory_stats": lambda *_, **__: None,
    "current_device": lambda: 0,
}


def on_available_device(run: Callable[[], Result]) -> tuple[Result, bool]:
    """Return what `run` returns, and whether the CPU had to replace missing devices.

    Code that needs a process group gets one of this process alone.

    Raises:
        AdaptError: `run` raised it for another reason.
    """
    try:
        return run(), False
    except AdaptError as error:
        is_alone = dist.is_available() and not dist.is_initialized()
        if is_alone and _NO_GROUP.search(str(error)):
            with _process_group():
                return on_available_device(run)
        if not needs_a_device(error):
            raise
    with _OnCpu(), patch.multiple(torch.cuda, **_IDLE), _with_math_kernel():
        return run(), True


def needs_a_device(error: BaseException) -> bool:
    """Return whether an error is that of torch where a device is missing."""
    return _MISSING.search(str(error)) is not None


@contextlib.contextmanager
def _with_math_kernel() -> Iterator[None]:
    """Let scaled_dot_product_attention use its math kernel where code selects another alone.

    An example is `sdpa_kernel(SDPBackend.FLASH_ATTENTION)` with dropout, which a CPU lacks.
    """
    select, before = torch._C._set_sdp_use_math, torch._C._get_math_sdp_enabled()
    try:
        with patch.object(torch._C, "_set_sdp_use_math", lambda enabled: select(True)):
            yield
    finally:
        select(before)


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Run the body in a process group of this process alone, and with torchrun's variables."""
    with patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class _OnCpu(TorchFunctionMode):
    """Replaces the devices in the arguments of torch's functions by the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        named = {name: _available(value) for name, value in (kwargs or {}).items()}
        if isinstance(named.get("device"), int):  # the number of a device
            named["device"] = "cpu"
        return func(*map(_available, args), **named)


def _available(value: Any) -> Any:
    """Return the CPU for a device that is an accelerator; any other value unchanged."""
    name = str(value) if isinstance(value, (str, torch.device)) else ""
    return type(value)("cpu") if _DEVICE.fullmatch(name) else value
