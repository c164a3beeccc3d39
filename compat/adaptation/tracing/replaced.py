"""Calls of a model in which modules replace parts of its code, which may be inline."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from compat.adaptation.tracing.calling import Wrapped, plain_kernels
from compat.adaptation.tracing.record import lines_of_user, operation_name
from compat.parity.dispatch import DispatchMode


@dataclass(frozen=True)
class WithReplaced(Wrapped):
    """The call of a model with modules in place of parts of its code.

    Args:
        call: calls the model.
        parts: the operations that compute each part's input and its result, as nodes of a graph of
            `call`. Both are tensors of one shape.
        owner: the path of the `nn.ModuleList` that has one module for each part.
    """

    parts: Sequence[tuple[Node, Node]]
    owner: str

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        below_autograd: Any = torch._C._AutoDispatchBelowAutograd  # without a type stub
        names = [tuple(node.meta["operation"] for node in nodes) for nodes in self.parts]
        with plain_kernels(), below_autograd(), _Replacing(names, model.get_submodule(self.owner)):
            return self.call(model, ids)


class _Replacing(DispatchMode):  # type: ignore[no-untyped-call]
    """Passes the result of each part's first operation to its module, and replaces its last."""

    def __init__(self, names: Sequence[tuple[Any, ...]], modules: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.modules = names, modules
        self.operations = Counter[object]()
        self.inputs: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = lines_of_user(sys._getframe(1), WithReplaced.__call__.__code__)
        name = operation_name(self.operations, func, places)
        result = func(*args, **(kwargs or {}))
        for part, (start, end) in enumerate(self.names):
            if name == end and part in self.inputs:
                own = self.modules[part](self.inputs[part])
                result = result.copy_(own) if func._schema.is_mutable else own
            if name == start:
                self.inputs[part] = result
        return result
