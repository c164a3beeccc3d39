"""Hidden states by tap and in the reference's shapes: at the nodes of a graph, and in modules.

A graph runs only on one shape of ids and without the model's own backward pass. Hooks on modules
have neither limit, but not every hidden state is an input or an output of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.fx import Node

from compat.adaptation.anatomy.dissect import Anatomy
from compat.adaptation.anatomy.norms import NormPlaces
from compat.adaptation.mapping.assignments import Assignments
from compat.adaptation.mapping.linear_maps import View, head_view, merged, token_view
from compat.adaptation.tracing.calling import Forward, plain_kernels
from compat.adaptation.tracing.graph import Graph
from compat.errors import CompatError
from compat.parity.trace import Trace, tracing
from compat.tap import Tap, hook_tap, tap_names
from compat.user_models.eval_mode import eval_mode

Taps = dict[str, View]

PARTS = (None, 0, 1, 2)
MOST_ITEMS = 3  # items of a module's inputs and outputs that are examined
# The largest relative RMS difference between the graph's and a module's value of one tap. Two
# different taps differ by about 1.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.05}


def find_taps(anatomy: Anatomy, assignments: Assignments, places: NormPlaces) -> Taps:
    """Return every tap that some node of the model holds, in execution order."""
    graph = anatomy.graph
    found: dict[str, View | None] = {"embed": token_view(graph, anatomy.embed)}
    for i, (layer, attention) in enumerate(
        zip(anatomy.layers, assignments.attentions, strict=True)
    ):
        # Where q and k are scaled before their product, each is compared without its factor.
        found[f"h.{i}.q"] = replace(merged(attention.q), factor=attention.q_factor)
        found[f"h.{i}.k"] = replace(merged(attention.k), factor=attention.k_factor)
        found[f"h.{i}.v"] = merged(attention.v)
        probs = [op.probs for op in layer.attention_ops if op.probs is not None]
        if len(probs) == len(layer.attention_ops):
            found[f"h.{i}.probs"] = head_view(
                layer.attention_ops, probs, graph.shape, attention.sequences
            )
        heads = token_view(graph, layer.heads) if attention.unmerged else None
        by_head = merged(attention.heads)
        complete = heads is not None and heads.index.shape == by_head.index.shape
        found[f"h.{i}.heads"] = heads if complete else by_head
        nodes = {
            "attn": layer.attn, "resid_mid": layer.mid, "fc": layer.fc_end, "act": layer.act,
            "mlp": layer.mlp, "out": layer.out,
        }  # fmt: skip
        for name, node in nodes.items():
            found[f"h.{i}.{name}"] = token_view(graph, node)
    for name, norm in places.named.items():
        if name not in places.post and name not in places.on_output:
            found[name] = token_view(graph, norm.end)
    found["logits"] = token_view(graph, graph.output)
    taps: Taps = {}
    for name in tap_names(len(anatomy.layers)):
        view = found.get(name)
        # A whole node is at most one tap, but parts of a node can be several taps.
        if view is not None and all(view.nodes != other.nodes for other in taps.values()):
            taps[name] = view
    return taps


@torch.no_grad()
def trace_graph(
    graph: Graph, taps: Taps, input_ids: Tensor, forced: Mapping[str, Tensor] | None = None
) -> Trace:
    """Run the graph once and keep the hidden state at every tap.

    With `forced`, each tap is recorded and then replaced by the forced value, as in
    `compat.parity.trace`.

    Args:
        graph: the graph, which runs in the data type of its values.
        taps: the views to record, by name.
        input_ids: (B, T), of the shape that the graph was traced with.
        forced: values for some or all taps, by name.
    """
    forced_at: dict[Node, tuple[Tensor, Tensor]] = {}  # which elements are forced, to which values
    for name, view in taps.items():
        if forced is not None and name in forced:
            marks = view.write(torch.ones_like(forced[name]))
            for node, value, mark in zip(view.nodes, view.write(forced[name]), marks, strict=True):
                forced_at[node] = mark != 0, value
    computed: dict[Node, Tensor] = {}

    def force(node: Node, found: Tensor) -> Tensor:
        computed[node] = found
        if node not in forced_at:
            return found
        mark, value = forced_at[node]
        return torch.where(mark, value.to(found.dtype), found)

    graph.run([graph.output], {graph.input: input_ids}, double=False, force=force)
    return {name: view.read([computed[n] for n in view.nodes]) for name, view in taps.items()}


def module_taps(
    model: nn.Module, call: Forward, graph: Graph, views: Taps, ids: Tensor
) -> list[Tap]:
    """Find the taps whose hidden states a module returns, receives or computes by a softmax.

    Each is verified by a patch: the hidden state is replaced by that of other ids, in all layers at
    once, and the logits have to change as they do in the graph.

    Args:
        model: the module that has the parameters of the graph.
        call: how the model is called.
        graph: the model's graph.
        views: the taps of the graph.
        ids: (B, T), of the shape of the graph.
    """
    graph.recompute_derived()
    close = partial(_close, tolerance=TOLERANCE[next(iter(model.parameters())).dtype])
    if "logits" not in views:
        return []
    expected, other = trace_graph(graph, views, ids), trace_graph(graph, views, ids.flip(1))
    with eval_mode(model), plain_kernels():
        values = _module_values(model, call, ids)
        found: list[Tap] = []
        for kind in dict.fromkeys(map(_kind, views)):
            names = [name for name in views if _kind(name) == kind]
            forced = {name: other[name] for name in names}
            # A trace holds the value computed at a tap, even if it is then replaced.
            changed = (trace_graph(graph, views, ids, forced) | forced)["logits"]
            for taps in _candidates(names, expected, values, close):
                logits = _patched_logits(model, call, ids, taps, forced)
                if logits is not None and close(logits, changed[:, -logits.shape[1] :]):
                    found += taps
                    break
    order = list(views)
    return sorted(found, key=lambda tap: order.index(tap.name))


def _kind(name: str) -> str:
    """Return the name without the layer: "act" for "h.3.act"."""
    return name.rpartition(".")[2]


def _close(one: Tensor, two: Tensor, tolerance: float) -> bool:
    if one.shape != two.shape:
        return False
    delta = (one.double() - two.double()).norm()
    return bool(delta <= tolerance * two.double().norm())


def _module_values(model: nn.Module, call: Forward, ids: Tensor) -> dict[Tap, Tensor]:
    """Return what each module returns, receives and computes by softmax, if one value per call."""
    values: dict[Tap, Tensor] = {}
    several: set[Tap] = set()

    def keep(tap: Tap, value: object) -> None:
        if not isinstance(value, Tensor):
            return
        if tap in values and not torch.equal(values[tap], value):
            several.add(tap)
        values[tap] = value.detach().clone()

    def on_output(path: str, _module: nn.Module, _args: object, output: object) -> None:
        items = output if isinstance(output, tuple) else (output,)
        for number, item in enumerate(items[:MOST_ITEMS]):
            keep(Tap("", path, item=number), item)

    def on_input(path: str, _module: nn.Module, args: tuple[object, ...]) -> None:
        for number, item in enumerate(args[:MOST_ITEMS]):
            keep(Tap("", path, at="input", item=number), item)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            softmax = Tap("", path, at="softmax")
            hooks.enter_context(module.register_forward_pre_hook(partial(on_input, path)))
            hooks.enter_context(module.register_forward_hook(partial(on_output, path)))
            hooks.enter_context(hook_tap(module, softmax, partial(keep, softmax)))
        call(model, ids)
    return {tap: value for tap, value in values.items() if tap not in several}


def _candidates(
    names: Sequence[str],
    expected: Trace,
    values: dict[Tap, Tensor],
    close: Callable[[Tensor, Tensor], bool],
) -> Iterator[list[Tap]]:
    """Yield places with the hidden states of one tap in every layer, in the order of preference."""
    by_layer = []
    for name in names:
        found = []
        for tap, value in values.items():
            for part in PARTS:
                if part is not None and (value.ndim != 3 or value.shape[-1] % 3):
                    continue
                piece = value if part is None else value.chunk(3, dim=-1)[part]
                if close(piece, expected[name]):
                    found.append(Tap(name, tap.module, tap.at, tap.item, part))
        by_layer.append(sorted(found, key=_preference))
    for rank in range(min(map(len, by_layer))):
        yield [found[rank] for found in by_layer]


def _preference(tap: Tap) -> tuple[bool, bool, int]:
    """Return a sort key: outputs before inputs, modules before the model, outermost first."""
    depth = tap.module.count(".")
    return tap.at != "output", tap.module == "", -depth if tap.at == "softmax" else depth


def _patched_logits(
    model: nn.Module, call: Forward, ids: Tensor, taps: list[Tap], forced: Trace
) -> Tensor | None:
    """Return the logits with hidden states replaced; None if they cannot be replaced there."""
    dtype = next(iter(model.parameters())).dtype
    patch = {name: value.to(dtype) for name, value in forced.items()}
    try:
        with tracing(model, taps, patch=patch):
            return call(model, ids)
    except (CompatError, RuntimeError):  # no tensor can be written there
        return None
