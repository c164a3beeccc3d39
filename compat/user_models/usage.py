"""What a constructor reads off a config argument, by its own source and that of all it calls."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

Env = dict[str, "Reads"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
COPIES = {"copy", "deepcopy", "dict", "vars", "asdict"}


@dataclass
class Reads:
    """What is read off one value: names, each with what is in turn read off it.

    Args:
        names: the keys or attributes read.
        required: a constructor or `forward` reads it without a default.
        by_item: some are read as `config["key"]`.
        by_attribute: some are read as `config.key`.
        passed_as: the names of the parameters that the value itself is passed on to.
    """

    names: dict[str, Reads] = field(default_factory=dict)
    required: bool = False
    by_item: bool = False
    by_attribute: bool = False
    passed_as: set[str] = field(default_factory=set)

    def child(self, name: str, *, item: bool, required: bool) -> Reads:
        """Note that a name is read, and return what is read off its value."""
        found = self.names.setdefault(name, Reads())
        found.required |= required
        self.by_item |= item
        self.by_attribute |= not item
        return found


def reads(callee: Callable[..., Any], parameter: str) -> Reads:
    """Everything that a class or function, and what it passes the parameter on to, reads off it."""
    root = Reads()
    _Reader().follow(callee, parameter, root)
    return root


def functions(cls: type) -> Iterator[FunctionType]:
    """The functions that a user's class and its bases consist of, the constructor's first."""
    for base in cls.__mro__:
        members = sorted(vars(base).items(), key=lambda item: item[0] != "__init__")
        for _, member in members:
            bare = getattr(member, "__func__", getattr(member, "fget", member))
            bare = inspect.unwrap(bare) if callable(bare) else bare
            if isinstance(bare, FunctionType) and not is_foreign(bare):
                yield bare


def is_foreign(thing: Any) -> bool:
    """Whether torch or the like made it, so that its source is not the user's."""
    module = str(getattr(thing, "__module__", None) or "builtins")
    return module.split(".")[0] in {"torch", "builtins", "typing", "lightning", "transformers"}


