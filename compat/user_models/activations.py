"""What a constructor expects as the activation: a name such as "gelu", a function or a class."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from compat.user_models.usage import (
    compared_strings,
    is_users_class,
    modules_text,
    users_globals,
    users_nodes,
)

# Names of GPT-2's activation, the tanh form of GELU; the first in the user's code is passed.
GELUS = ("gelu_new", "gelu_tanh", "gelu_pytorch_tanh", "tanh", "gelu")
# The argument of torch's own GELU, which is not the name of an activation.
APPROXIMATE = re.compile(r"""\bapproximate\s*=\s*["'](tanh|none)["']""")

# An activation of this name that is the hyperbolic tangent, as in `{"tanh": nn.Tanh()}`.
OWN_TANH = re.compile(r"""["']tanh["'].{0,80}?(\bnn\.Tanh\b|\b(torch|F)\.tanh\b)""", re.DOTALL)


def gelu_new(x: Tensor) -> Tensor:
    """Apply GPT-2's activation."""
    return F.gelu(x, approximate="tanh")


def new_gelu() -> nn.Module:
    """Return GPT-2's activation as a module, for code that calls a class of activations."""
    return nn.GELU(approximate="tanh")


def activation_for(cls: Callable[..., Any], name: str) -> object:
    """Return GPT-2's activation in the form in which the user's code uses this argument.

    It is a function if the argument is annotated as one, or is only stored, passed on and called; a
    function without arguments if it is called without any, as a class is; a module if it is put
    into one of torch's containers; and otherwise a name, of another activation if the code compares
    the argument with others only.
    """
    text = modules_text(cls)
    if "ACT2FN" in text:
        return "gelu_new"
    uses, annotations = _uses(cls, name)
    if "of nn" in uses:
        return "GELU"
    is_function = any("Callable" in each and "str" not in each for each in annotations)
    if "other" not in uses or is_function:
        if "contained" in uses:
            return new_gelu()
        if "made" in uses:
            return new_gelu
        if "called" in uses or any("Callable" in each for each in annotations):
            return gelu_new
    text = APPROXIMATE.sub("", text)
    names = [g for g in GELUS if g != "tanh" or not OWN_TANH.search(text)]
    for flags in (re.NOFLAG, re.IGNORECASE):  # "gelu" rather than "GeLU"
        found = (re.search(rf"""["']({g})["']""", text, flags) for g in names)
        if first := next(filter(None, found), None):
            return first[1]
    others = compared_strings(cls).get(name, {"gelu"})  # without GELU, one that the code knows
    return min(others, key=text.find)


def _uses(cls: Callable[..., Any], name: str) -> tuple[set[str], list[str]]:
    """Return how the user's code uses a name and its attributes, and its annotations.

    The uses are "called" (with arguments), "made" (called without any), "contained", as in
    `nn.ModuleDict(dict(act=name))`, "of nn", as in `getattr(nn, name)`, and "other", such as a
    comparison. Storing the value, passing it to the user's classes, and comparing it with None are
    not listed.
    """
    nodes = list(users_nodes(cls))
    classes = {name for name, value in users_globals(cls) if is_users_class(value)}
    names = [name]
    uses: set[str] = set()
    containers = {"Sequential", "ModuleDict", "ModuleList"}
    containers |= {"dict"} if "ModuleDict(dict(" in modules_text(cls) else set()
    for each in names:  # grows
        for node in nodes:
            for child in ast.iter_child_nodes(node):
                value = child.value if isinstance(child, ast.keyword) else child
                if not _is_read(value, each):
                    continue
                match node:
                    case ast.Assign([ast.Attribute(attr=alias)]):
                        names += [] if alias in names else [alias]
                    case ast.Call(func) if func is value:
                        uses.add("called" if node.args else "made")
                    case ast.Call(ast.Name("getattr"), [module, _]):
                        is_nn = ast.unparse(module) in ("nn", "torch.nn")
                        uses.add("of nn" if is_nn else "other")
                    case ast.Call(func):
                        callee = ast.unparse(func).rpartition(".")[2]
                        passed = callee in classes or callee in ("__init__", "isinstance")
                        contained = callee in containers
                        uses |= set() if passed else {"contained" if contained else "other"}
                    case ast.Compare(_, [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
                        pass
                    case ast.keyword() | ast.Attribute() | ast.Expr():
                        pass
                    case _:
                        uses.add("other")
    annotated = [n for n in nodes if isinstance(n, (ast.arg, ast.AnnAssign)) and n.annotation]
    return uses, [
        ast.unparse(node.annotation) for node in annotated if node.annotation
        and name == (node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
    ]  # fmt: skip


def _is_read(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(found, ast.Load()) | ast.Attribute(_, found, ast.Load()):
            return found == name
    return False
