"""Activation functions by name, and which of them a model computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from compat.adaptation.mapping.linear_maps import function_between, token_view
from compat.adaptation.tracing.graph import Graph, kind
from compat.config import GPT2Config

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "relu_squared": lambda x: F.relu(x).square(),
    "mish": F.mish,
    "softplus": F.softplus,
    "selu": F.selu,
}
ALIASES = {
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "swish": "silu",
}
# Activations with a code of their own where the tanh approximation of GELU is expected.
CODE_OF = {"gelu": "erf_gelu", "relu": "relu", "silu": "silu"}


def canonical_activation(config: GPT2Config) -> str:
    """Return the name in `ACTIVATIONS` of the checkpoint's activation."""
    return ALIASES.get(config.activation_function, config.activation_function)


def activation_code(name: str, expected: str) -> str:
    """Return the code of an activation that is not the expected one."""
    own = CODE_OF.get(name) if expected == "gelu_new" else None
    return own or "other_activation"


@dataclass(frozen=True)
class Activation:
    """The function between the projections of the MLP.

    Args:
        name: as in `ACTIVATIONS`; None if it is unknown.
        function: what it computes; None if it could not be measured.
    """

    name: str | None
    function: Callable[[Tensor], Tensor] | None


def called_activation(graph: Graph, nodes: list[Node]) -> tuple[Activation, list[Node]]:
    """Return which function other than the tanh approximation these nodes call, and where."""
    for name in ("gelu", "relu", "silu"):
        calls = [node for node in nodes if node in graph.live and kind(node) == name]
        exact = [node for node in calls if node.kwargs.get("approximate") != "tanh"]
        if exact:
            return Activation(name, ACTIVATIONS[name]), exact
    return Activation(None, None), []


def activation_of(graph: Graph, start: Node, end: Node) -> Activation:
    """Measure the activation between two nodes on values from −6 to 6.

    Where other values change which experts run, the function that is called is returned instead.
    """
    source, target = token_view(graph, start), token_view(graph, end)
    if source is None or target is None or source.index.shape != target.index.shape:
        return Activation(None, None)
    measured = function_between(graph, source, target)
    x = torch.linspace(-6, 6, source.index.numel(), dtype=torch.float64)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    x = x.view(source.index.shape)
    try:
        y = measured(x)
    except RuntimeError:
        return called_activation(graph, graph.between([end], [start]))[0]
    slope = -measured(torch.full_like(x, -1.0)).mean().item()

    def leaky_relu(x: Tensor) -> Tensor:
        return F.leaky_relu(x, slope)

    known = {**ACTIVATIONS, f"leaky_relu with slope {slope:.4g}": leaky_relu}
    errors = {name: (y - function(x)).abs().max().item() for name, function in known.items()}
    best = min(errors, key=lambda name: errors[name])
    if errors[best] < 2e-6:
        return Activation(best, known[best])
    for name in ACTIVATIONS.keys() - {"identity"}:
        values = ACTIVATIONS[name](x)
        factor = ((y * values).sum() / values.square().sum()).item()
        if torch.allclose(y, factor * values, atol=2e-6):
            return Activation(f"{name} times {factor:.4g}", measured)
    return Activation(None, measured)
