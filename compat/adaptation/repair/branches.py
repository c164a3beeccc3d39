"""Fixes of residual connections and of parallel branches."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from compat.adaptation.repair.edits import Edit, Edits, apply
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.source import (
    block_of,
    code_around,
    code_of,
    find,
    find_calls,
    following,
    parent_of,
    preceding,
    source_of,
    span,
)
from compat.adaptation.repair.stream import (
    copied_as,
    is_norm,
    norm_calls,
    residuals_of,
    simple_statements,
    stored,
    tensor_reads,
)
from compat.adaptation.repair.syntax import called, is_sum, name_of, variable, variables

# Residual connections.


@fixes("missing_residual")
def added_residual(site: Site) -> Iterator[Edits]:
    """Add the input of a branch to its output."""
    before = preceding(site.statement)
    for statement in _branch_end(site.statement):
        match statement:
            case ast.Assign([ast.Name(), *_], value) | ast.Return(ast.expr() as value):
                code, last = code_of(value), _stream_last(site)
                last = last or is_sum(value)  # a sum with a bias
                for name in _streams(site, before, statement):
                    total = f"{code} + {name}" if last else f"{name} + {code}"
                    yield [Edit.replace(value, total)]
    yield from _saved_residual(site)


def _branch_end(call: ast.stmt) -> list[ast.stmt]:
    """Return statements with which a branch may end, the last first: its call, dropout, a copy."""
    found = [call]
    for statement in following(call):
        value = getattr(statement, "value", None)
        dropout = isinstance(value, ast.Call) and "drop" in ast.unparse(value.func).lower()
        copied = isinstance(value, ast.Name) and not (
            isinstance(statement, ast.Return)
            or any(tensor_reads(later, value.id) for later in following(statement))
        )
        if not (dropout or copied) or not stored(found[-1]) & variables(statement, ast.Load):
            break
        found.append(statement)
    return found[::-1]


def _streams(site: Site, before: list[ast.stmt], statement: ast.stmt) -> list[str]:
    """Return the names that may hold the residual stream, the likeliest first."""
    idle = [name for name in reversed(_copies(before)) if not tensor_reads(statement, name)]
    read = [n.id for n in find(ast.Name, statement) if n in tensor_reads(statement, n.id)]
    written = [name for s in reversed(before) for name in sorted(stored(s))]
    inputs = [a.arg for a in site.function.args.args if a.arg != "self"]
    local = {*inputs, *stored(site.function)}
    target = [n for n in stored(statement) & local if n not in read]  # x = dropout(y)
    every = dict.fromkeys([*idle, *target, *(n for n in read if n in local), *written, *inputs])
    return list(every)[:4]


def _copies(statements: list[ast.stmt]) -> list[str]:
    """Return the variables to which another one is assigned, as in `residual = x`."""
    return [variable(s) for s in statements
            if variable(s) and isinstance(getattr(s, "value", None), ast.Name)]  # fmt: skip


def _stream_last(site: Site) -> bool:
    """Return whether the function writes its other sums as `branch + x`."""
    found = [r for s in simple_statements(site) for r in residuals_of(s)[:1]]
    return any(isinstance(r.sum, ast.BinOp) and r.sum.right is r.stream for r in found)


@fixes("doubled_residual")
def without_second_sum(site: Site) -> Iterator[Edits]:
    """Remove the second sum, or the assignment in place before it."""
    yield [Edit.remove(site.statement)]
    before = [
        s for s in simple_statements(site) if s.lineno < site.line and isinstance(s, ast.AugAssign)
    ]
    for statement in reversed(before):
        new = f"{code_of(statement.target)} = {code_of(statement.value)}"
        yield [Edit.replace(statement, new)]


def _saved_residual(site: Site) -> Iterator[Edits]:
    """Save the stream before a branch that overwrites it, and add it behind the branch."""
    statement, name = site.statement, variable(site.statement)
    if not name:
        return
    saved = next(iter(_copies(simple_statements(site))), "") or site.new_name(
        "residual", "shortcut"
    )
    before = itertools.takewhile(
        lambda s: stored(s) == {name} and not residuals_of(s),
        reversed(preceding(statement)),
    )
    after = itertools.takewhile(
        lambda s: stored(s) == {name} and not norm_calls(site, s), following(statement)
    )
    end = [statement, *after][-1]
    if isinstance(end, ast.Assign):
        added = Edit.replace(end.value, f"{saved} + {code_of(end.value)}")
        for begin in [*reversed([*before]), statement]:
            yield [Edit.insert_before(begin, f"{saved} = {name}"), added]


@fixes("missing_residual")
def residual_wrapper(site: Site) -> Iterator[Edits]:
    """Put a module into the user's wrapper that adds the input to the output."""
    for wrapper in site.every(ast.ClassDef):
        if not re.search("resid", wrapper.name, re.I):
            continue
        tree = source_of(wrapper).tree
        wrapped = [c.args[0] for c in find_calls(wrapper.name, within=tree) if c.args]
        names = {called(each) for each in wrapped if isinstance(each, ast.Call)}
        for call in find_calls(*names, within=tree):
            above = parent_of(call)
            if not (isinstance(above, ast.Call) and called(above) == wrapper.name):
                yield [Edit.replace(call, f"{wrapper.name}({code_of(call)})")]