@functools.lru_cache(maxsize=64)
def _tree(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def definition(function: FunctionType) -> Function | None:
    """The syntax of a function, its lines counted as in its file."""
    code = function.__code__
    for node in ast.walk(_tree("".join(linecache.getlines(code.co_filename)))):
        if isinstance(node, Function) and node.name == code.co_name:
            if min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno:
                return node
    return None


class _Reader:
    """Walks the sources; `seen` ends recursion."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, str, int]] = set()

    def follow(self, callee: Any, parameter: str, node: Reads) -> None:
        """Note what `callee` reads off its parameter, where that is the value of `node`."""
        if (callee, parameter, id(node)) in self.seen or is_foreign(callee):
            return
        self.seen.add((callee, parameter, id(node)))
        if not inspect.isclass(callee):
            function = inspect.unwrap(callee)
            if isinstance(function, FunctionType):
                self.scan(function, {parameter: node}, None, required=True)
            return
        init = inspect.unwrap(callee.__init__)
        if not isinstance(init, FunctionType):
            return
        env = self.scan(init, {parameter: node}, callee, required=True)
        kept = {text: value for text, value in env.items() if text.startswith("self.")}
        for function in functions(callee) if kept else ():
            if function is not init:
                required = function.__name__ in ("__init__", "forward")
                self.scan(function, dict(kept), callee, required=required)

    def scan(self, function: FunctionType, env: Env, owner: type | None, *, required: bool) -> Env:
        """Note what one function reads off the values in `env`; returns it with its aliases."""
        node = definition(function)
        if node is None:
            return env
        scan = _Scan(self, function, env, owner, required)
        nodes = list(ast.walk(node))
        assignments = [n for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign))]
        for assignment in sorted(assignments, key=lambda n: n.lineno):
            scan.alias(assignment)
        scan.called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
        for inner in nodes:
            if isinstance(inner, ast.Call):
                scan.call(inner)
            elif isinstance(inner, (ast.Attribute, ast.Subscript)):
                if isinstance(inner.ctx, ast.Load):
                    scan.resolve(inner)
        return env


@dataclass
class _Scan:
    """One function's source, and the expressions in it that stand for values read."""

    reader: _Reader
    function: FunctionType
    env: Env
    owner: type | None
    required: bool
    called: set[int] = field(default_factory=set)

    def alias(self, node: ast.Assign | ast.AnnAssign) -> None:
        """`self.config = config`, `n = config.n_embd`."""
        found = None if node.value is None else self.resolve(node.value)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if found is not None and isinstance(target, (ast.Name, ast.Attribute)):
                self.env.setdefault(ast.unparse(target), found)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self.alias(ast.Assign(targets=[one], value=value))

    def resolve(self, expr: ast.expr) -> Reads | None:
        """The value that an expression stands for, noting that it is read; None: another one."""
        if isinstance(expr, (ast.Name, ast.Attribute)) and (known := self.env.get(_text(expr))):
            return known
        if isinstance(expr, ast.Attribute):
            base = self.resolve(expr.value)
            if base is None or expr.attr.startswith("__"):
                return None
            if id(expr) not in self.called:
                return base.child(expr.attr, item=False, required=self.required)
            return None if hasattr(dict, expr.attr) else base.names.get(expr.attr)
        if isinstance(expr, ast.Subscript) and (key := _constant(expr.slice)) is not None:
            base = self.resolve(expr.value)
            return base and base.child(key, item=True, required=self.required)
        if isinstance(expr, (ast.BoolOp, ast.IfExp)):
            parts = expr.values if isinstance(expr, ast.BoolOp) else [expr.body, expr.orelse]
            return next((found for part in parts if (found := self.resolve(part))), None)
        return self._resolve_call(expr) if isinstance(expr, ast.Call) else None

    def _resolve_call(self, call: ast.Call) -> Reads | None:
        """`getattr(config, "name", default)`, `config.get("name", default)`, `dict(config)`."""
        name = _text(call.func).rpartition(".")[2]
        if name == "getattr" and len(call.args) > 1 and (key := _constant(call.args[1])):
            base, required = self.resolve(call.args[0]), len(call.args) == 2 and self.required
            return base and base.child(key, item=False, required=required)
        if name in ("get", "pop") and isinstance(call.func, ast.Attribute) and call.args:
            key, base = _constant(call.args[0]), self.resolve(call.func.value)
            return base.child(key, item=True, required=False) if base and key else None
        if name in COPIES and len(call.args) == 1:
            return self.resolve(call.args[0])
        if name == "copy" and isinstance(call.func, ast.Attribute):
            return self.resolve(call.func.value)
        return None

    def call(self, call: ast.Call) -> None:
        """Follow what is passed on to something else's parameters."""
        self.resolve(call)
        callee, names = self._callee(call.func)
        for name, argument in zip(names, call.args, strict=False):
            self._pass(callee, name, argument)
        for keyword in call.keywords:
            if keyword.arg is not None:
                self._pass(callee, keyword.arg, keyword.value)
            elif (found := self.resolve(keyword.value)) is not None:
                for name in names:  # callee(**config)
                    required = self.required and _has_no_default(callee, name)
                    found.child(name, item=True, required=required)

    def _pass(self, callee: Any, name: str, argument: ast.expr) -> None:
        found = self.resolve(argument)
        if found is not None and callee is not None:
            found.passed_as.add(name)
            self.reader.follow(callee, name, found)

    def _callee(self, expr: ast.expr) -> tuple[Any, list[str]]:
        """What is called, and its parameters in order, `self` left out where it is bound."""
        text = _text(expr)
        bound = False
        if text == "range":
            return range, ["n_layer"]
        if text.startswith("super(") and self.owner is not None:
            callee, bound = self._inherited(text.rpartition(".")[2]), True
        elif text.startswith("self.") and self.owner is not None:
            callee, bound = getattr(self.owner, text.removeprefix("self."), None), True
        else:
            callee = self._global(text)
        try:
            names = list(inspect.signature(callee).parameters)
        except (TypeError, ValueError):
            return None, []
        return callee, names[1:] if bound else names

    def _inherited(self, method: str) -> Any:
        """What `super().method` is in the function at hand."""
        qualified = self.function.__qualname__.rpartition(".")[0]
        mro = self.owner.__mro__ if self.owner is not None else ()
        at = next((i for i, base in enumerate(mro) if base.__qualname__ == qualified), 0)
        return next((vars(base)[method] for base in mro[at + 1 :] if method in vars(base)), None)

    def _global(self, text: str) -> Any:
        first, *rest = text.split(".")
        found = self.function.__globals__.get(first, getattr(builtins, first, None))
        for name in rest:
            found = getattr(found, name, None)
        return found


def _has_no_default(callee: Any, name: str) -> bool:
    parameter = inspect.signature(callee).parameters[name]
    return parameter.default is parameter.empty


def _text(expr: ast.expr) -> str:
    return ast.unparse(expr)


def _constant(expr: ast.expr) -> str | None:
    return expr.value if isinstance(expr, ast.Constant) and isinstance(expr.value, str) else None
