"""What can be adapted at all, asked before anything is run or written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from compat.errors import AdaptError, listed


def check_model(model: object) -> None:
    """Refuse what is not a module with parameters of one data type on the CPU.

    Raises:
        AdaptError: saying what it is, and what to pass instead.
    """
    if not isinstance(model, nn.Module):
        raise AdaptError(f"expected a model, an nn.Module, but got {_described(model)}")
    name, parameters = type(model).__name__, dict(model.named_parameters())
    if any(isinstance(p, nn.UninitializedParameter) for p in parameters.values()):
        raise AdaptError(
            f"{name} has lazy modules, whose parameters have no shape yet; call it on ids first"
        )
    if not parameters:
        raise AdaptError(
            f"{name} has no parameters that the checkpoint could be loaded into; expected weights "
            "in nn.Parameter, and modules in nn.ModuleList rather than in a list"
        )
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) != 1:
        raise AdaptError(
            f"the model's parameters are {listed(sorted(map(str, dtypes)))}; expected one data "
            "type; convert it first, as with model.float()"
        )
    devices = {parameter.device for parameter in parameters.values()} - {torch.device("cpu")}
    if devices:
        raise AdaptError(
            f"{name} has parameters on {listed(sorted(map(str, devices)))}; expected all on the "
            "CPU; build it there, or move it with model.cpu()"
        )


def _described(value: object) -> str:
    """What was passed, and what to pass instead."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        return f"the class {value.__name__}; build it first, as with {value.__name__}()"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {len(value)} entries; load it into its model first"
    if callable(value):
        named = getattr(value, "__name__", type(value).__name__)
        return f"the function {named}; its weights can only be found in an nn.Module"
    return f"a value of type {type(value).__name__}"