@fixes("missing_residual")
def residual_inside(site: Site) -> Iterator[Edits]:
    """Add the result of a branch that is part of the next one: `x + mlp(attn(x))`.

    Its sum with the stream may be written there: `x + mlp(x + attn(x))`.
    """
    statement = site.statement
    for residual in residuals_of(statement):
        name = residual.stream.id
        for total in find(ast.BinOp, residual.branch):
            if is_sum(total) and name in (name_of(total.left), name_of(total.right)):
                first = Edit.insert_before(statement, f"{name} = {code_of(total)}")
                yield [first, Edit.replace_group(total, name)]
        for outer in find(ast.Call, residual.sum or site.tree):
            for inner in outer.args:
                if isinstance(inner, ast.Call) and tensor_reads(inner, name):
                    new = f"{name} = {name} + {code_of(inner)}"
                    yield [Edit.insert_before(statement, new), Edit.replace(inner, name)]


@fixes("missing_residual")
def residual_from_attention(site: Site) -> Iterator[Edits]:
    """Add the MLP to the sum that includes attention instead of the input of the block."""
    for statement in [site.statement, *following(site.statement)]:
        for residual in residuals_of(statement):
            before = preceding(statement)
            for name in reversed([name for s in before for name in sorted(stored(s))]):
                if name != residual.stream.id:
                    yield [Edit.replace(residual.stream, name)]


@fixes("residual_from_norm", "doubled_residual")
def branch_without_its_input(site: Site) -> Iterator[Edits]:
    """Let a branch return its result without its own input, which the block adds."""
    for node in find(ast.BinOp, site.statement):
        if is_sum(node):
            yield from (Edit.unwrap(node, part) for part in (node.right, node.left))


# Parallel branches.


@fixes("parallel_block")
def sequential_branches(site: Site) -> Iterator[Edits]:
    """Add attention first where branches share a norm, which is applied once more for the MLP."""
    for later in [site.statement, *simple_statements(site)]:
        for stream, rest in _with_rest(_terms(later)):
            for attention, mlp in (rest, rest[::-1]) if len(rest) == 2 else ():
                if edits := _split_shared(site, later, stream, attention, mlp):
                    yield edits


def _terms(statement: ast.stmt) -> list[ast.expr]:
    """Return the terms of the sum that a statement assigns or returns."""
    value = getattr(statement, "value", None)
    target = getattr(statement, "target", None) if isinstance(statement, ast.AugAssign) else None
    terms = _flat(value) if isinstance(value, ast.expr) else []
    return [target, *terms] if isinstance(target, ast.Name) else terms


