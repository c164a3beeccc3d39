"""Fixes of the number of layers where a constructor writes the blocks out."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.held import held, reads
from compat.adaptation.repair.source import (
    block_of,
    code_around,
    code_of,
    enclosing,
    find,
    find_calls,
    indent_of,
    source_of,
    span,
    statement_of,
)
from compat.adaptation.repair.syntax import called, is_self, variables
from compat.adaptation.repair.values import hyperparameters_at

WITHOUT_PARAMETERS = re.compile("Dropout|Identity|[GS]?[eE]LU|ReLU|SiLU|Softmax")


def _numbers(site: Site, node: ast.AST) -> list[str]:
    """Return how the code around a node can write the checkpoint's number of layers."""
    known = hyperparameters_at(site, node, "n_layer")
    return [*known, str(site.values["expected"])]


@fixes("n_layer_mismatch")
def stream_through_blocks(site: Site) -> Iterator[Edits]:
    """Let the next block read the result of a block, in `for block in blocks: y = block(x)`."""
    match site.statement:
        case ast.Assign([ast.Name(result)], ast.Call(args=[ast.Name(stream), *_])) if (
            result != stream and enclosing(site.statement, ast.For)
        ):
            names = find(ast.Name, site.region)
            yield [Edit.replace(name, stream) for name in names if name.id == result]


@fixes("n_layer_mismatch")
def generated_blocks(site: Site) -> Iterator[Edits]:
    """Build the checkpoint's number of blocks in place of blocks that are written out."""
    found = site.values["found"]
    for node in find(ast.expr, site.region):
        items = getattr(node, "args" if isinstance(node, ast.Call) else "elts", [])
        for first in range(len(items) - found + 1):
            run = items[first : first + found]
            around = items[first - 1 : first] + items[first + found : first + found + 1]
            code = code_of(run[0])
            alike = {*map(code_of, run)} == {code} and code not in map(code_of, around)
            if not alike or not isinstance(run[0], ast.Call):
                continue
            if found == 1 and isinstance(node, ast.Call) and called(node) != "Sequential":
                continue
            for size in _numbers(site, node):
                blocks = f"{code} for _ in range({size})"
                start, end = span(run[0])[0], span(run[-1])[1]
                if isinstance(node, ast.List) and len(items) == found:
                    yield [Edit.replace(node, f"[{blocks}]")]
                elif isinstance(node, (ast.List, ast.Call)):
                    yield [Edit.at(node, start, end, f"*[{blocks}]")]


@fixes("n_layer_mismatch")
def blocks_in_a_loop(site: Site) -> Iterator[Edits]:
    """Make `self.block1 = Block(dim)` and its siblings one list for `forward` to iterate over.

    A single block is repeated as well.
    """
    cls = site.cls
    alike: dict[str, dict[str, ast.Assign]] = {}
    for name, statement, built in held(site.init):
        alike.setdefault(code_of(built), {})[name] = statement
    for code, group in alike.items():
        names, statements = list(group), list(group.values())
        of_finding = len(group) > 1 or site.statement is statements[0]
        if len(group) != site.values["found"] or not of_finding:
            continue
        listed = _name_of_list(cls, names)
        if (used := _iterated(cls, names, listed)) is None:
            continue
        kept, *others = statements
        removed = [Edit.remove(statement) for statement in others]
        for size in _numbers(site, kept):
            module = f"{site.torch('torch.nn.ModuleList')}([{code} for _ in range({size})])"
            yield [Edit.replace(kept, f"self.{listed} = {module}"), *removed, *used]


def _name_of_list(cls: ast.ClassDef, blocks: list[str]) -> str:
    """Return a name for the list of blocks: `blocks` for `block1` and `block2`."""
    known = {node.attr for node in find(ast.Attribute, cls)} - set(blocks)
    stem = re.sub(r"_?\d+$", "", blocks[0])
    names = (f"{stem}s", "blocks", "layers")
    return next((name for name in names if name not in known), f"all_{stem}")


