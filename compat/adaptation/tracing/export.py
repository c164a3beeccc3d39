"""From a module to its graph: torch.export first, make_fx where torch.export stops."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node

from compat.adaptation.tracing.calling import (
    Forward,
    describe_error,
    eval_mode,
    global_state,
    plain_kernels,
)
from compat.adaptation.tracing.graph import Graph, kind
from compat.errors import AdaptError

# Regions as torch.export writes them: a call with a subgraph among its arguments.
REGIONS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})


class Untraceable(AdaptError):
    """A model that neither torch.export nor make_fx can trace."""


class Stopped(Exception):
    """Raised by the model's code while it was traced; the original exception is its cause.

    torch.export assigns the graph traced so far to any exception that accepts the attribute, and
    prints it to stderr. This one does not accept it.
    """

    @property
    def partial_fx_graph(self) -> None:
        raise AttributeError("partial_fx_graph")

    @partial_fx_graph.setter
    def partial_fx_graph(self, graph: Any) -> None:
        pass


class Caller(nn.Module):
    """The user's model behind one signature: ids (B, T) → logits (B, T, V)."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.call = forward

    def forward(self, input_ids: Tensor) -> Tensor:
        _record_all_lines()
        try:
            return self.call(self.model, input_ids)
        except Exception as error:
            raise Stopped from error


def _record_all_lines() -> None:
    """Let the active tracer record the lines of all functions, not of `forward` methods alone.

    It is set on the tracer of this thread, not on torch's class.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # a slow import

    mode = get_proxy_mode()
    if mode is None:  # the model is run, not traced
        return

    def keep(frames: traceback.StackSummary) -> traceback.StackSummary:
        starts = [i for i, f in enumerate(frames) if f.filename == __file__]
        return traceback.StackSummary.from_list(frames[starts[-1] + 1 :] if starts else [])

    tracer: Any = mode.tracer
    tracer._filter_traceback_frames = keep


def to_graph(model: nn.Module, forward: Forward, input_ids: Tensor) -> Graph:
    """Trace `forward(model, input_ids)` in eval mode.

    Raises:
        Untraceable: both tracers failed; names the lines.
    """
    caller = Caller(model, forward)
    first = _first_names(model)
    stopped: list[str] = []
    with global_state, eval_mode(model), plain_kernels():
        for tool, tracer in (("torch.export", _by_export), ("make_fx", _by_make_fx)):
            try:
                graph = tracer(caller, input_ids)
            except Exception as error:
                cause = error.__cause__ if isinstance(error, Stopped) else None
                why = describe_error(cause if isinstance(cause, Exception) else error)
                stopped.append(f"{tool} stopped: {why}")
                continue
            if graph.output in graph.live:
                graph.names = {node: first.get(name, name) for node, name in graph.names.items()}
                graph.stopped = stopped
                return graph
            stopped.append(f"{tool} lost the ids, because values leave torch on the way")
    raise Untraceable("the model cannot be traced: " + "; ".join(stopped))


def _first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a shared parameter, its name in the embedding, else its first name."""
    known: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        owner = model.get_submodule(name.rpartition(".")[0])
        if id(parameter) not in known or isinstance(owner, nn.Embedding):
            known[id(parameter)] = name
    return {name: known[id(parameter)] for name, parameter in named}


