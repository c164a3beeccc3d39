"""What a block does with the residual stream: its sums, and the norms that are applied to it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from compat.adaptation.repair.fixes import Site
from compat.adaptation.repair.held import place_of
from compat.adaptation.repair.source import find, parent_of
from compat.adaptation.repair.syntax import assignments, called, name_of, variables

NORM = re.compile(r"norm|^ln|(?<![a-z])ln(?![a-z])|(?<![A-Z])LN", re.I)
WRAPPER = re.compile(r"pre|post|add|resid|sub", re.I)
SHAPE = ("shape", "size", "device", "dtype", "dim", "ndim", "numel", "new_zeros", "new_ones")


@dataclass(frozen=True)
class Residual:
    """A sum of the residual stream and the output of a branch.

    Args:
        statement: the statement that computes the sum.
        sum: the sum; None if the statement is `x += branch` or `branch += x`.
        stream: the operand that carries the stream.
        branch: the other operand.
    """

    statement: ast.stmt
    sum: ast.expr | None
    stream: ast.Name
    branch: ast.expr


def residuals_of(statement: ast.stmt) -> list[Residual]:
    """Return the readings of a statement as a residual sum, the likeliest first."""
    match statement:
        case ast.AugAssign(ast.Name() as target, ast.Add(), ast.Name() as value):
            readings = [(target, value), (value, target)]
            return [Residual(statement, None, stream, branch) for stream, branch in readings]
        case ast.AugAssign(ast.Name() as target, ast.Add(), value):
            return [Residual(statement, None, target, value)]
        case ast.Assign() | ast.Return():
            pass
        case _:
            return []
    for node in find(ast.BinOp, statement):
        if isinstance(node.op, ast.Add) and not isinstance(parent_of(node), ast.Subscript):
            pairs = [(node.left, node.right), (node.right, node.left)]
            both = [Residual(statement, node, a, b) for a, b in pairs if isinstance(a, ast.Name)]
            return [residual for residual in both if not isinstance(residual.branch, ast.Constant)]
    return []


def stored(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement assigns."""
    return variables(statement, ast.Store)


def tensor_reads(statement: ast.AST, name: str) -> list[ast.Name]:
    """Return where a statement reads a tensor, other than its shape and its type."""
    found = []
    for node in find(ast.Name, statement):
        above = parent_of(node)
        shape = isinstance(above, ast.Attribute) and above.attr in SHAPE
        length = isinstance(above, ast.Call) and called(above) == "len"
        if node.id == name and isinstance(node.ctx, ast.Load) and not (shape or length):
            found.append(node)
    return found


def copied_as(statement: ast.stmt, name: str) -> str | None:
    """Return `x` if a statement assigns `name = x`, alone or among others."""
    values = assignments(statement, name, deep=False)
    return next((value.id for value in values if isinstance(value, ast.Name)), None)


def simple_statements(site: Site) -> list[ast.stmt]:
    """Return the simple statements of the finding's function, the finding's own first."""
    found = [n for n in find(ast.stmt, site.within) if not hasattr(n, "body")]
    return sorted(found, key=lambda node: node is not site.statement)


# Norms.


def norm_modules(site: Site) -> dict[str, ast.Call]:
    """Return the calls that build a norm, by the attribute or key under which a module holds it."""
    found: dict[str, ast.Call] = {}
    for call in site.every(ast.Call):
        if is_norm_class(called(call)) and (name := place_of(call)[1]):
            found.setdefault(name, call)
    return found


def is_norm_class(name: str) -> bool:
    return bool(NORM.search(name)) and name[:1].isupper() and not WRAPPER.search(name)


def is_norm(site: Site, call: ast.Call) -> bool:
    """Return whether a call applies a norm to its first argument."""
    func: ast.expr = call.func
    while isinstance(func, ast.Subscript):
        if isinstance(func.slice, ast.Constant) and func.slice.value in norm_modules(site):
            return bool(call.args)
        func = func.value
    name = name_of(func)
    known = name in norm_modules(site) or bool(NORM.search(name))
    return bool(call.args) and known and not name[:1].isupper()


def norm_calls(site: Site, within: ast.AST) -> list[ast.Call]:
    return [call for call in find(ast.Call, within) if is_norm(site, call)]
