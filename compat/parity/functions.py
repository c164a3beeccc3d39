"""Functions of token ids, such as a GPT-2 in NumPy or JAX, as modules that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from compat.errors import CompatError, ParityError, described, listed
from compat.parity.trace import Trace
from compat.tap import BLOCK_TAPS
from compat.user_code import exception_summary


class FunctionModule(nn.Module):
    """A module that calls a function with the ids as a NumPy array of int64, (B, T).

    Args:
        function: returns logits (B, T, V), an object with `logits`, or arrays by the name of their
            tap with "logits" among them.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        found = call_function(self.function, ids)
        if "logits" not in found:
            raise ParityError(
                f"the function returned {listed(list(found)) or 'no array'}, but must return "
                "logits."
            )
        return as_tensor("logits", found["logits"])

    def trace(self, ids: Tensor, expected: Trace) -> Trace:
        """Return the taps that the function returns for ids, in execution order and in float32.

        Raises:
            ParityError: an array has an unknown name or another shape than its tap.
        """
        found: Trace = {}
        for name, value in call_function(self.function, ids).items():
            tensor = as_tensor(name, value)
            block, _, last = name.rpartition(".")
            if last == "qkv" and f"{block}.q" in expected:  # side by side, as in golden files
                parts = tensor.chunk(3, dim=-1)
                found |= {f"{block}.{q}": part for q, part in zip("qkv", parts, strict=True)}
            else:
                found[name] = tensor
        if unknown := [name for name in found if name not in expected]:
            raise ParityError(
                f"the function returned {listed(unknown)}, which is not a tap. A block has "
                f"{', '.join(BLOCK_TAPS)}, as in h.0.act."
            )
        for name, value in found.items():
            if value.shape != expected[name].shape:
                raise ParityError(
                    f"tap {name} has shape {list(value.shape)}, but must have "
                    f"{list(expected[name].shape)}. Return it with these axes."
                )
        return {name: found[name].to(expected[name].dtype) for name in expected if name in found}


def call_function(function: Callable[[Any], Any], ids: Tensor) -> dict[str, object]:
    """Return the arrays that a function returns for ids (B, T), by name.

    A module is called with a tensor, any other function with a NumPy array of its own.

    Raises:
        ParityError: the function raised an exception.
    """
    is_module = isinstance(function, nn.Module)
    try:
        found = function(ids.clone() if is_module else ids.numpy().astype(np.int64))
    except (KeyboardInterrupt, CompatError):
        raise
    except BaseException as error:  # such as exit() in the user's code
        name = getattr(function, "__name__", type(function).__name__)
        summary = exception_summary(error, raised_by=f"the function {name}").rstrip(".")
        raise ParityError(
            f"{summary}. It is called with ids, a {'tensor' if is_module else 'NumPy array'} "
            f"{list(ids.shape)} of int64, and must return logits, or arrays by tap."
        ) from error
    return (
        dict(found) if isinstance(found, Mapping) else {"logits": getattr(found, "logits", found)}
    )


def as_tensor(name: str, value: object) -> Tensor:
    """Return an array of any library as a tensor on the CPU.

    Args:
        name: the array's name, for messages.
        value: a tensor, or anything with `__array__` or `__dlpack__`.

    Raises:
        ParityError: it is none of these, or does not hold floating-point numbers.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
    elif hasattr(value, "__array__"):
        tensor = tensor_of(name, np.asarray(value))
    elif hasattr(value, "__dlpack__"):
        tensor = from_dlpack(value).cpu()
    else:
        raise ParityError(
            f"{name} is {described(value)}, but must be an array, such as one of NumPy, torch or "
            "JAX."
        )
    if not tensor.is_floating_point():
        raise ParityError(
            f"{name} holds {tensor.dtype} values, but must hold floating-point numbers."
        )
    return tensor


def tensor_of(name: str, array: NDArray[Any]) -> Tensor:
    """Return a NumPy array of any byte order and memory layout as a tensor with memory of its own.

    Two raw bytes per value are bfloat16, as NumPy stores the type of `ml_dtypes`.

    Raises:
        ParityError: the array does not hold numbers.
    """
    check_kind(name, array.dtype)
    kind, size = array.dtype.kind, array.dtype.itemsize
    if is_bfloat16(array.dtype):
        bits = np.ascontiguousarray(array).view(np.int16).reshape(array.shape)
        return torch.from_numpy(bits.copy()).view(torch.bfloat16)
    if kind == "u" and size > 1:
        array = array.astype(np.int64)
    elif kind == "f" and size > 8:
        array = array.astype(np.float64)
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(native.reshape(array.shape).copy())


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether values are bfloat16, which NumPy has no type for."""
    raw = dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None
    return raw or dtype.name == "bfloat16"


def check_kind(name: str, dtype: np.dtype[Any]) -> None:
    """Raise an error unless an array of this type holds numbers.

    Raises:
        ParityError: it holds Python objects, text, complex numbers or records.
    """
    if dtype.kind not in "fiub" and not is_bfloat16(dtype):
        what = "Python objects" if dtype.kind == "O" else f"the type {str(dtype)[:60]}"
        raise ParityError(
            f"{name} holds {what}, but must hold numbers. Save the array as float32, as with "
            "array.astype(numpy.float32)."
        )
