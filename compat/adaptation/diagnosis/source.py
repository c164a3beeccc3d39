"""The lines of the user's source that run an operation or build a module."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache

from torch import nn
from torch.fx import Node

from compat.adaptation.anatomy.norms import Norm
from compat.adaptation.tracing.graph import Graph, Place, kind
from compat.name_map import whole_of
from compat.user_models.usage import is_users_class, nodes_of, syntax_tree, user_modules

MOST_OWNERS = 6  # lines, as of ln_1, ln_2, ln_f, and norms of q and k
MOST_NAMED = 4

# Lines that run something.


def running(graph: Graph, nodes: Iterable[Node], *kinds: str) -> Place | None:
    """Return the line of the first node of one of these kinds, or else the first known line."""
    nodes = [node for node in nodes if graph.place(node) is not None]
    preferred = [node for node in nodes if kind(node) in kinds]
    return graph.place((preferred or nodes)[0]) if nodes else None


def calling(graph: Graph, model: nn.Module, node: Node, other: Node) -> Place | None:
    """Return the line of the call to `node` at which its stack departs from that of `other`."""
    frames, others = graph.places(node), graph.places(other)
    before = None
    for frame, beside in zip(frames, others, strict=False):
        if frame != beside:  # in different functions, the line before called both
            return frame if frame.function == beside.function else before
        before = frame
    if frames == others and len(frames) > 1 and _module_paths(node) != _module_paths(other):
        if _is_users(_innermost(model, node)[1]):
            return frames[-2]  # two modules of one class
    return before or (frames[-1] if frames else None)


def beside(graph: Graph, node: Node, other: Node) -> Place | None:
    """Return the line that leads to `node` in the innermost function that also leads to `other`."""
    line = None
    for frame, of_other in zip(graph.places(node), graph.places(other), strict=False):
        if (frame.file, frame.function) != (of_other.file, of_other.function):
            break
        line = frame
        if frame != of_other:
            break
    return line


def callers(graph: Graph, place: Place) -> list[Place]:
    """Return the lines that call the function or module whose own code a line is."""
    frames = [graph.places(node) for node in graph.nodes if graph.place(node) == place]
    return list(dict.fromkeys(lines[-2] for lines in frames if len(lines) > 1))


def callers_below(graph: Graph, place: Place, nodes: Iterable[Node]) -> list[Place]:
    """Return the lines that led to one, as far as the functions that compute these nodes."""
    functions = {(frame.file, frame.function) for node in nodes for frame in graph.places(node)}
    found: dict[Place, None] = {}
    for node in graph.nodes:
        if graph.place(node) == place:
            for frame in reversed(graph.places(node)[:-1]):
                found[frame] = None
                if (frame.file, frame.function) in functions:
                    break
    return list(found)


def calls(graph: Graph, nodes: Iterable[Node], place: Place | None) -> list[Place]:
    """Return the lines that call the function, such as `norm(x)`, in which a line is.

    A method is such a function only if `forward` calls it.
    """
    frames = [graph.places(node) for node in nodes if graph.place(node) == place]
    called = [
        f for f in frames
        if len(f) > 1 and not f[-1].in_forward and (f[-2].in_forward or "." not in f[-1].function)
    ]  # fmt: skip
    return list(dict.fromkeys(lines[-2] for lines in called))


def module_call(graph: Graph, model: nn.Module, node: Node) -> Place | None:
    """Return the line that calls the user's innermost module that computes a node."""
    frames, (path, module) = graph.places(node), _innermost(model, node)
    if not path or not _is_users(module) or len(frames) < 2:
        return graph.place(node)
    # Its forward may call other methods of it, such as the `norm` of an RMSNorm.
    inner = [i for i, frame in enumerate(frames) if frame.in_forward and i > 0]
    return frames[inner[-1] - 1 if inner else -2]