def _by_export(caller: Caller, ids: Tensor) -> Graph:
    program = torch.export.export(caller, (ids,), strict=False)
    dropouts = [node for node in program.graph.nodes if _drops(node)]
    modules = [m for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    if any(_needs_decomposition(node) for module in modules for node in module.graph.nodes):
        program = program.run_decompositions({})
    _inline_regions(program.graph_module)
    signature = program.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    stored = {**program.constants, **program.state_dict}
    names = {node: held[node.name] for node in program.graph.nodes if node.name in held}
    values: dict[Node, Any] = {node: stored[name] for node, name in names.items()}
    for node in program.graph.nodes:
        if node.name in constants:
            values[node] = stored[constants[node.name]]
    return _graph(program.graph, caller, ids, values, names, dropouts)


def _by_make_fx(caller: Caller, ids: Tensor) -> Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    held = {**dict(caller.named_parameters()), **dict(caller.named_buffers())}

    def run(tensors: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(caller, dict(tensors), (ids,))
        return logits

    trace = make_fx(
        torch.func.functionalize(run, remove="mutations"),
        tracing_mode="real",
        record_stack_traces=True,
        _error_on_data_dependent_ops=False,
    )
    traced: GraphModule = trace(held, ids)
    placeholders = (node for node in traced.graph.nodes if node.op == "placeholder")
    names = dict(zip(placeholders, held, strict=False))  # the last placeholder is that of the ids
    values: dict[Node, Any] = {node: held[name] for node, name in names.items()}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(traced, str(node.target))
    return _graph(traced.graph, caller, ids, values, names, [])


def _graph(
    graph: fx.Graph,
    caller: Caller,
    ids: Tensor,
    values: Mapping[Node, Tensor],
    names: Mapping[Node, str],
    dropouts: list[Node],
) -> Graph:
    """The graph without repeated and dead operations.

    Args:
        graph: of a tracer; changed in place.
        caller: what was traced.
        ids: (B, T) that it was traced with.
        values: of parameters, buffers and constants.
        names: of parameters and buffers.
        dropouts: nodes of dropout that decompositions may have replaced.
    """
    *_, inputs = (node for node in graph.nodes if node.op == "placeholder" and node not in values)
    _merge_repeats(graph)
    output: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    while isinstance(output, (list, tuple)):
        output = output[-1]
    drop_dead_code(graph, output)
    parameters = dict(caller.named_parameters(remove_duplicate=False))
    ours = {node: name.removeprefix("model.") for node, name in names.items()}
    return Graph(
        nodes=[node for node in graph.nodes if node.op != "output"],
        values={node: value.detach() for node, value in values.items()},
        names={node: name for node, name in ours.items() if names[node] in parameters},
        input=inputs,
        output=output,
        shape=(ids.shape[0], ids.shape[1]),
        buffers={node: name for node, name in ours.items() if names[node] not in parameters},
        dropouts=[node for node in graph.nodes if _drops(node)] or dropouts,
        example=ids,
    )


def _merge_repeats(graph: fx.Graph) -> None:
    """Merge nodes that compute the same, such as a norm that is called for each of q, k and v."""
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and not _drops(node):
            first = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def drop_dead_code(graph: fx.Graph, output: Node) -> None:
    """Make a node the graph's output and erase all other operations that it does not depend on."""
    needed, stack = set[Node](), [output]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    [end] = (node for node in graph.nodes if node.op == "output")
    end.args = (output,)
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and node not in needed:
            graph.erase_node(node)


def _inline_regions(module: GraphModule) -> None:
    """Inline the subgraphs of `torch.no_grad()` and `autocast(enabled=False)`.

    Enabled autocast is left as it is, because it computes in another data type.
    """
    for node in list(module.graph.nodes):
        if getattr(node.target, "__name__", str(node.target)) in REGIONS:
            _inline(module, node)


def _inline(module: GraphModule, region: Node) -> None:
    place = next(i for i, a in enumerate(region.args) if isinstance(a, Node) and a.op == "get_attr")
    submodule: Any = region.args[place]
    inner = getattr(module, str(submodule.target))
    if str(region.target) == "wrap_with_autocast" and region.args[2]:
        return
    _inline_regions(inner)
    if any(node.op == "get_attr" for node in inner.graph.nodes):
        return
    arguments = iter(region.args[place + 1 :])
    copies: dict[Node, Any] = {}
    with region.graph.inserting_before(region):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(arguments)
            elif node.op != "output":
                copies[node] = region.graph.node_copy(node, copies.__getitem__)
    [output] = (node for node in inner.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    for user in list(region.users):  # each reads one of the results
        user.replace_all_uses_with(copies[results[user.args[1]]])
        region.graph.erase_node(user)
    region.graph.erase_node(region)
    if not submodule.users:
        submodule.graph.erase_node(submodule)


def _needs_decomposition(node: Node) -> bool:
    """Whether an operation works in place, or opens or closes a level of `torch.vmap`."""
    in_place = bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))
    return in_place or getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def _drops(node: Node) -> bool:
    """Whether an operation is dropout with a probability and in training mode."""
    arguments = [*node.args, *node.kwargs.values()]
    if kind(node) in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout"):
        return bool(arguments[1]) and bool(arguments[2])
    if kind(node) == "scaled_dot_product_attention":
        p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(p)
    return kind(node) in ("bernoulli", "rand_like", "rand")
