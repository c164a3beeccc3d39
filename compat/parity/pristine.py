"""Whether the reference still computes GPT-2 in a process where other code may have patched torch.

The verdict rests on numbers: the reference's logits are compared with those of `numpy_gpt2` on the
very inputs that a proof uses. A replaced function that changes nothing, or that GPT-2 does not use,
is no reason to refuse. Only once the numbers differ is the process searched for replaced functions,
hooks, modes and settings, to name the cause.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compat.checkpoint import Checkpoint
from compat.errors import CompatError, ParityError, lines
from compat.parity.numpy_gpt2 import Array, logits, projected_logits, to_float64

# The largest error of a position's logits that is rounding, over the RMS of all logits. In half
# precision this sees gross faults alone; there a proof rests on float32 or float64 logits.
ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 5e-5,
    torch.float16: 0.05,
    torch.bfloat16: 0.4,
}
DIRECTIONS = 8  # random projections of the logits that are compared
POSITIONS_AT_ONCE = 64

# Where to look for replaced functions: what a GPT-2 of transformers is computed with.
MODULES = ("math", "torch", "torch._C._nn", "torch._C._VariableFunctions")
PREFIXES = (
    "torch._tensor",
    "torch.nn",
    *(
        f"transformers.{name}"
        for name in (
            "activations",
            "integrations.sdpa_attention",
            "masking_utils",
            "modeling_layers",
            "modeling_utils",
            "models.gpt2",
            "pytorch_utils",
        )
    ),
)
# Packages whose functions are found there as shipped.
PACKAGES = ("torch", "transformers", "huggingface_hub", "safetensors", "tqdm", "typing_extensions")
GENERATED = (*PACKAGES, "namedtuple_")  # modules of functions that were made from strings
# Hooks that torch calls around the forward of every module.
HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


def check_reference(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    runs: Sequence[tuple[Tensor, Mapping[torch.dtype, Tensor]]],
) -> None:
    """Compare logits of the reference with an independent computation of GPT-2 in float64 NumPy.

    Every position of every run is compared, so nothing that these logits prove depends on
    unpatched torch or transformers.

    Args:
        checkpoint: the weights that the reference has.
        dtype: the data type in which the reference holds them.
        runs: ids (B, T), and the logits (B, T, V) that the reference gave for them, by the data
            type in which it was asked to compute, such as float32 and float64.

    Raises:
        ParityError: the logits are not GPT-2's; names what has been replaced in this process.
    """
    found = [(ids, list(given.values())) for ids, given in runs]
    try:
        errors = logit_errors(checkpoint, dtype, found)
    except ParityError as fault:
        raise _untrusted(f"its {fault}") from None
    for (_, given), of_run in zip(runs, errors, strict=True):
        for (asked, one), error in zip(given.items(), of_run, strict=True):
            if one.dtype != asked:
                raise _untrusted(f"its logits are {one.dtype}; expected {asked}")
            if not np.all(error <= ROUNDING[asked]):  # also where it is NaN
                raise _untrusted(_where(error, asked))


def true_logits(checkpoint: Checkpoint, dtype: torch.dtype, ids: Tensor, found: Tensor) -> Tensor:
    """Float64 logits (B, T, V) by NumPy, once the reference's were found to agree with them.

    Args:
        checkpoint: the weights.
        dtype: the data type that they are rounded to before they are used.
        ids: (B, T).
        found: the reference's logits (B, T, V), computed in their own data type.

    Raises:
        ParityError: the reference's logits differ; names what was replaced in this process.
    """
    with np.errstate(all="ignore"):
        truth = logits(checkpoint, dtype, ids)
    right = torch.from_numpy(truth)
    error = (found.double() - right).square().mean(-1).sqrt() / right.square().mean().sqrt()
    if not bool((error <= ROUNDING[found.dtype]).all()):  # also where it is NaN
        raise _untrusted(_where(error.numpy(), found.dtype))
    return right


def logit_errors(
    checkpoint: Checkpoint, dtype: torch.dtype, runs: Sequence[tuple[Tensor, Sequence[Tensor]]]
) -> list[list[Array]]:
    """How far logits are from GPT-2's, computed in float64 NumPy, at every position.

    Args:
        checkpoint: the weights.
        dtype: the data type that they are rounded to before they are used.
        runs: ids (B, T), and logits (B, T, V) for them, of any model and data type.

    Returns:
        For each logits (B, T, V) of each run, errors (B, T): the RMS over the vocabulary, estimated
        from DIRECTIONS random projections, over the RMS of the right logits of that run.

    Raises:
        ParityError: logits of another shape than (B, T, V).
    """
    vocabulary = checkpoint.config.vocab_size
    directions = np.random.default_rng(0).standard_normal((vocabulary, DIRECTIONS))
    with np.errstate(all="ignore"):  # infinite logits are an infinite error, not a warning
        expected = projected_logits(checkpoint, dtype, [ids for ids, _ in runs], directions)
        return [
            [_errors(right, one, directions) for one in given]
            for right, (_, given) in zip(expected, runs, strict=True)
        ]


@contextmanager
def reference_errors() -> Iterator[None]:
    """Turn what a patched reference raises into a ParityError that names what was replaced.

    Where nothing is found to have been replaced, the exception is left as it is.
    """
    try:
        yield
    except CompatError:
        raise
    except Exception as error:
        if not (found := replaced()):
            raise
        raise _untrusted(f"it raises {type(error).__name__}: {error}", found) from error


def _errors(right: Array, found: Tensor, directions: Array) -> Array:
    """The relative error (B, T) of logits (B, T, V), whose projections should be (B, T, K)."""
    expected = [*right.shape[:2], len(directions)]
    if list(found.shape) != expected:
        raise ParityError(f"logits have shape {list(found.shape)}; expected {expected}")
    rows = found.reshape(-1, len(directions))
    projected = np.concatenate(
        [
            to_float64(part, torch.float64) @ directions
            for part in torch.split(
                rows, POSITIONS_AT_ONCE
            )  # float64 copies of a few rows at a time
        ]
    )
    delta = projected.reshape(right.shape) - right
    errors: Array = (np.mean(delta * delta, axis=-1) / np.mean(right * right)) ** 0.5
    return errors


def _where(errors: Array, dtype: torch.dtype) -> str:
    """The largest of the errors (B, T), in words."""
    shown = np.where(np.isnan(errors), np.inf, errors)
    row, position = divmod(int(np.argmax(shown)), errors.shape[1])
    return (
        f"at input_ids[{row}, {position}] its {dtype} logits differ from GPT-2's, computed in "
        f"NumPy, by {errors[row, position]:.2g} of their RMS; rounding stays below "
        f"{ROUNDING[dtype]:.2g}"
    )


def _untrusted(reason: str, found: Sequence[str] | None = None) -> ParityError:
    """The error for a reference that does not compute GPT-2, with the probable causes."""
    found = replaced() if found is None else found
    headline = f"the reference, transformers' GPT-2, cannot be trusted in this process: {reason}."
    if not found:
        return ParityError(
            f"{headline} Something in this process changes what torch or transformers compute, but "
            "no foreign function, hook, mode or setting was found; run the check in a process "
            "without it."
        )
    causes = lines(f"{headline} Not as torch and transformers ship them are:", found)
    return ParityError(
        f"{causes}\nUndo this while compat runs. A change that belongs to your model goes into its "
        "own modules, where it cannot reach the reference."
    )


# Naming the cause.


def replaced(kernels: bool = True) -> list[str]:
    """What in this process is not as torch and transformers ship it, with file and line.

    Without `kernels`, which take most of the time, only Python objects are looked at.

    Functions, methods and classes that come from other files, kernels registered over torch's own,
    global hooks, active modes, and settings that lower the precision. A function replaced by
    another one of torch's own is not seen.
    """
    found = [*_functions(), *(_kernels() if kernels else ()), *_hooks(), *_settings()]
    return list(dict.fromkeys(found))


def _functions() -> Iterator[str]:
    """Attributes of modules and classes whose code lies elsewhere."""
    for name, module in list(sys.modules.items()):
        if name not in MODULES and not name.startswith(PREFIXES):
            continue
        for attribute, value in list(vars(module).items()):
            if place := _foreign(value):
                yield f"{name}.{attribute} is from {place}"
            elif isinstance(value, type) and value.__module__.startswith(PACKAGES[:2]):
                for inner, method in list(vars(value).items()):
                    if place := _foreign(method):
                        yield f"{value.__module__}.{value.__qualname__}.{inner} is from {place}"


# Objects found to be of the packages themselves, by their id, which is theirs while they are here.
_SHIPPED: dict[int, Any] = {}


def _foreign(value: Any) -> str | None:
    """FILE:LINE of a function, method or class that no package of the reference has; else None."""
    if _SHIPPED.get(id(value)) is value:
        return None
    place = _place(value)
    if place is None:
        _SHIPPED[id(value)] = value
    return place


def _place(value: Any) -> str | None:
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, FunctionType):
        file, line = value.__code__.co_filename, value.__code__.co_firstlineno
        generated = file == "<string>" and str(value.__module__).startswith(GENERATED)
        known = generated or file.startswith(_folders())
        return None if known else f"{file}:{line}"
    cls = value if isinstance(value, type) else type(value)
    module = sys.modules.get(cls.__module__)
    place = getattr(module, "__file__", None)
    if module is None or (place is None and cls.__module__ != "__main__"):
        return None  # built in
    known = str(place).startswith(_folders())
    return None if known else f"{place or '__main__'} (class {cls.__qualname__})"


@functools.cache
def _folders() -> tuple[str, ...]:
    """Where the standard library and the packages of the reference are installed."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in PACKAGES]
    places = [Path(file) for file in files if file]
    own = [f"{p.parent}/" if p.name == "__init__.py" else str(p) for p in places]
    library = sysconfig.get_path("stdlib")
    return (f"{library}/", "<frozen ", *own)


