"""For every form of matrix product, einsum with the detected letters yields the same product."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from compat.adaptation.tracing.contractions import Contraction, contraction

pytestmark = pytest.mark.usefixtures("shared_reference")

Function = Callable[..., Tensor]


class Wrapped(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class Recorder(Interpreter):
    """Run a graph and record the value of every node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> Tensor:
        self.seen[n] = super().run_node(n)
        return self.seen[n]


def found_in(function: Function, *shapes: tuple[int, ...]) -> list[tuple[Contraction, Recorder]]:
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    with warnings.catch_warnings(action="ignore"):  # torch.export warns about its own code
        program = torch.export.export(Wrapped(function), tuple(inputs)).run_decompositions({})
    recorder = Recorder(program.graph_module)
    recorder.run(*inputs)
    for node, value in recorder.seen.items():
        node.meta["shape"] = tuple(value.shape) if isinstance(value, Tensor) else ()
    found = [contraction(node) for node in program.graph.nodes if node.op == "call_function"]
    return [(one, recorder) for one in found if one is not None]


def zero(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


PRODUCTS: list[tuple[str, Function, tuple[tuple[int, ...], ...]]] = [
    ("linear", F.linear, ((3, 4), (5, 4))),
    ("linear 3d", F.linear, ((2, 3, 4), (5, 4))),
    ("linear 4d", F.linear, ((2, 6, 3, 4), (5, 4))),
    ("matmul", torch.matmul, ((3, 4), (4, 5))),
    ("matmul 3d by 2d", torch.matmul, ((2, 3, 4), (4, 5))),
    ("matmul 2d by 3d", torch.matmul, ((3, 4), (2, 4, 5))),
    ("matmul 4d", torch.matmul, ((2, 6, 3, 4), (2, 6, 4, 5))),
    ("matmul 4d by 3d", torch.matmul, ((2, 6, 3, 4), (6, 4, 5))),
    ("matmul one batch for all", torch.matmul, ((2, 6, 3, 4), (1, 6, 4, 5))),
    ("matmul of a vector", torch.matmul, ((4,), (2, 4, 5))),
    ("mm", torch.mm, ((3, 4), (4, 5))),
    ("bmm", torch.bmm, ((2, 3, 4), (2, 4, 5))),
    ("addmm", lambda a, b: torch.addmm(zero(5), a, b), ((3, 4), (4, 5))),
    ("baddbmm", lambda a, b: torch.baddbmm(zero(2, 3, 5), a, b), ((2, 3, 4), (2, 4, 5))),
    ("conv1d", F.conv1d, ((2, 4, 7), (5, 4, 1))),
    ("scores", lambda q, k: torch.einsum("bthd,bshd->bhts", q, k), ((2, 3, 4, 5), (2, 6, 4, 5))),
    ("heads out", lambda z, w: torch.einsum("bqhd,hdc->bqc", z, w), ((2, 3, 4, 5), (4, 5, 6))),
    ("einsum ...", lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), ((2, 3, 4), (2, 4, 5))),
    ("einsum ... once", lambda a, b: torch.einsum("...c,cd->...d", a, b), ((2, 3, 4), (4, 5))),
    ("einsum implicit", lambda a, b: torch.einsum("bij, jk", a, b), ((2, 3, 4), (4, 5))),
    ("einsum unsorted", lambda a, b: torch.einsum("cb,ba", a, b), ((3, 4), (4, 5))),
]


@pytest.mark.parametrize(
    ("function", "shapes"), [pytest.param(f, s, id=name) for name, f, s in PRODUCTS]
)
def test_einsum_with_the_detected_letters_yields_the_same_product(
    function: Function, shapes: tuple[tuple[int, ...], ...]
) -> None:
    [(found, run)] = found_in(function, *shapes)
    equation = f"{found.a_axes},{found.b_axes}->{found.out_axes}"
    product = torch.einsum(equation, run.seen[found.a], run.seen[found.b])
    torch.testing.assert_close(product, run.seen[found.node])
    assert found.axes(found.a) == found.a_axes
    assert found.axes(found.b) == found.b_axes
    summed = set(found.a_axes) & set(found.b_axes) - set(found.out_axes)
    assert set(found.summed) == summed


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mul, ((3, 4), (3, 4))),
        (lambda x, w: F.conv1d(x, w), ((2, 4, 7), (5, 4, 3))),  # reads several positions at once
        (lambda a, b: torch.einsum("ij,jk,kl->il", a, b, b), ((3, 4), (4, 4))),
        (lambda a, b: torch.einsum("ij->ji", a) + b.sum(), ((3, 4), (4, 4))),
        (lambda a, b: a + b, ((3, 4), (3, 4))),
    ],
)
def test_operations_that_are_not_products_of_two_tensors_are_not_detected(
    function: Function, shapes: tuple[tuple[int, ...], ...]
) -> None:
    assert found_in(function, *shapes) == []
