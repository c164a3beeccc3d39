"""A model as a graph of ATen operations whose nodes know their parameters and source lines."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from compat.config import HALF
from compat.errors import AdaptError
from compat.ops import Affine, WeightNorm
from compat.user_code import place
from compat.user_models.notebook import cell_line

aten: Any = torch.ops.aten

Values = Mapping[Node, Tensor]

# Operations that only move or copy elements. Their result has the values of their first argument.
MOVES = frozenset(
    """
    _reshape_alias _to_copy _unsafe_view alias alias_copy clone contiguous detach dropout expand
    expand_as flatten lift_fresh lift_fresh_copy movedim mT permute reshape squeeze swapaxes t
    t_copy to transpose unflatten unsqueeze view view_as native_dropout _conj numpy_T
    """.split()
)

# Data types that a graph is computed in, and that runs in float64 replace.
LOWER = (torch.float32, *HALF)

# Operations that find or replace non-finite values.
NAN_GUARDS = frozenset("isnan isinf isfinite nan_to_num".split())

# Operations that draw random numbers, other than those of dropout.
DRAWS = frozenset(
    "uniform normal normal_functional randn rand randint randn_like rand_like randint_like "
    "bernoulli exponential multinomial".split()
)

# Operations whose result depends on the shape of their arguments, never on the values.
SHAPE_ONLY = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty randn_like "
    "rand_like randint_like".split()
)

# Operations whose result has a shape that depends on the values of their arguments.
DATA_DEPENDENT_SHAPES = frozenset(
    "nonzero nonzero_numpy masked_select _unique2 unique_dim repeat_interleave".split()
)

# Norms, and the other operations that norms are written with.
RMS_NORMS = frozenset({"rms_norm", "_fused_rms_norm"})
# Kernels of norms that are not over the channels of each token, and their names.
OTHER_NORMS = {
    "batch_norm": "a BatchNorm",
    "_native_batch_norm_legit_no_training": "a BatchNorm",
    "instance_norm": "an InstanceNorm",
    "group_norm": "a GroupNorm",
    "native_group_norm": "a GroupNorm",
}
NORM_KERNELS = RMS_NORMS | OTHER_NORMS.keys() | {"layer_norm", "native_layer_norm"}

REDUCTIONS = NORM_KERNELS | frozenset(
    "mean var std var_mean std_mean sum norm linalg_vector_norm linalg_norm "
    "linalg_matrix_norm".split()
)

# Operations that can move values from one position to another.
SHIFTS = frozenset(
    "slice cat flip roll pad constant_pad_nd narrow select_scatter slice_scatter index_put".split()
)


class ShapeChanged(AdaptError, RuntimeError):
    """An operation fails on other values, because the shape of a result depends on them."""


@dataclass(frozen=True)
class Place:
    """A line of the user's source.

    Args:
        file: its file.
        line: its number.
        function: the qualified name of the function, such as `Block.forward`.
    """

    file: str
    line: int
    function: str = ""

    @property
    def in_forward(self) -> bool:
        """Whether it is a line of a method `forward`."""
        return self.function.rpartition(".")[2] == "forward"

    @property
    def in_cell(self) -> Place:
        """The same line, counted from the beginning of its cell in a notebook."""
        return Place(*cell_line(self.file, self.line), self.function)

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True)
class Derived:
    """A weight that the model computes from parameters alone, such as `1 + gain`.

    Args:
        names: the names of the parameters.
        values: the values of the parameters, which share memory with the model's.
        op: computes the weight from the parameters (`save`), and the parameters from it (`load`).
    """

    names: tuple[str, ...]
    values: tuple[Tensor, ...]
    op: Affine | WeightNorm


@dataclass
class Graph:
    """The functional graph of `logits = model(input_ids)`, and how to run pieces of it.

    Args:
        nodes: in execution order.
        values: the values of the placeholders and constants, that is, of parameters and buffers.
        names: the name of each parameter's placeholder, as in `model.named_parameters()`.
        input: the node of the ids, (B, T).
        output: the node of the logits.
        shape: (B, T) of the ids with which it was traced. It runs only on this shape.
        buffers: the name of each buffer's placeholder.
        dropouts: nodes of dropout that is active although the model is in eval mode. `run` skips
            it.
        example: the ids with which it was traced.
        derived: placeholders of weights that the model computes from its parameters.
        written: the lines that write to parameters, by the parameters' names.
        low_rank: the terms that `drop_low_rank_terms` removed, and their parameters.
        exits: the lines that read values of tensors in Python.
    """

    nodes: list[Node]
    values: dict[Node, Tensor]
    names: dict[Node, str]
    input: Node
    output: Node
    shape: tuple[int, int]
    buffers: dict[Node, str]
    dropouts: list[Node]
    example: Tensor
    derived: dict[Node, Derived] = field(default_factory=dict)
    written: dict[str, Place] = field(default_factory=dict)
    low_rank: dict[Node, set[Node]] = field(default_factory=dict)
    exits: list[Place] = field(default_factory=list)

    @cached_property
    def order(self) -> dict[Node, int]:
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def live(self) -> set[Node]:
        """Nodes whose value depends on the ids, not only on their shape."""
        live = {self.input}
        for node in self.nodes:
            reads_live = any(a in live for a in node.all_input_nodes)
            if reads_live and kind(node) not in SHAPE_ONLY and 0 not in size(node):
                live.add(node)
        return live

    @cached_property
    def ancestors(self) -> dict[Node, set[Node]]:
        """For every live node, the live nodes that it is computed from."""
        found: dict[Node, set[Node]] = {}
        for node in self.nodes:
            if node in self.live:
                above = live_inputs(self, node)
                found[node] = set(above).union(*(found[a] for a in above))
        return found

    @cached_property
    def parameters_of(self) -> dict[Node, frozenset[Node]]:
        """For every node that is not live, such as a transposed weight, the parameters in it."""
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
        """Nodes whose first axis holds all tokens in the order t·B + b instead of b·T + t.

        They are found by changing the first sequence, with random parameters: the rows that change
        are those of the first sequence.
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
        try:
            before, after = (
                self.run(merged, {self.input: ids}, random.__getitem__, finite=True)
                for ids in (one, two)
            )
        except ShapeChanged:
            return set()
        found = set()
        for node, x, y in zip(merged, before, after, strict=True):
            if x.shape != y.shape or len(x) != B * T:  # more or fewer tokens of an expert
                continue
            changed = (x != y).reshape(B * T, -1).any(1)
            if not changed[:T].all() and changed[::B].all():
                found.add(node)
        return found

    def invalidate(self) -> None:
        """Clear all cached properties after a change to the graph."""
        self.nodes = [node for node in self.output.graph.nodes if node.op != "output"]
        for name in ("order", "live", "ancestors", "parameters_of", "time_first"):
            self.__dict__.pop(name, None)

    def parameter_names(self, node: Node) -> tuple[str, ...]:
        """Return the names of the parameters behind a placeholder."""
        return self.derived[node].names if node in self.derived else (self.names[node],)

    def parameter_values(self, node: Node) -> tuple[Tensor, ...]:
        """Return the values of the parameters behind a placeholder, in the model's memory."""
        return self.derived[node].values if node in self.derived else (self.values[node],)

    def recompute_derived(self) -> None:
        """Compute the derived weights from the current values of the parameters."""
        for node, found in self.derived.items():
            self.values[node] = found.op.save(found.values)

    def between(self, targets: Iterable[Node], cuts: Iterable[Node]) -> list[Node]:
        """Return the nodes, live or not, that compute `targets` from the values of `cuts`."""
        cuts = set(cuts)
        found = reached(targets, lambda node: [] if node in cuts else node.all_input_nodes) - cuts
        return sorted(found, key=self.order.__getitem__)

    def live_between(self, targets: Iterable[Node], cuts: Iterable[Node]) -> list[Node]:
        """Return the live nodes whose values `targets` are computed from, after those of `cuts`."""
        cuts, ends = set(cuts), (node for node in targets if node in self.live)
        found = reached(ends, lambda node: [] if node in cuts else live_inputs(self, node)) - cuts
        return sorted(found, key=self.order.__getitem__)

    def on_paths(self, starts: Iterable[Node], ends: Iterable[Node]) -> list[Node]:
        """Return the nodes after `starts` on the paths from them to `ends`, in order."""
        starts = set(starts)
        return [n for n in self.live_between(ends, starts) if starts & self.ancestors[n]]

    def first_reader(self, nodes: Iterable[Node]) -> Node:
        """Return the first live operation that reads one of these nodes of parameters."""
        computed = reached(nodes, lambda node: node.users.keys() - self.live)
        readers = {user for node in computed for user in live_users(self, node)}
        return min(readers, key=self.order.__getitem__)

    def parameters_between(self, targets: Iterable[Node], cuts: Iterable[Node]) -> list[Node]:
        return [node for node in self.between(targets, cuts) if node in self.names]

    def run(
        self,
        targets: Iterable[Node],
        known: Values,
        parameters: Callable[[Node], Tensor] | None = None,
        double: bool = True,
        finite: bool = False,
        force: Callable[[Node, Any], Any] | None = None,
    ) -> list[Tensor]:
        """Compute the values of `targets` from known values.

        Args:
            targets: the nodes whose values are returned.
            known: values that replace the computation of their nodes.
            parameters: returns the value of each parameter, in place of the model's own.
            double: compute in float64 instead of any lower precision that the graph names.
            finite: replace NaN by zero in every result.
            force: called with each node and its value; returns the value that is used instead.

        Raises:
            ShapeChanged: a result whose shape depends on values has another shape than in the
                trace, and an operation on it fails.
        """
        targets, env = list(targets), dict(known)
        env.setdefault(self.input, self.example)
        for node in self.between(targets, known):
            if node in self.names and parameters is not None:
                env[node] = parameters(node)
            elif node in self.values:
                value = self.values[node]
                env[node] = value.double() if double and value.is_floating_point() else value
            elif node.op == "call_function":
                try:
                    env[node] = _execute(node, env, double)
                except (RuntimeError, LookupError, ValueError) as error:
                    above = self.ancestors.get(node, ())
                    if not any(_has_data_dependent_shape(each, env) for each in above):
                        raise
                    text = f"a result has another shape with other values: {error}{self.at(node)}"
                    raise ShapeChanged(text) from None
                if finite and isinstance(env[node], Tensor) and env[node].is_floating_point():
                    env[node] = env[node].nan_to_num()
            if force is not None:
                env[node] = force(node, env[node])
        return [env[node] for node in targets]

    def place(self, node: Node) -> Place | None:
        """Return the innermost line of the user's code that computed a node."""
        places = self.places(node)
        return places[-1] if places else None

    def places(self, node: Node) -> list[Place]:
        """Return the lines of the user's code that led to a node, the outermost first."""
        return list(node.meta.get("places", ()))

    def repeated(self, node: Node) -> Place | None:
        """Return the line that computed a node once more, after the one that `place` returns."""
        places = node.meta.get("repeats", ())
        return places[-1] if places else None

    def same(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the same nodes as these, of another graph of the same model."""
        by_name = {node.name: node for node in self.nodes}
        return [by_name[node.name] for node in nodes if node.name in by_name]

    def at(self, *nodes: Node) -> str:
        """Return " at FILE:LINE" of nodes, for messages; "" where no line is known."""
        found = [found for node in nodes if (found := self.place(node))]
        lines = dict.fromkeys(place(line.file, line.line) for line in found)
        return f" at {', '.join(lines)}" if lines else ""


def kind(node: Node) -> str:
    """Return the name of the ATen operation, such as `softmax`, or "" for a node without one."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return _operation(packet)
    return "getitem" if getattr(node.target, "__name__", "") == "getitem" else ""


@cache
def _operation(packet: Any) -> str:
    return str(packet.__name__).removesuffix("_")


def size(node: Node) -> tuple[int, ...]:
    """Return the shape of a node's value; () for a value that is not a tensor."""
    shape: tuple[int, ...] = node.meta.get("shape", ())
    return shape


def random_values(shape: Iterable[int], seed: int = 0) -> Tensor:
    """Draw normally distributed numbers in float64, which depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def insert(
    before: Node,
    target: Any,
    args: tuple[Any, ...],
    like: Node | None = None,
    shape: tuple[int, ...] | None = None,
) -> Node:
    """Insert an operation before a node.

    Args:
        before: the node before which it is inserted.
        target, args: the operation and its arguments.
        like: the node whose metadata it has, by default `before`.
        shape: the shape of its result, if that is not the shape in this metadata.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    node.meta = dict((like or before).meta)
    if shape is not None:
        node.meta["shape"] = shape
    return node


def reached(starts: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return some nodes and all that are reached from them, with the nodes after each."""
    stack, seen = list(starts), set[Node]()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += onward(node)
    return seen


def tensor_inputs(node: Node) -> list[Node]:
    """Return the nodes among the arguments, lists flattened, in the order of the arguments."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def live_inputs(graph: Graph, node: Node) -> list[Node]:
    """Return the inputs of a node that depend on the ids."""
    return [a for a in node.all_input_nodes if a in graph.live]


def adds_two(graph: Graph, node: Node, shape: tuple[int, ...]) -> bool:
    """Return whether a node is the sum of two tensors of this shape that depend on the ids."""
    return kind(node) == "add" and [*map(size, live_inputs(graph, node))] == [shape, shape]


def reads_parameter(graph: Graph, node: Node) -> bool:
    """Return whether a node's only operand that does not depend on the ids is of parameters."""
    dead = [a for a in node.all_input_nodes if a not in graph.live]
    return len(dead) == 1 and bool(graph.parameters_of[dead[0]])


def live_users(graph: Graph, node: Node) -> list[Node]:
    """Return the operations that read a node and depend on the ids."""
    return [user for user in node.users if user in graph.live]


def below(graph: Graph, start: Node) -> Iterator[tuple[Node, bool]]:
    """Yield what depends on a node, in order, and whether all paths from it meet there."""
    users = {*live_users(graph, start)}
    while users:
        node = min(users, key=graph.order.__getitem__)
        yield node, len(users) == 1
        users = users - {node} | {*live_users(graph, node)}


def meetings(graph: Graph, start: Node) -> Iterator[Node]:
    """Yield the nodes that all paths from a node to the output contain, itself first."""
    yield start
    yield from (node for node, is_meeting in below(graph, start) if is_meeting)


def _has_data_dependent_shape(node: Node, env: Values) -> bool:
    """Return whether the shape of a result depends on values, as of the tokens of an expert."""
    if kind(node) in DATA_DEPENDENT_SHAPES:
        return True
    indices: Any = node.args[1] if kind(node) == "index" else ()
    return any(i in env and env[i].dtype == torch.bool for i in indices if i is not None)


def _execute(node: Node, env: Values, double: bool) -> Any:
    """Execute one operation, without dropout."""

    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return env[argument]
        return torch.float64 if double and argument in LOWER else argument

    args: Any = list(map_aggregate(node.args, value))
    kwargs: Any = dict(map_aggregate(node.kwargs, value))
    operation = kind(node)
    if operation == "dropout":
        return args[0]
    if operation == "native_dropout":
        return args[0], torch.ones_like(args[0], dtype=torch.bool)
    if operation == "view":  # the strides of a known value can differ from those in the trace
        return args[0].reshape(args[1]) if not isinstance(args[1], torch.dtype) else args[0]
    if operation.startswith("_weight_norm"):  # its kernel aborts on expanded tensors
        args = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
    if operation == "scaled_dot_product_attention":
        args, kwargs = _exact_sdpa(args, kwargs)
    assert callable(node.target)
    result = node.target(*args, **kwargs)
    if double and isinstance(result, Tensor) and result.dtype in LOWER:
        return result.double()  # of a module constructed in `forward`, in the default data type
    return result


def _exact_sdpa(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Disable dropout, and give the mask the query's type, as the CPU kernel requires."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        mask = mask.to(args[0].dtype)
    causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
    kept = {name: value for name, value in kwargs.items() if name in ("scale", "enable_gqa")}
    return args[:3], {**kept, "attn_mask": mask, "is_causal": causal}