def submodule_call(graph: Graph, model: nn.Module, node: Node, outer: Node) -> Place | None:
    """Return the line that calls the submodule that computes a node, in the module of another."""
    own, other = _module_paths(node)[:1], _module_paths(outer)[:1]
    inside = bool(own and other) and own[0].startswith(f"{other[0]}.")
    return module_call(graph, model, node) if inside else None


def projecting(graph: Graph, model: nn.Module, node: Node) -> Place | None:
    """Return the line that calls a user's own linear layer, rather than the one inside it."""
    _, module = _innermost(model, node)
    own = [p for p in module._parameters.values() if p is not None]
    if _is_users(module) and len(list(module.parameters())) == len(own):
        if sum(p.ndim > 1 for p in own) == 1:
            return module_call(graph, model, node)
    return graph.place(node)


def embedding_call(graph: Graph, model: nn.Module, node: Node) -> Place | None:
    """Return the line that calls a user's own embedding, rather than the look-up inside it."""
    frames = graph.places(node)
    for _, module in _modules(model, node):
        if len(list(module.parameters())) != 1:
            break
        if _is_users(module) and len(frames) > 1:
            frames = frames[:-1]
    return frames[-1] if frames else None


def norm_call(graph: Graph, model: nn.Module, norm: Norm) -> Place | None:
    """Return the line that calls a norm, not one inside it or in a module around it alone."""
    frames, inputs = graph.places(norm.end), _module_paths(norm.start)
    weights = [p for p in (norm.scale, norm.shift) if p is not None]
    own = {value.data_ptr() for p in weights for value in graph.parameter_values(p)}
    called = False
    for path, module in _modules(model, norm.end):
        if not _is_users(module):
            continue
        if path in inputs or not {p.data_ptr() for p in module.parameters()} <= own:
            break
        last = max((i for i, f in enumerate(frames) if f.in_forward), default=0)
        outside = [f for f in frames if f.function != frames[-1].function or f.line < 0]
        frames, called = frames[:last] or outside or frames, True
    if not called and len(frames) > 1 and "norm" in frames[-1].function.rpartition(".")[2].lower():
        frames = frames[:-1]  # a function that normalizes
    return frames[-1] if frames else None


def _module_paths(node: Node) -> list[str]:
    """Return the paths of the modules that compute a node, innermost first, without the model."""
    return list(reversed(node.meta.get("modules", ())))


def _modules(model: nn.Module, node: Node) -> Iterator[tuple[str, nn.Module]]:
    """Yield the same paths with their modules."""
    yield from ((path, model.get_submodule(path)) for path in _module_paths(node))


def _innermost(model: nn.Module, node: Node) -> tuple[str, nn.Module]:
    """Return the first of them, or else "" and the model."""
    return next(_modules(model, node), ("", model))