def _flat(node: ast.expr) -> list[ast.expr]:
    return [*_flat(node.left), *_flat(node.right)] if is_sum(node) else [node]


def _two_sums(
    statement: ast.stmt, stream: str, last: bool, attention: str, mlp: str
) -> tuple[str, Edit]:
    """Return the line that adds attention, and the sum with the MLP in place of the statement's.

    Args:
        statement: the statement that adds both.
        stream: the variable that they are added to.
        last: whether the stream is the last term of a sum.
        attention, mlp: the code of the branches.
    """
    if isinstance(statement, ast.AugAssign):
        return f"{stream} += {attention}", Edit.replace(statement, f"{stream} += {mlp}")
    value = getattr(statement, "value")  # noqa: B009
    first, second = (f"{code} + {stream}" if last else f"{stream} + {code}"
                     for code in (attention, mlp))  # fmt: skip
    return f"{stream} = {first}", Edit.replace(value, second)


def _split_shared(
    site: Site, statement: ast.stmt, stream: ast.Name, attention: ast.expr, mlp: ast.expr
) -> Edits | None:
    """Split the sum of branches that read one norm, which is applied once more for the MLP."""
    x, dropped = stream.id, []
    if isinstance(mlp, ast.Name):  # m = mlp(h); return x + a + m
        if (made := _assignment_before(statement, mlp.id)) is None:
            return None
        mlp, dropped = made.value, [Edit.remove(made)]
    if (normed := _normed_again(site, statement, mlp, x)) is None:
        return None
    last = span(stream)[0] > span(attention)[0]
    line, replaced = _two_sums(statement, x, last, code_of(attention), normed)
    return [*dropped, Edit.insert_before(statement, line), replaced]


def _assignment_before(statement: ast.stmt, name: str) -> ast.Assign | None:
    """Return the last assignment of a variable in a statement's block before the statement."""
    before = next((s for s in reversed(preceding(statement)) if name in stored(s)), None)
    return before if isinstance(before, ast.Assign) and len(stored(before)) == 1 else None


def _normed_again(site: Site, statement: ast.stmt, branch: ast.expr, x: str) -> str | None:
    """Return the code of a branch that reads `h` of `h = norm(x)`, with the norm for `h`."""
    for node in find(ast.Name, branch):
        made = _assignment_before(statement, node.id)
        match made.value if made is not None else None:
            case ast.Call(_, [ast.Name(read), *_]) as norm if read == x and is_norm(site, norm):
                return code_of(norm).join(code_around(branch, node))
    return None


@fixes("parallel_block")
def mlp_after_attention(site: Site) -> Iterator[Edits]:
    """Let the MLP read the sum that includes attention."""
    for statement in reversed(sorted(simple_statements(site), key=lambda s: s.lineno)):
        for residual in residuals_of(statement):
            block = block_of(statement)
            for other in preceding(statement):
                for first in residuals_of(other):
                    old, new = first.stream.id, sorted(stored(other))
                    uses = [
                        n for s in block[block.index(other) + 1 : block.index(statement) + 1]
                        for n in tensor_reads(s, old) if n is not residual.stream
                    ]  # fmt: skip
                    yield from _moved_behind(other, old)
                    normed = _normed_again(site, statement, residual.branch, old)
                    if normed is not None and new == [old]:
                        yield [Edit.replace(residual.branch, normed)]
                    if uses and new and new[0] != old:
                        yield [Edit.replace(node, new[0]) for node in uses]
                        yield [Edit.replace(uses[0], new[0])]


