"""Trace a module into a graph: run it once and record every ATen operation.

Operations are recorded below autograd, where composite operations such as `linear`, `softmax` and
`scaled_dot_product_attention` are not yet decomposed. Operations that change a tensor in place are
recorded as the functions that return the changed tensor; all other tensors that share its memory
are then recomputed from it.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from compat.adaptation.tracing.calling import Forward, describe_error, plain_kernels
from compat.adaptation.tracing.graph import (
    DRAWS,
    MOVES,
    RMS_NORMS,
    Graph,
    Place,
    aten,
    kind,
    reached,
)
from compat.errors import AdaptError
from compat.parity.dispatch import DispatchMode
from compat.user_code import is_users
from compat.user_models.eval_mode import eval_mode

# Functions of in-place operations that are not named like them without the underscore.
FUNCTIONS = {
    "normal_": aten.normal_functional,
    "__iand__": aten.bitwise_and,
    "__ior__": aten.bitwise_or,
    "__ixor__": aten.bitwise_xor,
}


# Operations that pass the values of a tensor to Python or NumPy.
EXITS = frozenset("item _local_scalar_dense is_nonzero equal allclose resolve_neg".split())

# Operations with the shape of another tensor, and the same with a shape.
LIKE = {
    "expand_as": aten.expand.default,
    "view_as": aten.view.default,
    "reshape_as": aten.reshape.default,
}

# Operations by which dropout that is written out draws a mask, scales it and applies it.
THRESHOLDS = frozenset("lt le gt ge floor bernoulli".split())
ARITHMETIC = frozenset("add sub rsub mul div bitwise_not logical_not".split())
PARTS = frozenset("getitem select slice type_as".split())
SELECTIONS = frozenset("mul div where masked_fill index_put".split())

# Operations that replace a part of a tensor, by the operation that selects the part.
SCATTERS = {"select": aten.select_scatter.default, "slice": aten.slice_scatter.default}


# The number of tensors in one memory above which writing to it is not recorded. Every write is
# compared with all of them, which takes hours for a loop over the elements of a tensor. If its
# elements are constants, such as the sines of positions, only their values are kept.
MANY_VIEWS, MOST_VIEWS = 64, 2_000

OperationName = tuple[str, tuple[Place, ...], int]
NO_OPERATION: OperationName = "", (), 0


class Untraceable(AdaptError):
    """A model whose call cannot be recorded as a graph."""


def to_graph(model: nn.Module, forward: Forward, input_ids: Tensor) -> Graph:
    """Record `forward(model, input_ids)` in eval mode.

    Raises:
        Untraceable: the call fails while it is recorded, or the logits that it returns do not
            depend on the ids through torch operations.
    """
    recorder = _Recorder(model, input_ids)
    below_autograd: Any = torch._C._AutoDispatchBelowAutograd  # without a type stub
    with plain_kernels(), eval_mode(model):
        try:
            with below_autograd(), recorder:
                logits = _call(forward, model, input_ids)
        except Exception as error:
            raise Untraceable(f"the model cannot be traced: {describe_error(error)}") from error
    graph = recorder.finish(logits)
    if graph.output not in graph.live:
        where = [f" at {place.file}:{place.line} {place.text}" for place in recorder.exits]
        raise Untraceable(
            "the model cannot be traced, because values leave torch between the ids and the logits"
            + "".join(where[-1:])
        )
    return graph


def _call(forward: Forward, model: nn.Module, input_ids: Tensor) -> Tensor:
    """Return the frame at which the recorded lines of the user's code begin."""
    return forward(model, input_ids)


def operation_name(count: Counter[object], func: Any, places: tuple[Place, ...]) -> OperationName:
    """Name an operation of a call: which one, at which of the user's lines, how many so far.

    It has the same name whenever the model is called.
    """
    count[str(func), places] += 1
    return str(func), places, count[str(func), places]