def _is_users(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.")


# Lines that build something.


def building(model: nn.Module, path: str) -> Place | None:
    """Return the line that builds a module or parameter, such as `blocks.0.attn.qkv.weight`.

    That of a slice, such as `weights[3]`, builds the whole parameter.
    """
    parts = (whole_of(path) or path).split(".")
    for end in range(len(parts), 0, -1):
        owner: nn.Module | None = model
        for part in parts[: end - 1]:
            owner = None if owner is None else getattr(owner, part, None)
        name, rest = parts[end - 1], parts[end:]
        if owner is None or (name.isdigit() and not isinstance(owner, nn.Sequential)):
            continue
        if name.isdigit():
            place = _passed_to_base(type(owner), parts[end - 1 :])
        else:
            place = _assignment(type(owner), name, rest)
        if place:
            return place
    return None


def built(model: nn.Module, parameter: str) -> Place | None:
    """Return the line that builds the leaf module of a parameter, or else the parameter."""
    path = parameter.rpartition(".")[0]
    module = model.get_submodule(path)
    # Such as nn.Linear or a norm, but not an attention with bare parameters.
    parameters = [p for p in module._parameters.values() if p is not None]
    small = not list(module.children()) and sum(p.ndim > 1 for p in parameters) <= 1
    return (building(model, path) if small and path else None) or building(model, parameter)


def torch_built(model: nn.Module, nodes: Iterable[Node]) -> Place | None:
    """Return the line that builds a torch module, such as nn.GELU, that computes a node."""
    return next((place for node in nodes if (place := _torch_module(model, node))), None)


def function_built(model: nn.Module, nodes: Iterable[Node]) -> Place | None:
    """Return the line that builds a user's module without parameters that computes a node."""
    for path, module in (_innermost(model, node) for node in nodes):
        if path and _is_users(module) and not list(module.parameters()):
            return building(model, path)
    return None


def stack_built(model: nn.Module, node: Node) -> Place | None:
    """Return the line that builds the nn.TransformerEncoder, if one computes a node."""
    stacks = (nn.TransformerEncoder, nn.TransformerDecoder)
    modules = _modules(model, node)
    return next((building(model, path) for path, m in modules if isinstance(m, stacks)), None)


def in_sequence(model: nn.Module, node: Node) -> bool:
    """Return whether a node is computed by an item of an nn.Sequential."""
    paths = _module_paths(node)
    return len(paths) > 1 and isinstance(model.get_submodule(paths[1]), nn.Sequential)


def torch_layer(model: nn.Module, path: str) -> Place | None:
    """Return the line that builds the layer of torch's encoder that a module is in.

    A layer may be built before it is passed to the stack that copies it.
    """
    parts = path.split(".")
    for end in range(len(parts) + 1):
        module = model.get_submodule(".".join(parts[:end]))
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            place = building(model, ".".join(parts[:end]))
            return place and (mention(place.file, type(module).__name__) or place)
    return None


def torch_layer_of(model: nn.Module, node: Node) -> Place | None:
    """Return the line that builds the layer of torch's encoder that computes a node."""
    paths = _module_paths(node)
    return torch_layer(model, paths[0]) if paths else None


def owners(graph: Graph, model: nn.Module, place: Place) -> list[Place]:
    """Return the lines that build the user's modules whose own code a line is, such as an RMSNorm.

    None for a module with many uses, such as a user's own linear layer.
    """
    found: dict[Place | None, None] = {}
    for node in graph.nodes:
        if graph.place(node) == place:
            path = next((p for p, module in _modules(model, node) if _is_users(module)), None)
            found[None if path is None else building(model, path)] = None
    lines = [line for line in found if line is not None]
    return lines if len(lines) <= MOST_OWNERS else []


def keywords(model: nn.Module, name: str, value: object) -> list[Place]:
    """Return the lines of the user's code that pass this value by a keyword of this name."""
    return [
        Place(str(module.__file__), node.value.lineno)
        for module in user_modules(type(model)) for node in nodes_of(module)
        if isinstance(node, ast.keyword) and node.arg == name
        and isinstance(node.value, ast.Constant) and node.value.value == value
    ]  # fmt: skip


def defaults(graph: Graph, model: nn.Module, place: Place, value: object) -> list[Place]:
    """Return the lines of arguments with this default, in the user's modules around a line."""
    found: dict[Place, None] = {}
    for node in (node for node in graph.nodes if graph.place(node) == place):
        users = (type(module) for _, module in _modules(model, node) if _is_users(module))
        cls: type | None = next(users, None)
        if cls is None or (parsed := _parsed(cls)) is None:
            continue
        file, tree = parsed
        functions = (inner for inner in ast.walk(tree) if isinstance(inner, ast.FunctionDef))
        for default in (default for function in functions for default in function.args.defaults):
            if isinstance(default, ast.Constant) and default.value == value:
                found[Place(file, default.lineno)] = None
    return list(found)


def computed_sizes(model: nn.Module, place: Place) -> list[Place]:
    """Return the lines that compute a size which is passed in a line, as in `hidden = 8 * n // 3`.

    They are lines of the same class.
    """
    for cls in dict.fromkeys(map(type, model.modules())):
        parsed = _parsed(cls) if is_users_class(cls) else None
        if parsed is None or parsed[0] != place.file:
            continue
        file, tree = parsed
        nodes = list(ast.walk(tree))
        passed = {
            ast.unparse(argument)
            for call in nodes
            if isinstance(call, ast.Call) and call.lineno <= place.line <= (call.end_lineno or 0)
            for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        }
        if passed:
            return [
                Place(file, node.lineno)
                for node in nodes
                if isinstance(node, ast.Assign) and isinstance(node.value, (ast.BinOp, ast.Call))
                and {*map(ast.unparse, node.targets)} & passed
            ]  # fmt: skip
    return []


def _torch_module(model: nn.Module, node: Node) -> Place | None:
    names: list[str] = []
    innermost = ""
    for path, module in _modules(model, node):
        if _is_users(module):
            break
        if not isinstance(module, (nn.Sequential, nn.ModuleList)):
            names.append(type(module).__name__)
            innermost = innermost or path
    if not names:
        return None
    place = building(model, innermost)
    for name in names:  # a layer may be built before it is passed to the stack that copies it
        if place is not None and (line := mention(place.file, name)):
            found = near(place, rf"\b{name}\b")
            return found if name in found.text else line
    return place


def _assignment(cls: type, name: str, rest: list[str]) -> Place | None:
    """Return the line at which a class assigns `self.name`, or its item or key in `rest`."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            break
        if (parsed := _parsed(base)) is None:
            continue
        file, tree = parsed
        for node in ast.walk(tree):
            if (value := _assigned(node, name)) is not None:
                return Place(file, _item(value, rest).lineno)
    return None


def _passed_to_base(cls: type, path: list[str]) -> Place | None:
    """Return the line of an item that a class passes to nn.Sequential's constructor."""
    if cls.__module__.startswith("torch.") or (parsed := _parsed(cls)) is None:
        return None
    file, tree = parsed
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Call(ast.Name("super")), "__init__"), [_, *_]):
                return Place(file, _item(node, path).lineno)
    return None


