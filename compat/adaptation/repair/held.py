"""How a class holds its modules: in attributes and dictionaries, read or not."""

from __future__ import annotations

import ast
from typing import NamedTuple

from compat.adaptation.repair.source import ancestors, find
from compat.adaptation.repair.syntax import called, constant, is_self

CONTAINERS = ("ModuleList", "ModuleDict", "dict")


class Held(NamedTuple):
    """A module that is stored in an attribute, as in `self.name = Module(…)`."""

    name: str
    statement: ast.Assign
    built: ast.Call


def held(within: ast.AST) -> list[Held]:
    """Return the modules that code builds and stores in attributes."""
    return [
        Held(target.attr, node, node.value)
        for node in find(ast.Assign, within) if isinstance(node.value, ast.Call)
        for target in node.targets if isinstance(target, ast.Attribute)
    ]  # fmt: skip


def reads(within: ast.AST, *names: str) -> list[ast.Attribute]:
    """Return where code reads attributes of `self`: those of these names, or all."""
    return [
        node for node in find(ast.Attribute, within)
        if is_self(node) and isinstance(node.ctx, ast.Load) and (not names or node.attr in names)
    ]  # fmt: skip


def unread(within: ast.AST) -> list[Held]:
    """Return the modules that a class builds and does not read."""
    read = {node.attr for node in reads(within)}
    return [module for module in held(within) if module.name not in read]


def place_of(built: ast.Call) -> tuple[str, str]:
    """Return what holds a module, and the attribute or key under which it does.

    Examples are `self` and `ln_f` for `self.ln_f = …`, and `self.parts` and `ln_f` for a
    `ModuleDict` that is stored there. What is not known is "".
    """
    key = ""
    for above in ancestors(built):
        match above:
            case ast.keyword(str(name)):
                key = key or name
            case ast.Dict(keys, values) if not key:
                pairs = zip(keys, values, strict=True)
                own = [constant(each) for each, value in pairs if built in set(ast.walk(value))]
                key = next((each for each in own if isinstance(each, str)), "")
                if not key:
                    break
            case ast.Assign([ast.Attribute(attr=name), *_]):
                return (f"self.{name}", key) if key else ("self", name)
            case ast.List() | ast.ListComp() | ast.GeneratorExp() | ast.comprehension():
                continue
            case ast.Call() if called(above) in CONTAINERS:
                continue
            case _ if not key:
                break
    return "", key