def lines_of_user(frame: FrameType | None, caller: CodeType) -> tuple[Place, ...]:
    """Return the user's lines that led to a frame, the outermost first, up to this caller."""
    places = [
        Place(each.f_code.co_filename, each.f_lineno, each.f_code.co_qualname)
        for each in _frames(frame, caller) if is_users(each.f_code.co_filename)
    ]  # fmt: skip
    return tuple(places[::-1])


def _frames(frame: FrameType | None, caller: CodeType) -> Iterator[FrameType]:
    """Yield the frames that led to a frame, this one first, up to that of a function."""
    while frame is not None and frame.f_code is not caller:
        yield frame
        frame = frame.f_back


@dataclass
class _View:
    """How a tensor that shares memory with another one was created.

    Args:
        base: the tensor from which it was created.
        nodes: the operation and, if that has several results, the choice of one.
    """

    base: Tensor
    nodes: tuple[Node, ...]


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Writes the operations of a call to a graph.

    Attributes:
        current: the node that holds the current value of a tensor, by the tensor's id.
        views: how tensors that share memory were created, by their id.
        sharing: the tensors in one memory, by its address. These are all tensors, which keeps their
            ids unique while the call is recorded.
        exits: the lines that read values outside of torch.
        written: the lines that write to parameters, by the parameters' names.
    """

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids, self.graph = ids, fx.Graph()
        self.current: dict[int, Node] = {}
        self.views: dict[int, _View] = {}
        self.sharing: dict[int, list[Tensor]] = {}
        self.source: tuple[tuple[Place, ...], tuple[str, ...]] = (), ()
        self.operations, self.operation = Counter[object](), NO_OPERATION
        self.values: dict[Node, Tensor] = {}
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.names = self._inputs(_first_names(model))
        self.buffers = self._inputs(model.named_buffers())
        self.input = self._add(self.graph.placeholder("input_ids"), ids)
        self.exits: list[Place] = []
        self.parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self.written: dict[str, Place] = {}

    def _inputs(self, named: Iterable[tuple[str, Tensor]]) -> dict[Node, str]:
        """Return a placeholder for every tensor, and its name."""
        found = {}
        for name, tensor in named:
            node = self.graph.placeholder(name.replace(".", "_"))
            self.values[node] = tensor.detach()
            found[self._add(node, tensor)] = name
        return found

    def _add(self, node: Node, tensor: Tensor) -> Node:
        """Record that a node holds the value of a tensor, and return the node."""
        node.meta["shape"] = tuple(tensor.shape)
        if id(tensor) not in self.current:
            self.sharing.setdefault(_address(tensor), []).append(tensor)
        self.current[id(tensor)] = node
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.einsum.default and not _is_product(str(args[0])):
            with self:
                return func.decompose(*args)
        frame, packet = sys._getframe(1), func.overloadpacket.__name__
        self.source = lines_of_user(frame, _call.__code__), self._modules(frame)
        self.operation = operation_name(self.operations, func, self.source[0])
        if packet in RMS_NORMS:
            args, kwargs = _with_eps(args, kwargs or {}), {}
        node_args, node_kwargs = map_aggregate((args, kwargs or {}), self._argument)
        recorded = func
        if packet in LIKE:  # only the shape of the second argument matters
            recorded, node_args = LIKE[packet], (node_args[0], args[1].shape)
        if packet in EXITS and self.source[0]:
            self.exits.append(self.source[0][-1])
        changed = _changed_tensors(func, args, kwargs or {})
        self._keep_values(changed)
        result = func(*args, **(kwargs or {}))
        if func is aten.copy_.default:
            self._write(args[0], self._copy(args[0], args[1], node_args[1]))
        elif changed:
            self._change(func, changed, node_args, node_kwargs)
        elif isinstance(result, Tensor):
            if not self._is_known(result):
                self._result(result, args, self._record(recorded, node_args, node_kwargs))
        elif isinstance(result, (tuple, list)):
            whole = self._record(func, node_args, node_kwargs)
            for i, item in enumerate(result):
                if isinstance(item, Tensor) and not self._is_known(item):
                    self._result(item, args, whole, self._record(operator.getitem, (whole, i)))
        return result

    def _argument(self, argument: Any) -> Any:
        return self._node_of(argument) if isinstance(argument, Tensor) else argument

    def _record(self, target: Any, args: Any, kwargs: Any = None) -> Node:
        node = self.graph.call_function(target, tuple(args), dict(kwargs or {}))
        node.meta["places"], node.meta["modules"] = self.source
        node.meta["operation"] = self.operation
        inputs = (each.meta.get("constant", False) for each in node.all_input_nodes)
        node.meta["constant"] = kind(node) not in DRAWS and all(inputs)
        return node

    def _is_known(self, result: Tensor) -> bool:
        """Return whether a tensor, or one of the same elements, is recorded already."""
        if id(result) not in self.current:
            sharing = self.sharing.get(_address(result), ())
            same = next((t for t in sharing if _layout(t) == _layout(result)), None)
            if same is None:
                return False
            self.views[id(result)] = _View(same, ())
            self._add(self.current[id(same)], result)
        return True

    def _result(self, result: Tensor, args: Any, *nodes: Node) -> None:
        self._add(nodes[-1], result)
        bases = [t for t in _tensors(args) if _address(t) == _address(result)]
        if bases:
            self.views[id(result)] = _View(bases[0], nodes)

    def _node_of(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; one from before the call is a constant or shares memory."""
        if self._is_known(tensor):
            return self.current[id(tensor)]
        for other in self.sharing.get(_address(tensor), ()):
            if other.dtype == tensor.dtype and other.is_contiguous():
                start = tensor.storage_offset() - other.storage_offset()
                layout = tuple(tensor.shape), tensor.stride(), start
                node = self._record(aten.as_strided.default, (self.current[id(other)], *layout))
                self.views[id(tensor)] = _View(other, (node,))
                return self._add(node, tensor)
        return self._constant(tensor)

    def _constant(self, tensor: Tensor) -> Node:
        node = self.graph.placeholder(f"constant_{len(self.values)}")
        self.values[node] = tensor.detach()
        node.meta["constant"] = True
        return self._add(node, tensor)

    # Operations that change tensors in place.

    def _keep_values(self, changed: list[Tensor]) -> None:
        """Copy the buffers and constants that an operation will change."""
        for tensor in changed:
            while (view := self.views.get(id(tensor))) is not None:
                tensor = view.base
            if id(tensor) in self.parameters and self.source[0]:
                self.written.setdefault(self.parameters[id(tensor)], self.source[0][-1])
            node = self.current[id(tensor)]
            if node in self.values and node not in self.names:
                self.values[node] = self.values[node].clone()

    def _change(self, func: Any, changed: list[Tensor], args: Any, kwargs: Any) -> None:
        """Record an operation that changes one argument as the function that returns it."""
        function = _function(func)
        if function is None or len(changed) > 1:
            raise NotImplementedError(f"{func} changes tensors in place")
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        node = self._record(function, args, kwargs)
        node.meta["shape"] = tuple(changed[0].shape)
        if torch.Tag.inplace_view in func.tags:
            self.current[id(changed[0])] = node
        else:
            self._write(changed[0], node)

    def _copy(self, tensor: Tensor, source: Tensor, node: Node) -> Node:
        """Record the new value of a tensor that another one is copied to.

        `aten.copy` has no derivative, and its result does not depend on the tensor's old value.
        """
        if source.dtype != tensor.dtype:
            node = self._record(aten._to_copy.default, (node,), {"dtype": tensor.dtype})
        node = self._record(aten.expand.default, (node, tensor.shape))
        node.meta["shape"] = tuple(tensor.shape)
        return node

    def _write(self, tensor: Tensor, node: Node) -> None:
        """Record a new value of a tensor, and of all tensors that share its memory."""
        self._add(node, tensor)
        written, child = {id(tensor)}, tensor
        while (view := self.views.get(id(child))) is not None:
            self._add(self._with_part(view, self.current[id(child)]), view.base)
            child = view.base
            written.add(id(child))
        elements, sharing = _elements(tensor), self.sharing[_address(tensor)]
        if len(sharing) > MANY_VIEWS and self.current[id(child)].meta.get("constant"):
            self._forget_writes(child)
            return
        if len(sharing) > MOST_VIEWS:
            raise RuntimeError(f"the model writes to a tensor with more than {MOST_VIEWS:,} views")
        for other in sharing:
            view = self.views.get(id(other))
            if view and id(other) not in written and (_elements(other) & elements).any():
                self._add(self._again(view), other)

    def _forget_writes(self, tensor: Tensor) -> None:
        """Replace the operations that computed a constant, element by element, by its value.

        Args:
            tensor: the one that all others in its memory are views of.
        """
        for other in self.sharing.pop(_address(tensor)):
            self.current.pop(id(other), None)
            self.views.pop(id(other), None)
        self.values[self._constant(tensor)] = tensor.detach().clone()

    def _again(self, view: _View) -> Node:
        """Return a view of the current value of its base."""
        node = self.current[id(view.base)]
        nodes = []
        for operation in view.nodes:
            node = self._record(operation.target, (node, *operation.args[1:]), operation.kwargs)
            nodes.append(node)
        view.nodes = tuple(nodes)
        return node

    def _with_part(self, view: _View, part: Node) -> Node:
        """Return the value of a view's base after the view was changed to `part`."""
        whole, shape = self.current[id(view.base)], tuple(view.base.shape)
        if not view.nodes:
            return part
        operation = view.nodes[0]
        if kind(operation) in SCATTERS:
            scatter = SCATTERS[kind(operation)]
            return self._record(scatter, (whole, part, *operation.args[1:]), operation.kwargs)
        number = torch.arange(view.base.numel())
        positions: Any = number.view(shape)
        for operation in view.nodes:
            target: Any = operation.target
            positions = target(positions, *operation.args[1:], **operation.kwargs)
        values = self._record(aten.reshape.default, (part, (-1,)))
        values.meta["shape"] = (positions.numel(),)
        if not torch.equal(positions.flatten(), number):
            flat = self._record(aten.reshape.default, (whole, (-1,)))
            index = self._constant(positions.flatten())
            values = self._record(aten.index_put.default, (flat, [index], values))
            flat.meta["shape"] = values.meta["shape"] = (number.numel(),)
        return self._record(aten.reshape.default, (values, shape))

    def _modules(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the modules that led to an operation, the outermost first."""
        modules: list[str] = []
        for each in _frames(frame, _call.__code__):
            called = each.f_back is not None and each.f_back.f_code.co_name == "_call_impl"
            name = each.f_code.co_name
            if name == "_call_impl" or (name == "forward" and not called):
                path = self.paths.get(id(each.f_locals.get("self")))  # `module.forward(x)` too
                modules += [path] if path and modules[-1:] != [path] else []
        return tuple(modules[::-1])

    def finish(self, logits: Tensor) -> Graph:
        """Return the graph of the logits, without repeated and dead operations."""
        output = self._node_of(logits)
        self.graph.output(output)
        _merge_repeats(self.graph)
        [end] = (node for node in self.graph.nodes if node.op == "output")
        [output] = end.all_input_nodes
        drop_dead_code(self.graph, output)
        nodes = [node for node in self.graph.nodes if node.op != "output"]
        B, T = self.ids.shape
        return Graph(
            nodes=nodes,
            values=self.values,
            names=self.names,
            input=self.input,
            output=output,
            shape=(B, T),
            buffers=self.buffers,
            dropouts=[node for node in nodes if _drops(node)],
            example=self.ids,
            written=self.written,
            exits=self.exits,
        )


def _is_product(equation: str) -> bool:
    """Return whether an einsum is a matrix product, not `d, b t d -> b t d` or `b t h c -> b t c`.

    These are a multiplication, because no axis is summed over, and a sum of one tensor.
    """
    operands, arrow, result = equation.partition("->")
    return "," in operands and not (arrow and set(operands) - set(", ") <= set(result))


def _first_names(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return the names and the parameters. A shared one has the embedding's name."""
    known: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        if id(parameter) not in known or isinstance(owner, nn.Embedding):
            known[id(parameter)] = name, parameter
    return known.values()


def _tensors(arguments: Any) -> list[Tensor]:
    """Return all tensors among the arguments."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _changed_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    named = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([named.get(name) for name in written])


def _function(func: Any) -> Any:
    """Return the function of an in-place operation, or of one with an `out` argument, or None."""
    name = func.overloadpacket.__name__
    packet = FUNCTIONS.get(name) or getattr(aten, name.removesuffix("_"), None)
    for overload in packet.overloads() if packet else ():
        function = getattr(packet, overload)
        if not function._schema.is_mutable and _arguments(function) == _arguments(func):
            return function
    return None


def _arguments(func: Any) -> list[tuple[str, str]]:
    """Return the names and types of an operation's arguments, without `out`.

    The first is called `self` in some schemas, and `input` in others of the same operation.
    """
    arguments = [a for a in func._schema.arguments if a.name != "out"]
    return [(a.name if i else "", str(a.type)) for i, a in enumerate(arguments)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _with_eps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of an RMSNorm with its eps, whose default depends on the data type."""
    named = dict(zip(("x", "shape", "weight", "eps"), args, strict=False)) | kwargs
    eps = named.get("eps")
    eps = torch.finfo(named["x"].dtype).eps if eps is None else eps
    return named["x"], named["shape"], named.get("weight"), eps


def _elements(tensor: Tensor) -> Tensor:
    """Return which elements of its memory a tensor has."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    found = torch.zeros(size, dtype=torch.bool)
    found[torch.arange(size).as_strided(*layout).flatten()] = True
    return found


def _merge_repeats(graph: fx.Graph) -> None:
    """Merge nodes that compute the same, such as a norm that is called for each of q, k and v."""
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and kind(node) not in DRAWS and not _drops(node):
            first = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                first.meta.setdefault("repeats", node.meta.get("places", ()))
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def drop_dead_code(graph: fx.Graph, output: Node) -> None:
    """Make a node the graph's output and erase all other operations that it does not depend on."""
    needed = reached([output], lambda node: node.all_input_nodes)
    [end] = (node for node in graph.nodes if node.op == "output")
    end.args = (output,)
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and node not in needed:
            graph.erase_node(node)


def _drops(node: Node) -> bool:
    """Return whether an operation is dropout with a probability and in training mode."""
    arguments = [*node.args, *node.kwargs.values()]
    if kind(node) in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout"):
        return bool(arguments[1]) and bool(arguments[2])
    if kind(node) == "scaled_dot_product_attention":
        p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(p)
    return kind(node) in ("bernoulli", "rand_like", "rand") and _selects(node)


def _selects(node: Node) -> bool:
    """Return whether random numbers only select elements to keep, as a mask with two values.

    Other random numbers, such as those that are added to a tensor, are noise.
    """
    stack, selects = [(node, kind(node) == "bernoulli")], False
    while stack:
        node, is_mask = stack.pop()
        for user in node.users:
            if kind(user) in THRESHOLDS:
                stack.append((user, True))
            elif kind(user) in MOVES | PARTS or (
                kind(user) in ARITHMETIC and len(user.all_input_nodes) == 1
            ):
                stack.append((user, is_mask))
            elif is_mask and kind(user) in SELECTIONS:
                selects = True
            else:
                return False
    return selects