def _assigned(node: ast.AST, name: str) -> ast.expr | ast.stmt | None:
    """Return the call that a statement assigns to `self.name` or registers under the name."""
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


def _item(value: ast.expr | ast.stmt, path: list[str]) -> ast.expr | ast.stmt:
    """Return the part of a value that a path leads to, by the numbers of items and by keys."""
    for step in path:
        if step.isdigit() and isinstance(value, ast.Call):
            items = value.args
            if len(items) == 1 and isinstance(items[0], (ast.List, ast.Tuple)):
                items = items[0].elts
            generated = (ast.Starred, ast.ListComp, ast.GeneratorExp)
            first = next((item for item in items if isinstance(item, generated)), None)
            if first in items[: int(step) + 1] and first is not None:
                return first
            if int(step) >= len(items):
                return value
            value = items[int(step)]
        elif not step.isdigit():
            keyed = next(_keyed(value, step), None)
            if keyed is None:
                return value
            value = keyed
    return value


def _keyed(value: ast.AST, key: str) -> Iterator[ast.expr]:
    """Yield the values of a keyword argument or a dictionary's key, those of calls first."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            yield from (k.value for k in node.keywords if k.arg == key)
    for node in ast.walk(value):
        if isinstance(node, ast.Dict):
            for k, v in zip(node.keys, node.values, strict=True):
                if isinstance(k, ast.Constant) and k.value == key:
                    yield v


@cache
def _parsed(cls: type) -> tuple[str, ast.ClassDef] | None:
    """Return the file or cell of a class, and its syntax tree.

    They are those of its methods: a notebook may define several classes of one name.
    """
    for function in filter(inspect.isfunction, vars(cls).values()):
        code = function.__code__
        with suppress(SyntaxError):
            tree = syntax_tree("".join(linecache.getlines(code.co_filename)))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                    if node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):
                        return code.co_filename, node
    return None


# Lines with a certain text.


def mentions(model: nn.Module, pattern: str) -> list[Place]:
    """Return the lines in files of the user's modules that match a regular expression."""
    files = dict.fromkeys(str(module.__file__) for module in user_modules(type(model)))
    classes = dict.fromkeys(map(type, model.modules()))
    files |= {p[0]: None for cls in classes if is_users_class(cls) and (p := _parsed(cls))}
    lines = (Place(f, n) for f in files for n in range(1, len(linecache.getlines(f)) + 1))
    code = (line for line in lines if not line.text.lstrip().startswith("#"))
    return list(dict.fromkeys(line.in_cell for line in code if re.search(pattern, line.text)))


