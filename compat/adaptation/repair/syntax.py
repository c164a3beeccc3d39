"""Questions about the syntax of Python code that need nothing but a node."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import TypeGuard


def called(call: ast.Call) -> str:
    """Return the last part of the name that is called: `gelu` of `F.gelu(x)`."""
    return name_of(call.func)


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name: `gelu` of `F.gelu`; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def root(node: ast.expr) -> str:
    """Return the first part of a dotted name: `torch` of `torch.nn.GELU`; "" for others."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return name_of(node)


def last_name(node: ast.AST) -> str:
    """Return the last part of a name: `n_embd` of `config.n_embd` and of `config["n_embd"]`."""
    if isinstance(node, ast.Subscript):
        return str(constant(node.slice))
    return name_of(node)


def argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """Return an argument of a call, by its place or its name."""
    if len(call.args) > place:
        return call.args[place]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def is_self(node: ast.AST | None, name: str | None = None) -> TypeGuard[ast.Attribute]:
    """Return whether a node is `self.name`, or any attribute of `self`."""
    match node:
        case ast.Attribute(ast.Name("self"), found):
            return name in (None, found)
    return False


def own_attribute(node: ast.AST) -> str | None:
    """Return `name` if a node is `self.name`."""
    return node.attr if is_self(node) else None


def is_sum(node: ast.AST | None) -> TypeGuard[ast.BinOp]:
    """Return whether a node is `a + b`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def sides(node: ast.BinOp) -> tuple[tuple[ast.expr, ast.expr], tuple[ast.expr, ast.expr]]:
    """Return the right and the left operand, each with the other one."""
    return (node.right, node.left), (node.left, node.right)


def is_product(node: ast.AST | None) -> TypeGuard[ast.BinOp]:
    """Return whether a node is `a * b` or `a / b`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))


ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def constant(node: ast.expr | None) -> object:
    """Return the value of a literal or of arithmetic such as `10**-6`; otherwise Ellipsis."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = constant(node.left), constant(node.right)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            return ARITHMETIC[type(node.op)](left, right)
    try:
        return ... if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return ...


def is_integer(node: ast.expr | None) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int


def variables(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """Return the variables in a node, or those that it assigns (Store) or reads (Load)."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, context)}


def variable(node: ast.AST | None) -> str:
    """Return `x` if a node is the statement `x = …`, and otherwise ""."""
    match node:
        case ast.Assign([ast.Name(name), *_]):
            return name
    return ""


def is_size(node: ast.AST) -> bool:
    """Return whether a node is `x.shape[i]`, `x.size(i)` or `len(x)`."""
    match node:
        case ast.Subscript(ast.Attribute(attr="shape") | ast.Call(ast.Attribute(attr="size"))):
            return True
        case ast.Call(_, [_, *_]):
            return called(node) in ("size", "len")
    return False


def unpacked_sizes(node: ast.AST) -> list[str]:
    """Return what a statement calls the sizes of a tensor: B, T and C in `B, T, C = x.shape`."""
    match node:
        case ast.Assign(
            [ast.Tuple(names)], ast.Attribute(attr="shape") | ast.Call(ast.Attribute(attr="size"))
        ):
            return [ast.unparse(name) for name in names]
    return []


def constructor(cls: ast.ClassDef) -> ast.FunctionDef | None:
    """Return the `__init__` of a class."""
    functions = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
    return next((node for node in functions if node.name == "__init__"), None)


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def parameters(function: Function) -> list[str]:
    """Return the names of a function's parameters, other than `*args` and `**kwargs`."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [each.arg for each in every]


def default_of(function: Function, name: str) -> ast.expr | None:
    """Return the default of a parameter."""
    every = function.args
    positional = [*every.posonlyargs, *every.args]
    pairs: list[tuple[ast.arg, ast.expr | None]] = [
        *zip(reversed(positional), reversed(every.defaults), strict=False),
        *zip(every.kwonlyargs, every.kw_defaults, strict=True),
    ]
    return next((default for each, default in pairs if each.arg == name), None)


def targets(node: ast.stmt) -> list[ast.expr]:
    """Return what an assignment assigns to."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def assigns(target: ast.expr, name: str) -> bool:
    """Return whether a target is a variable or an attribute of this name."""
    return isinstance(target, (ast.Name, ast.Attribute)) and name_of(target) == name


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment with their values."""
    match node:
        case ast.Assign(targets, value):
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    yield from zip(target.elts, value.elts, strict=False)
                else:
                    yield target, value
        case ast.AnnAssign(target, _, ast.expr() as value) | ast.NamedExpr(target, value):
            yield target, value


def assignments(within: ast.AST, name: str, *, deep: bool = True) -> Iterator[ast.expr]:
    """Yield the values assigned to a name."""
    for node in ast.walk(within) if deep else [within]:
        for target, value in assigned(node):
            if isinstance(target, ast.Name) and target.id == name:
                yield value


def self_assignments(within: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield the values assigned to `self.name`."""
    for node in ast.walk(within):
        for target, value in assigned(node):
            if is_self(target, name):
                yield value
