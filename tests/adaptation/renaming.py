"""The source of a zoo model in which every module, parameter and buffer has another name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

from torch import nn

# Names of attributes of torch's modules, such as weight; they are renamed only within the classes
# of the file that have them.
TORCH_NAMES = {
    *dir(nn.Linear(1, 1)), *dir(nn.LayerNorm(1)), *dir(nn.MultiheadAttention(1, 1)),
}  # fmt: skip
CONFIG_NAMES = {"cfg", "config", "args", "dims"}


def names_in(model: nn.Module) -> dict[str, set[str]]:
    """Return the names of modules, parameters and buffers for every class of the model's file."""
    own: ModuleType = sys.modules[type(model).__module__]
    found: dict[str, set[str]] = {}
    for module in model.modules():
        held = {*module._modules, *module._parameters, *module._buffers}
        mine = type(module).__module__ == own.__name__
        if mine or isinstance(module, (nn.ModuleDict, nn.ParameterDict)):
            names = {name for name in held if not name.isdigit()}
            found.setdefault(type(module).__name__ if mine else "", set()).update(names)
    return found


class Renamer(ast.NodeTransformer):
    """Rename `self.name`, `x.name` and "name" throughout a file.

    Args:
        held: the result of `names_in`.
        fresh: returns an unused name.
    """

    def __init__(self, held: dict[str, set[str]], tree: ast.AST, fresh: Callable[[], str]) -> None:
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        every = {name for names in held.values() for name in names}
        self.everywhere = {name: fresh() for name in sorted(every - TORCH_NAMES - functions)}
        self.inside = {
            cls: {name: fresh() for name in sorted(names & TORCH_NAMES)}
            for cls, names in held.items()
        }
        self.cls = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.cls = node.name
        self.generic_visit(node)
        self.cls = ""
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            node.attr = self.inside.get(self.cls, {}).get(node.attr, node.attr)
        if not CONFIG_NAMES & set(_words(node.value)):
            node.attr = self.everywhere.get(node.attr, node.attr)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):  # register_buffer, ModuleDict
            node.value = self.everywhere.get(node.value, node.value)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in CONFIG_NAMES:
            return node  # cfg["heads"]
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "dict":
            for keyword in node.keywords:
                keyword.arg = self.everywhere.get(keyword.arg or "", keyword.arg)
        return node


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the last name before an attribute, such as cfg in `self.cfg.heads`."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


def renamed(source: str, model: nn.Module, fresh: Callable[[], str]) -> tuple[str, dict[str, str]]:
    """Return the source with new names, and the names that are the same throughout the file."""
    tree = ast.parse(source)
    renamer = Renamer(names_in(model), tree, fresh)
    return ast.unparse(renamer.visit(tree)), renamer.everywhere


def pairs(before: nn.Module, after: nn.Module, names: dict[str, str]) -> dict[str, str]:
    """Return the parameters' names in the renamed model by their original names.

    Both models are built by the same statements, so their parameters have the same order, except in
    an nn.ParameterDict, which sorts them by name.
    """
    old = [name for name, _ in before.named_parameters(remove_duplicate=False)]
    new = [name for name, _ in after.named_parameters(remove_duplicate=False)]
    translated = [".".join(names.get(part, part) for part in name.split(".")) for name in old]
    return dict(zip(old, translated if sorted(translated) == sorted(new) else new, strict=True))
