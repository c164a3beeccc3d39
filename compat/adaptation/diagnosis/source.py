"""Where in the author's source something stands: the line that runs it, or that builds it."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Iterable
from functools import cache

from torch import nn
from torch.fx import Node

from compat.adaptation.anatomy.norms import Norm
from compat.adaptation.tracing.graph import Graph, Place, kind


def running(graph: Graph, nodes: Iterable[Node], *kinds: str) -> Place | None:
    """The line of the first node of one of these kinds; of the first with a line, if none is."""
    nodes = [node for node in nodes if graph.place(node) is not None]
    wanted = [node for node in nodes if kind(node) in kinds]
    return graph.place((wanted or nodes)[0]) if nodes else None


def calling(graph: Graph, inside: Node, beside: Node) -> Place | None:
    """The line at which the ways to two nodes part: where a block calls what computes `inside`."""
    frames, others = graph.places(inside), graph.places(beside)
    before = None
    for frame, other in zip(frames, others, strict=False):
        if frame != other:  # in another function they have parted on one and the same line before
            return frame if frame.function == other.function else before
        before = frame
    if frames == others and len(frames) > 1 and _path(inside) != _path(beside):
        return frames[-2]  # both are computed by the same lines of two modules
    return before or (frames[-1] if frames else None)


def _path(node: Node) -> str:
    """The module that computes a node."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def norm_call(graph: Graph, model: nn.Module, norm: Norm) -> Place | None:
    """The line that calls a norm, not the lines within it."""
    frames = graph.places(norm.end)
    module = _innermost(norm.end, model)
    own = module is not None and not type(module).__module__.startswith("torch.")
    inside = own and norm.scale is not None and any(
        p is not None and p.data_ptr() == graph.values[norm.scale].data_ptr()
        for p in module._parameters.values()  # type: ignore[union-attr]
    )  # fmt: skip
    if inside:
        outside = [f for f in frames if f.function != frames[-1].function or f.line < 0]
        frames = _before_last_forward(frames) or outside or frames
    elif len(frames) > 1 and "norm" in frames[-1].function.lower():
        frames = frames[:-1]  # a function that normalises: the line that calls it
    return frames[-1] if frames else None


def _before_last_forward(frames: list[Place]) -> list[Place]:
    """The frames that led to the innermost `forward`."""
    last = max((i for i, f in enumerate(frames) if f.function == "forward"), default=0)
    return frames[:last]


def _innermost(node: Node, model: nn.Module) -> nn.Module | None:
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        path = re.sub(r"^model\.?", "", str(path))
        if path and _has(model, path):
            return model.get_submodule(path)
    return None


def building(model: nn.Module, path: str) -> Place | None:
    """The line that builds a module or parameter, such as `blocks.0.attn.qkv.weight`."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        owner: nn.Module | None = model
        for part in parts[: end - 1]:
            owner = None if owner is None else getattr(owner, part, None)
        name, rest = parts[end - 1], parts[end:]
        if owner is None or name.isdigit():
            continue
        place = _assignment(type(owner), name, rest)
        if place is not None:
            return place
    return None


def built(model: nn.Module, parameter: str) -> Place | None:
    """The line that builds the small module a parameter belongs to; else the parameter's own."""
    path = parameter.rpartition(".")[0]
    module = model.get_submodule(path)
    small = not list(module.children()) and len(list(module.parameters())) <= 2
    return (building(model, path) if small and path else None) or building(model, parameter)


