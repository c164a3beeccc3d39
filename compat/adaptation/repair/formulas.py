"""Expressions of the user's source that compute a function of each element of one tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site
from compat.adaptation.repair.source import block_of, find, parent_of
from compat.adaptation.repair.syntax import called, is_self, name_of, root

ELEMENTWISE = frozenset(
    "abs add celu clamp clamp_max clamp_min clip div divide elu erf erfc exp gelu hardsigmoid "
    "hardswish hardtanh leaky_relu log maximum minimum mish mul multiply nan_to_num neg ones_like "
    "pow relu relu6 rsqrt selu sigmoid silu softplus softsign sqrt square sub tanh tensor "
    "true_divide where zeros_like float".split()
)


def inputs(site: Site, node: ast.expr) -> list[ast.expr]:
    """Return the different operands of an element-wise expression that are not constants.

    An expression of another kind, such as the call of a module, is its own operand.
    """
    found: dict[str, ast.expr] = {}
    for operand in _operands(site, node):
        if not (isinstance(operand, ast.Name) and operand.id in _constants(site)):
            found.setdefault(ast.dump(operand), operand)
    return list(found.values())


def formulas(site: Site, within: ast.AST) -> list[ast.expr]:
    """Return the largest element-wise expressions in the order of the text."""
    expressions = find(ast.expr, within)
    formula = {node for node in expressions if _parts(site, node) is not None}
    return [node for node in expressions if node in formula and parent_of(node) not in formula]


def _operands(site: Site, node: ast.expr) -> Iterator[ast.expr]:
    if (parts := _parts(site, node)) is not None:
        for part in parts:
            yield from _operands(site, part)
    elif not _is_constant(site, node):
        yield node


def _parts(site: Site, node: ast.expr) -> list[ast.expr] | None:
    """Return the operands of one operation on elements; None for any other expression."""
    match node:
        case ast.BinOp(left, op, right) if not isinstance(op, ast.MatMult):
            return [left, right]
        case ast.UnaryOp(_, operand):
            return [operand]
        case ast.Compare(left, _, others):
            return [left, *others]
        case ast.Call(func, arguments, keywords) if called(node).rstrip("_") in ELEMENTWISE:
            is_method = isinstance(func, ast.Attribute) and not _is_imported(site, func)
            owner = [func.value] if isinstance(func, ast.Attribute) and is_method else []
            return [*owner, *arguments, *(keyword.value for keyword in keywords)]
    return None


def _is_constant(site: Site, node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return isinstance(node.func.value, ast.Name) and node.func.value.id in ("math", "np")
    return isinstance(node, ast.Constant) or _is_imported(site, node)


def _is_imported(site: Site, node: ast.expr) -> bool:
    """Return whether a name is looked up in an imported module, such as `math.pi`."""
    return root(node) in site.imported


def _constants(site: Site) -> set[str]:
    """Return the names that are assigned numbers only, in the function or in the module."""
    statements = [*site.tree.body, *(site.function.body if site.function_or_none else [])]
    return {
        target.id
        for statement in statements
        if isinstance(statement, ast.Assign) and not list(_operands(site, statement.value))
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def removed(statement: ast.stmt) -> Edit:
    """Return the removal of a statement, as `removed_together` does."""
    [edit] = removed_together([statement])
    return edit


def removed_together(statements: Sequence[ast.stmt]) -> Edits:
    """Return the removal of statements, and of an `if` without an `else` that has no others.

    In another place that has no others, such as a branch with an `else`, the first becomes `pass`.
    """
    removals: dict[ast.stmt, None] = {}
    without = {*statements}
    for statement in statements:
        above = parent_of(statement)
        while isinstance(above, ast.If) and not above.orelse and {*above.body} <= without:
            without.add(above)
            statement, above = above, parent_of(above)
        removals[statement] = None
    edits = []
    for statement in removals:
        above = parent_of(statement)
        bodies = (getattr(above, name, []) for name in ("body", "orelse"))
        body = next((each for each in bodies if statement in each), [])
        is_first = body[:1] == [statement] and {*body} <= without
        edits.append(Edit.replace(statement, "pass") if is_first else Edit.remove(statement))
    return edits


def only(node: ast.expr, part: ast.expr) -> Edits:
    """Return a part in place of an expression; without the statement if that then does nothing."""
    match parent_of(node):
        case ast.Expr() as statement:
            return [removed(statement)]
        case ast.Assign([target]) as statement if ast.unparse(target) == ast.unparse(part):
            return [removed(statement)]
    return Edit.unwrap(node, part)


def unused(site: Site, dropped: list[ast.AST]) -> Edits:
    """Return the removal of assignments whose names are only read in nodes that are removed."""
    inside = {node for root in dropped for node in ast.walk(root)}
    edits: Edits = []
    names = {name_of(node) for node in inside if is_self(node)}
    for name in sorted(names):
        every = [n for n in find(ast.Attribute, site.tree) if n.attr == name]
        edits += _assignment([n for n in every if n not in inside])
    if (function := site.function_or_none) is None:
        return edits
    local = {node.id for node in inside if isinstance(node, ast.Name)} - site.imported
    for name in sorted(local - {each.arg for each in find(ast.arg, function.args)}):
        named = [n for n in find(ast.Name, function) if n.id == name]
        edits += _assignment([n for n in named if n not in inside])
    return edits


def _assignment(mentions: list[ast.Name] | list[ast.Attribute]) -> Edits:
    """Return the removal of an assignment that is the only mention of a name."""
    if len(mentions) != 1 or not isinstance(mentions[0].ctx, ast.Store):
        return []
    match parent_of(mentions[0]):
        case ast.Assign([target]) as statement if target is mentions[0]:
            return [Edit.remove(statement)] if len(block_of(statement)) > 1 else []
    return []
