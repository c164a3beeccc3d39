"""From a module to its graph: torch.export first, make_fx where that cannot follow the code."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from compat.adaptation.tracing.calling import Forward, eval_mode, plain_kernels, reason
from compat.adaptation.tracing.canonical import drop_dead_code, inline_regions
from compat.adaptation.tracing.graph import Graph, kind
from compat.errors import AdaptError

_one_at_a_time = threading.RLock()  # torch.export keeps its state in its module
TOOLS = {"_by_export": "torch.export", "_by_make_fx": "make_fx"}


class Untraceable(AdaptError):
    """Code that no tracer can follow."""


class Stopped(Exception):
    """Raised by the model's code while it was traced; the original exception is its cause.

    torch.export prints the graph traced so far to stderr, for any exception that can hold it.
    """

    @property
    def partial_fx_graph(self) -> None:
        raise AttributeError("partial_fx_graph")

    @partial_fx_graph.setter
    def partial_fx_graph(self, graph: Any) -> None:
        pass


class Caller(nn.Module):
    """The author's model behind one signature: ids (B, T) → logits (B, T, V)."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.call = forward

    def forward(self, input_ids: Tensor) -> Tensor:
        keep_all_lines()
        try:
            return self.call(self.model, input_ids)
        except Exception as error:
            raise Stopped from error


def keep_all_lines() -> None:
    """Let the tracer at work record the lines of all functions, not of `forward` methods alone.

    It is set on the tracer of this thread, not on torch's class.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes a while

    mode = get_proxy_mode()
    if mode is None:  # the model is run, not traced
        return

    def keep(frames: traceback.StackSummary) -> traceback.StackSummary:
        starts = [i for i, f in enumerate(frames) if f.filename == __file__]
        return traceback.StackSummary.from_list(frames[starts[-1] + 1 :] if starts else [])

    tracer: Any = mode.tracer
    tracer._filter_traceback_frames = keep


def first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter with several, the embedding's, or the first."""
    known: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        owner = model.get_submodule(name.rpartition(".")[0])
        if id(parameter) not in known or isinstance(owner, nn.Embedding):
            known[id(parameter)] = name
    return {name: known[id(parameter)] for name, parameter in named}


def to_graph(model: nn.Module, forward: Forward, input_ids: Tensor) -> Graph:
    """Trace `forward(model, input_ids)` in eval mode.

    Raises:
        Untraceable: neither torch.export nor make_fx could follow; names the lines.
    """
    caller = Caller(model, forward)
    stopped = []
    with _one_at_a_time, eval_mode(model), plain_kernels():
        for tracer in (_by_export, _by_make_fx):
            try:
                graph = tracer(caller, input_ids)
            except Exception as error:
                cause = error.__cause__ if isinstance(error, Stopped) else None
                why = reason(cause if isinstance(cause, Exception) else error)
                stopped.append(f"{TOOLS[tracer.__name__]} stopped: {why}")
                continue
            if graph.output in graph.live:
                first = first_names(model)
                graph.names = {node: first.get(name, name) for node, name in graph.names.items()}
                graph.stopped = stopped
                return graph
            stopped.append(f"{TOOLS[tracer.__name__]} lost the ids: values leave torch on the way")
    raise Untraceable("the model cannot be traced: " + "; ".join(stopped))


def _by_export(caller: Caller, input_ids: Tensor) -> Graph:
    program = torch.export.export(caller, (input_ids,), strict=False)
    dropouts = [node for node in program.graph.nodes if _drops(node)]
    if any(_in_place(node) or _is_vmapped(node) for node in _all_nodes(program.graph_module)):
        program = program.run_decompositions({})  # no operation in place, no nesting of vmap
    inline_regions(program.graph_module)
    signature, state = program.graph_signature, program.state_dict
    held: dict[str, Any] = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    held.update(signature.inputs_to_lifted_tensor_constants)
    values, names, buffers, ids = {}, {}, {}, None
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name not in held:
            ids = node
            continue
        name = held[node.name]
        values[node] = state[name] if name in state else program.constants[name]
        if node.name in signature.inputs_to_parameters:
            names[node] = name.removeprefix("model.")
        elif node.name in signature.inputs_to_buffers:
            buffers[node] = name.removeprefix("model.")
    assert ids is not None
    dropouts = [node for node in program.graph.nodes if _drops(node)] or dropouts
    _merge_repeats(program.graph)
    logits = _output(program.graph)
    drop_dead_code(program.graph, logits)
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    values = {node: value.detach() for node, value in values.items()}
    B, T = input_ids.shape
    return Graph(nodes, values, names, ids, logits, (B, T), buffers, dropouts, input_ids)


def _by_make_fx(caller: Caller, input_ids: Tensor) -> Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    held = {**dict(caller.named_parameters()), **dict(caller.named_buffers())}

    def run(tensors: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(caller, dict(tensors), (ids,))
        return logits

    functional = torch.func.functionalize(run, remove="mutations")
    trace = make_fx(
        functional,
        tracing_mode="real",
        record_stack_traces=True,
        _error_on_data_dependent_ops=False,
    )
    traced: GraphModule = trace(held, input_ids)
    parameters = dict(caller.named_parameters())
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    values, names, buffers = {}, {}, {}
    for node, (name, tensor) in zip(placeholders, held.items(), strict=False):
        values[node] = tensor.detach()
        if name in parameters:
            names[node] = name.removeprefix("model.")
        else:
            buffers[node] = name.removeprefix("model.")
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(traced, str(node.target)).detach()
    _merge_repeats(traced.graph)
    output = _output(traced.graph)
    drop_dead_code(traced.graph, output)
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    dropouts = [node for node in nodes if _drops(node)]
    B, T = input_ids.shape
    ids = placeholders[-1]
    return Graph(nodes, values, names, ids, output, (B, T), buffers, dropouts, input_ids)


def _output(graph: torch.fx.Graph) -> Node:
    """The node of the logits, past which nothing is returned."""
    found: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    while isinstance(found, (list, tuple)):
        found = found[-1]
    logits: Node = found
    return logits


def _merge_repeats(graph: torch.fx.Graph) -> None:
    """Make one node of those that compute the same, as where a norm is called once for q, k, v."""
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and not _drops(node):
            first = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _in_place(node: Node) -> bool:
    """Whether an operation changes its arguments."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _is_vmapped(node: Node) -> bool:
    """Whether an operation opens or closes a level of `torch.vmap`."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def _all_nodes(module: GraphModule) -> Iterator[Node]:
    """The nodes of a graph and of the subgraphs that it calls."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            yield from part.graph.nodes


def _drops(node: Node) -> bool:
    """Dropout at work: with a probability, and told that it is in training."""
    arguments = [*node.args, *node.kwargs.values()]
    if kind(node) in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout"):
        return bool(arguments[1]) and bool(arguments[2])
    if kind(node) == "scaled_dot_product_attention":
        p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(p)
    return kind(node) in ("bernoulli", "rand_like", "rand")