def selected(model: nn.Module, function: str, cls: str) -> list[Place]:
    """Return the lines that name a torch function or class other than in a call, if few.

    Such a name is an entry of a table, a default, or an argument. Without them, the lines that
    construct the class.
    """
    name = rf"\b(nn\.{cls}|(F|functional|torch)\.{function})\b"
    for pattern in (rf"{name}(?!\()|[\"']{function}[\"']", name):
        if lines := mentions(model, pattern):
            return lines if len(lines) <= MOST_NAMED else []
    return []


def matching(model: nn.Module, pattern: str) -> Place | None:
    """Return the first line of the model's class that matches a regular expression."""
    cls: type = type(model)
    if (parsed := _parsed(cls)) is None:
        return None
    file, tree = parsed
    lines = (Place(file, n) for n in range(tree.lineno, (tree.end_lineno or 0) + 1))
    return next((line for line in lines if re.search(pattern, line.text)), None)


def argument(model: nn.Module, name: str) -> Place | None:
    """Return the line of the model's `forward` that declares an argument."""
    cls: type = type(model)
    if (parsed := _parsed(cls)) is None:
        return None
    file, tree = parsed
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    arguments = (
        arg for function in functions if function.name == "forward"
        for arg in (*function.args.args, *function.args.kwonlyargs) if arg.arg == name
    )  # fmt: skip
    return next((Place(file, arg.lineno) for arg in arguments), None)


def unused_result(place: Place, methods: Collection[str]) -> Place | None:
    """Return the statement that calls one of these methods or modules with an unread result.

    It is in the function with the line `place`. The result may have a name that is not used, as
    where it is misspelled.
    """
    with suppress(SyntaxError):
        tree = syntax_tree("".join(linecache.getlines(place.file)))
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not function.lineno <= place.line <= (function.end_lineno or 0):
                continue
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            for node in ast.walk(function):
                match node:
                    case ast.Expr(ast.Call(ast.Attribute(attr=attr))) if attr in methods:
                        return Place(place.file, node.lineno)
                    case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(attr=attr))) if (
                        attr in methods and name not in read
                    ):
                        return Place(place.file, node.lineno)
    return None


def named(message: str) -> Place | None:
    """Return the line that a tracer's error message names."""
    line = re.search(r" at (\S+):(\d+) ", message)
    return Place(line[1], int(line[2])) if line else None


def mention(file: str, name: str) -> Place | None:
    """Return the first line of a file that calls a class of this name."""
    for number, text in enumerate(linecache.getlines(file), 1):
        if re.search(rf"\b{name}\(", text) and not text.lstrip().startswith(("#", "class ")):
            return Place(file, number)
    return None


def near(place: Place, pattern: str) -> Place:
    """Return the matching line, of eight from a line on or else before it; else the line itself."""
    start = place.line
    for line in (*range(start, start + 8), *range(start - 1, max(start - 9, 0), -1)):
        if re.search(pattern, Place(place.file, line).text):
            return Place(place.file, line)
    return place
