"""A model as a graph of ATen operations whose nodes know their parameters and source lines."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compat.rearrange import Affine, WeightNorm
from compat.user_code import is_users

aten: Any = torch.ops.aten

Values = Mapping[Node, Tensor]


# Operations that only move elements, or copy them: the value is that of their first argument.
MOVES = frozenset(
    """
    _reshape_alias _to_copy _unsafe_view alias alias_copy clone contiguous detach dropout expand
    expand_as flatten lift_fresh lift_fresh_copy movedim mT permute reshape squeeze swapaxes t
    t_copy to transpose unflatten unsqueeze view view_as native_dropout _conj numpy_T
    """.split()
)


# Results that depend on the shape of their arguments, never on the values.
SHAPE_ONLY = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split()
)


@dataclass(frozen=True)
class Place:
    """A line of the author's source."""

    file: str
    line: int
    function: str = ""

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True)
class Derived:
    """A weight that is computed from parameters alone, such as `1 + gain`."""

    names: tuple[str, ...]
    values: tuple[Tensor, ...]  # of the parameters, in the memory of the model's own
    op: Affine | WeightNorm


@dataclass
class Graph:
    """The functional graph of `logits = model(input_ids)`, and how to run pieces of it.

    Args:
        nodes: in execution order.
        values: of the placeholders and constants: parameters, buffers.
        names: the parameter of a placeholder, as in `model.named_parameters()`.
        buffers: the same for buffers.
        example: the ids that it was traced with.
        stopped: which tracers could not follow the code, and at which line.
        dropouts: nodes that drop values though the model is in eval mode; `run` drops nothing.
        input: the node of the ids, (B, T).
        output: the node of the logits.
        derived: placeholders of weights that the model computes from its parameters: the names of
            these, and how.
        shape: (B, T) of the ids that it was traced with; it runs on no other shape.
    """

    nodes: list[Node]
    values: dict[Node, Tensor]
    names: dict[Node, str]
    input: Node
    output: Node
    shape: tuple[int, int]
    buffers: dict[Node, str]
    dropouts: list[Node]
    example: Tensor  # ids
    stopped: list[str] = field(default_factory=list)
    derived: dict[Node, Derived] = field(default_factory=dict)

    @cached_property
    def order(self) -> dict[Node, int]:
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def live(self) -> set[Node]:
        """Nodes whose value depends on the ids, not only on their shape."""
        live = {self.input}
        for node in self.nodes:
            if kind(node) not in SHAPE_ONLY and any(a in live for a in node.all_input_nodes):
                live.add(node)
        return live

    @cached_property
    def ancestors(self) -> dict[Node, set[Node]]:
        """For every live node, the live nodes that it is computed from."""
        found: dict[Node, set[Node]] = {}
        for node in self.nodes:
            if node in self.live:
                above = [a for a in node.all_input_nodes if a in self.live]
                found[node] = set(above).union(*(found[a] for a in above))
        return found

    @cached_property
    def parameters_of(self) -> dict[Node, frozenset[Node]]:
        """For every dead node, such as a transposed weight, the parameters that it is made of."""
        found: dict[Node, frozenset[Node]] = {}
        for node in self.nodes:
            if node in self.names:
                found[node] = frozenset([node])
            elif node not in self.live:
                above = (found.get(a, frozenset()) for a in node.all_input_nodes)
                found[node] = frozenset().union(*above)
        return found

    @cached_property
    def time_first(self) -> set[Node]:
        """Nodes whose first axis holds all tokens with the time outside: t·B + b, not b·T + t.

        Found by changing the first sequence, with parameters at random, and looking which rows
        change.
        """
        B, T = self.shape
        merged = [n for n in self.nodes if n in self.live and size(n)[:1] == (B * T,)]
        if not merged:
            return set()
        generator = torch.Generator().manual_seed(0)
        random = {
            node: torch.randn(self.values[node].shape, generator=generator, dtype=torch.float64)
            for node in self.names
        }
        one, two = self.example, self.example.clone()
        two[0] = one[0].roll(1)
        before, after = (
            self.run(merged, {self.input: ids}, random.__getitem__, finite=True)
            for ids in (one, two)
        )
        found = set()
        for node, x, y in zip(merged, before, after, strict=True):
            changed = (x != y).reshape(B * T, -1).any(1)
            if not changed[:T].all() and changed[::B].all():
                found.add(node)
        return found

    def parameter_names(self, node: Node) -> tuple[str, ...]:
        """The parameters behind a placeholder."""
        return self.derived[node].names if node in self.derived else (self.names[node],)

    def derive_again(self) -> None:
        """Compute the derived weights from the values that the parameters have now."""
        for node, found in self.derived.items():
            self.values[node] = found.op.save(found.values)

    def forget(self) -> None:
        """What was found out about the graph does not hold any more: it was changed."""
        for name in ("order", "live", "ancestors", "parameters_of", "time_first"):
            self.__dict__.pop(name, None)

    def take_over(self) -> None:
        """Go on with the nodes that the torch.fx graph has after it was rewritten."""
        self.nodes = [node for node in self.output.graph.nodes if node.op != "output"]
        self.forget()

    def copy(self, node: Node, user: Node) -> Node:
        """A node of its own for what one of the node's users reads."""
        with node.graph.inserting_before(user):
            made = node.graph.call_function(aten.clone.default, (node,))
        made.meta = dict(node.meta)
        self.nodes.insert(self.nodes.index(user), made)
        self.forget()
        return made

    def between(self, ends: Iterable[Node], cuts: Iterable[Node]) -> list[Node]:
        """The nodes, dead ones too, that `ends` are computed by once the cuts are given."""
        cuts, stack, seen = set(cuts), list(ends), set()
        while stack:
            node = stack.pop()
            if node not in seen and node not in cuts:
                seen.add(node)
                stack += node.all_input_nodes
        return sorted(seen, key=self.order.__getitem__)

    def parameters_between(self, ends: Iterable[Node], cuts: Iterable[Node]) -> list[Node]:
        return [node for node in self.between(ends, cuts) if node in self.names]

    def run(
        self,
        ends: Iterable[Node],
        given: Values,
        parameters: Callable[[Node], Tensor] | None = None,
        double: bool = True,
        finite: bool = False,
    ) -> list[Tensor]:
        """The values of `ends`, computed from the given ones; in float64 unless `double` is False.

        Args:
            ends: the nodes wanted.
            given: values that are taken instead of computing them.
            parameters: instead of the model's own.
            double: compute in float64, whatever the graph says.
            finite: go on with zeros where NaN comes out.
        """
        ends, env = list(ends), dict(given)
        env.setdefault(self.input, self.example)
        for node in self.between(ends, given):
            if node in self.names and parameters is not None:
                env[node] = parameters(node)
            elif node in self.values:
                env[node] = _double(self.values[node]) if double else self.values[node]
            elif node.op == "call_function":
                env[node] = call(node, env, double)
                if finite and isinstance(env[node], Tensor) and env[node].is_floating_point():
                    env[node] = env[node].nan_to_num()
        return [env[node] for node in ends]

    def place(self, node: Node) -> Place | None:
        """The innermost line of the author's, not torch's, that computed a node."""
        places = self.places(node)
        return places[-1] if places else None

    def places(self, node: Node) -> list[Place]:
        """The lines of the author's that led to a node, the outermost first."""
        trace = node.meta.get("stack_trace") or ""
        frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', trace)
        return [Place(file, int(line), name) for file, line, name in frames if is_users(file)]


