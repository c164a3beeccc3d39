"""Which top-level statements a name needs: its definition, and in turn what that one reads."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

from compat.user_models.synonyms import role_of

MUTATORS = {"add", "append", "extend", "insert", "merge_from_dict", "setdefault", "update"}
COMPREHENSIONS = {"listcomp", "setcomp", "dictcomp", "genexpr"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Statement:
    """One top-level statement.

    Args:
        cell: its cell's place in the list of cells.
        binds: the names that it gives a value.
        changes: the names whose value it changes: `config["n"] = 1`, `Model.forward = forward`.
        now: the global names that it reads as it runs.
        later: the global names that its functions read when they are called.
    """

    cell: int
    node: ast.stmt
    binds: frozenset[str]
    changes: frozenset[str]
    now: frozenset[str]
    later: frozenset[str]


def analysed(cell: int, node: ast.stmt) -> Statement:
    """Work out what a statement binds, changes and reads."""
    node = _without_data(node)
    table = symtable.symtable(ast.unparse(node), "statement", "exec")
    now: set[str] = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    later: set[str] = set()
    for child in table.get_children():
        _collect(child, now, later)
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    changes = set(_changes(node))
    return Statement(cell, node, *map(frozenset, (binds, changes, now, later)))


def _collect(table: symtable.SymbolTable, now: set[str], later: set[str]) -> None:
    """Add the globals that a scope reads; what a function reads, it reads when it is called."""
    if table.get_type() != "class" and table.get_name() not in COMPREHENSIONS:
        now = later
    now.update(s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced())
    for child in table.get_children():
        _collect(child, now, later)


def _without_data(node: ast.stmt) -> ast.stmt:
    """`vocab_size = len(chars)` without the text: the checkpoint decides it, see construct."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        computed = any(isinstance(n, ast.Call) for n in ast.walk(node.value))
        if isinstance(target, ast.Name) and role_of(target.id) == "vocab_size" and computed:
            node.value = ast.copy_location(ast.Constant(50257), node.value)
    return node


def _changes(node: ast.stmt) -> Iterator[str]:
    """The names whose values a statement changes in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = [t for t in node.targets if not isinstance(t, ast.Name)]
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, Definition):  # @add_to_class(Model)
        calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
        targets = [argument for call in calls for argument in call.args]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and function.attr in MUTATORS:
            targets = [function.value]
        elif isinstance(function, ast.Name) and function.id == "setattr":
            targets = node.value.args[:1]
    for target in targets:
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id


def needed(statements: list[Statement], name: str) -> set[int]:
    """The statements that `name` needs: its last definition, and what that one in turn reads.

    Of what is read, the last definition before the reader counts, else the first one after it.
    """
    found: set[int] = set()
    seen: set[tuple[str, int]] = set()
    last = max((i for i, s in enumerate(statements) if name in s.binds), default=-1)
    wanted = [(name, last + 1)]
    while wanted:
        wanted_name, limit = wanted.pop()
        if (wanted_name, limit) in seen:
            continue
        seen.add((wanted_name, limit))
        # The class asked for may be completed by statements that follow it.
        until = len(statements) if wanted_name == name else limit
        for index in _definitions(statements, wanted_name, limit, until):
            found.add(index)
            statement = statements[index]
            wanted += [(read, index) for read in statement.now | statement.changes]
            wanted += [(read, max(limit, index + 1)) for read in statement.later]
    return found


def _definitions(statements: list[Statement], name: str, limit: int, until: int) -> list[int]:
    """The statement that binds the name last before `limit`, and those that change its value."""
    binding = [i for i, s in enumerate(statements) if name in s.binds]
    before = [i for i in binding if i < limit]
    if not binding:
        return [] if hasattr(builtins, name) else _star_imports(statements, limit)
    last = before[-1] if before else binding[0]
    if isinstance(statements[last].node, ast.Import):  # `import torch`, `import torch.nn.utils`
        imports = [i for i in before if isinstance(statements[i].node, ast.Import)]
        return imports or [last]
    changing = [i for i in range(last + 1, until) if name in statements[i].changes]
    return [last, *changing]


def _star_imports(statements: list[Statement], limit: int) -> list[int]:
    return [i for i in range(limit) if "*" in _imported(statements[i].node)]


def _imported(node: ast.stmt) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
