"""Detection of changes to torch and transformers by other code in this process.

The verdict on the reference rests on numbers, see `compat.parity.reference`: a replaced function
that changes no result, or that GPT-2 does not use, is allowed. This module names the cause where
the numbers differ.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch

from compat.errors import CompatError, ParityError, lines

# The modules that a GPT-2 of transformers is computed with, in which functions may be replaced.
MODULES = ("math", "torch", "torch._C._nn", "torch._C._VariableFunctions")
PREFIXES = (
    "torch._tensor",
    "torch.nn",
    "transformers.activations",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "transformers.models.gpt2",
    "transformers.pytorch_utils",
)
# Packages from which these modules take functions.
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "tqdm",
    "typing_extensions",
)
GENERATED = (*PACKAGES, "namedtuple_")  # modules whose functions are compiled from strings
# Hooks that torch calls around the forward pass of every module.
HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


def find_patches(kernels: bool = True) -> list[str]:
    """Describe every change to torch and transformers in this process, with file and line.

    These are functions, methods and classes from other files, kernels registered over torch's own,
    global hooks, active modes, and settings that lower the precision. A function that was replaced
    by another one of torch's own is not found.

    Args:
        kernels: whether to search the kernels too, which takes most of the time.
    """
    found = [*_functions(), *(_kernels() if kernels else ()), *_hooks(), *_settings()]
    return list(dict.fromkeys(found))


def untrusted_reference(reason: str, patches: Sequence[str] | None = None) -> ParityError:
    """Return the error for a reference that does not compute GPT-2.

    Args:
        reason: what is wrong with the reference.
        patches: the probable causes; None searches for them.
    """
    patches = find_patches() if patches is None else patches
    headline = f"the reference, transformers' GPT-2, cannot be trusted in this process: {reason}."
    if not patches:
        return ParityError(
            f"{headline} No replaced function, hook, mode or setting was found. Run the check in a "
            "process without the code that changes torch or transformers."
        )
    causes = lines(f"{headline} These changes to torch and transformers were found:", patches)
    return ParityError(
        f"{causes}\nUndo them while compat runs. Move a change that belongs to your model into its "
        "own modules, where it does not affect the reference."
    )


@contextmanager
def explain_exceptions() -> Iterator[None]:
    """Turn an exception of a patched reference into a ParityError that names the patches.

    If there are no patches, the exception is raised unchanged, and so are compat's own, unless
    `compat.parity.trace` raised them for an exception of the model.
    """
    try:
        yield
    except Exception as error:
        original = error.__cause__ if isinstance(error, ParityError) else error
        if original is None or isinstance(original, CompatError):
            raise
        patches = find_patches()
        if not patches:
            raise
        reason = f"it raises {type(original).__name__}: {original}"
        raise untrusted_reference(reason, patches) from original


def _functions() -> Iterator[str]:
    """Yield attributes of modules and classes whose code is in other files."""
    seen = set[int]()  # ids of classes; most are attributes of many modules
    for name, module in list(sys.modules.items()):
        if name not in MODULES and not name.startswith(PREFIXES):
            continue
        for attribute, value in list(vars(module).items()):
            if place := _foreign_place(value):
                yield f"{name}.{attribute} is from {place}"
            elif isinstance(value, type) and id(value) not in seen:
                seen.add(id(value))
                if not value.__module__.startswith(PACKAGES[:2]):
                    continue
                for inner, method in list(vars(value).items()):
                    if place := _foreign_place(method):
                        yield f"{value.__module__}.{value.__qualname__}.{inner} is from {place}"


# Objects that were found to belong to the packages, by id. Each is kept alive, so that its id
# cannot become that of another object.
_OWN: dict[int, Any] = {}


def _foreign_place(value: Any) -> str | None:
    """Return FILE:LINE of a function, method or class that is not from the packages, or None."""
    if _OWN.get(id(value)) is value:
        return None
    place = _find_foreign_place(value)
    if place is None:
        _OWN[id(value)] = value
    return place


def _find_foreign_place(value: Any) -> str | None:
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, FunctionType):
        file, line = value.__code__.co_filename, value.__code__.co_firstlineno
        generated = file == "<string>" and str(value.__module__).startswith(GENERATED)
        return None if generated or file.startswith(_folders()) else f"{file}:{line}"
    cls = value if isinstance(value, type) else type(value)
    module = sys.modules.get(cls.__module__)
    path = getattr(module, "__file__", None)
    if module is None or (path is None and cls.__module__ != "__main__"):
        return None  # built in
    own = str(path).startswith(_folders())
    return None if own else f"{path or '__main__'} (class {cls.__qualname__})"


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return where the standard library and the packages are installed."""
    specs = [find_spec(name) for name in PACKAGES]  # some are imported later
    paths = [Path(spec.origin) for spec in specs if spec and spec.origin]
    folders = [f"{p.parent}/" if p.name == "__init__.py" else str(p) for p in paths]
    return (f"{sysconfig.get_path('stdlib')}/", "<frozen ", *folders)


def _kernels() -> Iterator[str]:
    """Yield kernels that Python code outside torch has registered for torch's own operators."""
    try:
        operators = torch._C._dispatch_get_all_op_names()
        dumps = {name: torch._C._dispatch_dump(name) for name in operators if name[:6] == "aten::"}
    except (AttributeError, RuntimeError):  # these functions are not public, and may change
        return
    for name, dump in dumps.items():
        for line in dump.splitlines():
            key, _, rest = line.partition(": registered at ")
            place = rest.partition(" :: ")[0]
            if ".py:" in place and not place.startswith(_folders()) and "inactive" not in key:
                yield f"operator {name} for {key} is from {place}"


def _hooks() -> Iterator[str]:
    """Yield forward hooks on all modules, and modes that intercept all calls in this thread."""
    for name in HOOKS:
        for hook in getattr(torch.nn.modules.module, name, {}).values():
            yield f"torch.nn.modules.module.{name} has {_foreign_place(hook) or hook!r}"
    modes = [
        *torch.overrides._get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
        *torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
    ]
    for mode in modes:
        place = _foreign_place(mode) or "torch"
        yield f"the mode {type(mode).__qualname__} is active, from {place}"


def _settings() -> Iterator[str]:
    """Yield settings under which float32 is not computed in float32."""
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        yield f"torch.get_float32_matmul_precision() is {precision!r}, not 'highest'"
    if torch.is_autocast_enabled("cpu"):
        yield f"torch.autocast is enabled on the CPU, to {torch.get_autocast_dtype('cpu')}"
    if (dtype := torch.get_default_dtype()) != torch.float32:
        yield f"torch.get_default_dtype() is {dtype}, not torch.float32"