def _iterated(cls: ast.ClassDef, names: list[str], listed: str) -> Edits | None:
    """Return a loop over the list in place of the calls of the blocks, one after the other."""
    every = reads(cls, *names)
    if sorted(node.attr for node in every) != sorted(names):
        return None
    by_read = {node: statement_of(node) for node in every}
    first, *others = statements = list(dict.fromkeys(by_read.values()))
    if not others and len(names) > 1:
        return _unnested(first, names, listed)
    block = block_of(first)
    place = block.index(first)
    loops = {"block".join(code_around(above, node)) for node, above in by_read.items()}
    consecutive = block[place : place + len(names)] == statements
    if len(loops) != 1 or not consecutive or not isinstance(first, ast.Assign):
        return None
    loop = f"for block in self.{listed}:\n{indent_of(first)}    {loops.pop()}"
    return [Edit.replace(first, loop), *map(Edit.remove, others)]


def _unnested(statement: ast.stmt, names: list[str], listed: str) -> Edits | None:
    """Return a loop in place of `self.block3(self.block2(self.block1(x)))`."""
    calls = [call for call in find_calls(*names, within=statement) if is_self(call.func)]
    plain = all(len(call.args) == 1 and not call.keywords for call in calls)
    match calls:
        case [outer, *_, ast.Call(_, [ast.Name(x)])] if plain and len(calls) == len(names):
            lines = (f"for block in self.{listed}:", f"    {x} = block({x})")
            return [Edit.insert_before(statement, *lines), Edit.replace(outer, x)]
    return None


@fixes("n_layer_mismatch")
def layer_in_a_loop(site: Site) -> Iterator[Edits]:
    """Repeat the statements of a single layer, whose modules become lists of modules."""
    cls = site.cls
    built = {
        name: statement for name, statement, call in held(site.init)
        if not WITHOUT_PARAMETERS.search(called(call))
    }  # fmt: skip
    own = next((name for name, statement in built.items() if statement is site.statement), None)
    every = reads(cls, *built)
    use = next((statement_of(node) for node in every if node.attr == own), None)
    if own is None or use is None or site.values["found"] != 1:
        return
    block = block_of(use)
    place = block.index(use)
    ranges = [(i, j) for i in range(place + 1) for j in range(place + 1, len(block) + 1)]
    for i, j in sorted(ranges, key=lambda each: each[1] - each[0]):
        inside = set().union(*(ast.walk(statement) for statement in block[i:j]))
        within = [node for node in every if node in inside]
        names = list(dict.fromkeys(node.attr for node in within))
        shared = any(node.attr in names and node not in inside for node in every)
        if shared or not _passes_on(block[i:j]):
            continue
        module = site.torch("torch.nn.ModuleList")
        for size in _numbers(site, site.statement):
            edits = [
                Edit.replace(value, f"{module}([{code_of(value)} for _ in range({size})])")
                for value in (built[name].value for name in names)
            ]
            yield [*edits, _repeated(block[i:j], within, own)]


def _passes_on(statements: list[ast.stmt]) -> bool:
    """Return whether the last of some statements assigns a variable that the first reads."""
    if any(isinstance(each, (ast.Return, ast.FunctionDef)) for each in statements):
        return False
    read = set().union(*(variables(each, ast.Load) for each in statements))
    return bool(variables(statements[-1], ast.Store) & read)


def _repeated(statements: list[ast.stmt], modules: list[ast.Attribute], own: str) -> Edit:
    """Return statements in a loop, with the modules of one layer."""
    first, last = statements[0], statements[-1]
    source = source_of(first)
    start, end = source.offset(first.lineno, 0), span(last)[1]
    text = source.text[start:end]
    for node in sorted(modules, key=lambda node: span(node)[1], reverse=True):
        at = span(node)[1] - start
        text = f"{text[:at]}[i]{text[at:]}"
    loop = f"{indent_of(first)}for i in range(len(self.{own})):\n"
    return Edit.at(first, start, end, loop + textwrap.indent(text, "    "))