def torch_module(model: nn.Module, node: Node) -> Place | None:
    """The line that builds the torch module, such as nn.GELU, in which a node is computed."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [re.sub(r"^model\.?", "", str(path)) for path, _ in stack.values()]
    names: list[str] = []
    innermost = ""
    for path in reversed([path for path in paths if path and _has(model, path)]):
        module = model.get_submodule(path)
        if not type(module).__module__.startswith("torch."):
            break
        if not isinstance(module, (nn.Sequential, nn.ModuleList)):
            names.append(type(module).__name__)
            innermost = innermost or path
    if not names:
        return None
    place = building(model, innermost)
    for name in names:  # a layer may be built apart from the stack that it is copied into
        if place is not None and (line := mention(place.file, name)):
            found = naming(place, name)
            return found if name in found.text else line
    return place


def saying(model: nn.Module, pattern: str) -> Place | None:
    """The first line of the model's own class that matches."""
    cls: type = type(model)
    parsed = _parsed(cls)
    if parsed is None:
        return None
    file, first, _ = parsed
    count = len(inspect.getsourcelines(cls)[0])
    lines = (Place(file, first + i) for i in range(count))
    return next((line for line in lines if re.search(pattern, line.text)), None)


def named(message: str) -> Place | None:
    """The line that the message of a tracer that stopped speaks of."""
    line = re.search(r" at (\S+):(\d+) ", message)
    return Place(line[1], int(line[2])) if line else None


def mention(file: str, name: str) -> Place | None:
    """The first line of a file that calls a class of this name."""
    for number, text in enumerate(linecache.getlines(file), 1):
        if re.search(rf"\b{name}\(", text) and not text.lstrip().startswith(("#", "class ")):
            return Place(file, number)
    return None


def naming(place: Place, name: str) -> Place:
    """The first line from there on that has the name, within a few lines; else the line."""
    for line in range(place.line, place.line + 8):
        if name in Place(place.file, line).text:
            return Place(place.file, line)
    return place


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _assignment(cls: type, name: str, rest: list[str]) -> Place | None:
    """Where a class assigns `self.name`, or the item or key of it that `rest` goes on with."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            break
        parsed = _parsed(base)
        if parsed is None:
            continue
        file, first, tree = parsed
        for node in ast.walk(tree):
            if (found := _assigns(node, name)) is not None:
                line = _within(found, rest).lineno
                return Place(file, first + line - 1)
    return None


def _assigns(node: ast.AST, name: str) -> ast.expr | ast.stmt | None:
    """What a statement makes `self.name` of, or registers under that name."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        flat = [t for target in targets for t in getattr(target, "elts", [target])]
        if any(isinstance(t, ast.Attribute) and t.attr == name for t in flat):
            return node.value if isinstance(node.value, ast.Call) else node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr in ("register_buffer", "register_parameter", "add_module"):
            first = node.args[0]
            if isinstance(first, ast.Constant) and first.value == name:
                return node
    return None


def _within(made: ast.expr | ast.stmt, rest: list[str]) -> ast.expr | ast.stmt:
    """The part of what is made that a path goes on to: an item's number, a key."""
    for step in rest:
        if step.isdigit() and isinstance(made, ast.Call):
            items = made.args
            if len(items) == 1 and isinstance(items[0], (ast.List, ast.Tuple)):
                items = items[0].elts
            if int(step) >= len(items) or not isinstance(items[int(step)], ast.expr):
                return made
            if isinstance(items[int(step)], (ast.Starred, ast.ListComp, ast.GeneratorExp)):
                return made
            made = items[int(step)]
        elif not step.isdigit():
            keyed = [k.value for n in ast.walk(made) if isinstance(n, ast.Call)
                     for k in n.keywords if k.arg == step]  # fmt: skip
            keyed += [v for n in ast.walk(made) if isinstance(n, ast.Dict)
                      for k, v in zip(n.keys, n.values, strict=True)
                      if isinstance(k, ast.Constant) and k.value == step]  # fmt: skip
            if not keyed:
                return made
            made = keyed[0]
    return made


@cache
def _parsed(cls: type) -> tuple[str, int, ast.AST] | None:
    try:
        lines, first = inspect.getsourcelines(cls)
        file = inspect.getsourcefile(cls)
        tree = ast.parse(inspect.cleandoc("\n" + "".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    return None if file is None else (file, first, tree)