def kind(node: Node) -> str:
    """The name of the ATen operation, such as `softmax`, or "" for what is no operation."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__).removesuffix("_")
    return "getitem" if getattr(node.target, "__name__", "") == "getitem" else ""


def size(node: Node) -> tuple[int, ...]:
    """The shape of a node's value; () where it is no tensor."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    shape = getattr(value, "shape", None)
    return () if shape is None else tuple(int(n) for n in shape)


def tensor_inputs(node: Node) -> list[Node]:
    """The nodes among the arguments, lists flattened, in the order of the arguments."""
    return list(_nodes((*node.args, *node.kwargs.values())))


def call(node: Node, env: Values, double: bool) -> Any:
    """One operation; dropout is off, whatever the model says."""

    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return env[argument]
        if isinstance(argument, (list, tuple)):
            return type(argument)(value(item) for item in argument)
        return torch.float64 if double and argument is torch.float32 else argument

    args = [value(argument) for argument in node.args]
    kwargs = {name: value(argument) for name, argument in node.kwargs.items()}
    if kind(node) == "dropout":
        return args[0]
    if kind(node) == "native_dropout":
        return args[0], torch.ones_like(args[0], dtype=torch.bool)
    if kind(node) == "view":  # what is given in a node's place may have other strides
        return args[0].reshape(args[1]) if not isinstance(args[1], torch.dtype) else args[0]
    if kind(node).startswith("_weight_norm"):  # its kernel aborts on expanded tensors
        args = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
    if kind(node) == "scaled_dot_product_attention":
        args, kwargs = _exact_sdpa(args, kwargs)
    assert callable(node.target)
    made = node.target(*args, **kwargs)
    if double and isinstance(made, Tensor) and made.dtype is torch.float32:
        return made.double()  # as of a module created in `forward`, in the default data type
    return made


def _exact_sdpa(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """No dropout, and a mask of the query's type: with another type the CPU kernel can be wrong."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        mask = mask.to(args[0].dtype)
    causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
    kept = {name: value for name, value in kwargs.items() if name in ("scale", "enable_gqa")}
    kept.update(attn_mask=mask, is_causal=causal)
    return args[:3], kept


def _nodes(arguments: Iterable[Any]) -> Iterator[Node]:
    for argument in arguments:
        if isinstance(argument, Node):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _nodes(argument)


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
