"""Run a user's code whose devices, such as `.to("cuda")`, this machine does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compat.errors import AdaptError

Result = TypeVar("Result")

_DEVICE = re.compile(r"(cuda|mps|xpu)(:\d+)?")
# What torch says where a device is used that this machine does not have.
_MISSING = re.compile(r"compiled with (CUDA|XPU) enabled|NVIDIA driver|support for mps|MPS backend")


def on_available_device(run: Callable[[], Result]) -> tuple[Result, bool]:
    """What `run` returns, and whether it only succeeded with the CPU in place of missing devices.

    Raises:
        AdaptError: `run` raised it for another reason.
    """
    try:
        return run(), False
    except AdaptError as error:
        if not _MISSING.search(str(error)):
            raise
    with _OnCpu():
        return run(), True


class _OnCpu(TorchFunctionMode):
    """Replaces the devices in the arguments of torch's functions by the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        named = {name: _available(value) for name, value in (kwargs or {}).items()}
        return func(*map(_available, args), **named)


def _available(value: Any) -> Any:
    """The CPU for a device that is an accelerator; any other value unchanged."""
    name = str(value) if isinstance(value, (str, torch.device)) else ""
    return type(value)("cpu") if _DEVICE.fullmatch(name) else value