def _kernels() -> Iterator[str]:
    """Kernels that Python code outside torch has registered for torch's own operators."""
    try:
        operators = torch._C._dispatch_get_all_op_names()
        dumps = {name: torch._C._dispatch_dump(name) for name in operators if name[:6] == "aten::"}
    except (AttributeError, RuntimeError):  # another version of torch: no names, no list
        return
    for name, dump in dumps.items():
        for line in dump.splitlines():
            key, _, rest = line.partition(": registered at ")
            place = rest.partition(" :: ")[0]
            if ".py:" in place and not place.startswith(_folders()) and "inactive" not in key:
                yield f"operator {name} for {key} is from {place}"


def _hooks() -> Iterator[str]:
    """Forward hooks on all modules, and modes that see every call of this thread."""
    for name in HOOKS:
        for hook in getattr(torch.nn.modules.module, name, {}).values():
            yield f"torch.nn.modules.module.{name} has {_foreign(hook) or hook!r}"
    modes = [
        *torch.overrides._get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
        *torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
    ]
    for mode in modes:
        yield f"the mode {type(mode).__qualname__} is active, from {_foreign(mode) or 'torch'}"


def _settings() -> Iterator[str]:
    """Settings under which float32 is not computed in float32."""
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        yield f"torch.get_float32_matmul_precision() is {precision!r}, not 'highest'"
    if torch.is_autocast_enabled("cpu"):
        yield f"torch.autocast is enabled on the CPU, to {torch.get_autocast_dtype('cpu')}"
    if (dtype := torch.get_default_dtype()) != torch.float32:
        yield f"torch.get_default_dtype() is {dtype}, not torch.float32"