@fixes("parallel_block")
def attention_added_first(site: Site) -> Iterator[Edits]:
    """Add attention to the stream before the statements that compute the MLP from it."""
    for last in simple_statements(site):
        for stream, rest in _with_rest(_terms(last)):
            if len(rest) == 2:  # out = x + attention + mlp
                for attention, mlp in (rest, rest[::-1]):
                    if edits := _summed_first(site, last, None, stream, attention, mlp):
                        yield edits
            before = reversed(preceding(last))
            total = next((s for s in before if stream.id in stored(s)), None)
            if len(rest) != 1 or total is None or len(stored(total)) != 1:
                continue
            for x, others in _with_rest(_terms(total)):  # h = x + attention; out = h + mlp
                if len(others) == 1:
                    if edits := _summed_first(site, last, total, x, others[0], rest[0]):
                        yield edits


def _with_rest(terms: list[ast.expr]) -> list[tuple[ast.Name, list[ast.expr]]]:
    """Return each term that is a variable, with the other terms."""
    return [(t, [o for o in terms if o is not t]) for t in terms if isinstance(t, ast.Name)]


def _summed_first(
    site: Site,
    last: ast.stmt,
    first: ast.stmt | None,
    stream: ast.Name,
    attention: ast.expr,
    mlp: ast.expr,
) -> Edits | None:
    """Move the statements that compute the MLP's branch behind the sum with attention.

    Args:
        site: the finding.
        last: the statement that adds the MLP to the stream.
        first: the statement that adds attention before, if `last` does not add both.
        stream: the variable to which attention is added.
        attention, mlp: the terms of the two branches.
    """
    before = preceding(last)
    names = {stream.id}  # of the tensor to which attention is added
    if (made := _assignment_before(last, stream.id)) is not None:
        names |= {copied} if (copied := copied_as(made, stream.id)) is not None else set()
    kept, derived, moved = _computing(before, attention), set(names), list[ast.stmt]()
    for node in _computing(before, mlp):
        from_stream = any(tensor_reads(node, name) for name in derived)
        if from_stream and node not in kept and node is not first:
            moved.append(node)
            derived |= stored(node)
    read = [node for s in [*moved, mlp] for name in names for node in tensor_reads(s, name)]
    if not read or any(hasattr(node, "body") for node in moved):
        return None
    total = stream.id if first is None else min(stored(first))

    def summed(node: ast.AST) -> str:
        """Return a node's code with the sum in place of the stream, and the comment after it."""
        (start, end), text = span(node), site.source.text
        if isinstance(node, ast.stmt):
            end = text.find("\n", end)
        within = [n for n in read if n in set(ast.walk(node))]
        renamed = (Edit("", a - start, b - start, total) for a, b in map(span, within))
        return apply(text[start:end], renamed)

    dropped, lines = [Edit.remove(s) for s in moved], [summed(s) for s in moved]
    if first is not None:
        place = Edit.insert_after(first, *lines)
        return [*dropped, place, Edit.replace(mlp, summed(mlp))]
    after = span(stream)[0] > min(span(t)[0] for t in (attention, mlp))
    line, replaced = _two_sums(last, total, after, code_of(attention), summed(mlp))
    return [*dropped, Edit.insert_before(last, line, *lines), replaced]


def _computing(before: list[ast.stmt], branch: ast.expr) -> list[ast.stmt]:
    """Return the statements of a block that a branch is computed by."""
    needed, found = variables(branch), []
    for statement in reversed(before):
        if stored(statement) & needed:
            found.append(statement)
            if not isinstance(statement, ast.AugAssign):
                needed -= stored(statement)
            needed |= variables(statement, ast.Load)
    return found[::-1]


def _moved_behind(total: ast.stmt, stream: str) -> Iterator[Edits]:
    """Move a statement that reads the stream, such as `h = ln_2(x)`, behind a sum."""
    for statement in preceding(total):
        unread = not any(tensor_reads(total, name) for name in stored(statement))
        if tensor_reads(statement, stream) and unread and isinstance(statement, ast.Assign):
            lines = code_of(statement)
            yield [Edit.remove(statement), Edit.insert_after(total, lines)]
