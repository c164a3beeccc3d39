"""Fixes of the number of layers where a constructor writes the blocks out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from compat.adaptation.repair.fixes import Edits, Site, fixes
from compat.adaptation.repair.source import Edit, Source
from compat.adaptation.repair.syntax import called, constructor, is_self
from compat.adaptation.repair.values import hyperparameters

WITHOUT_PARAMETERS = re.compile("Dropout|Identity|[GS]?[eE]LU|ReLU|SiLU|Softmax")


def _numbers(site: Site, source: Source, node: ast.AST) -> list[str]:
    """Return how the code around a node can write the checkpoint's number of layers."""
    function = source.parent(node, ast.FunctionDef)
    in_init = function is not None and function.name == "__init__"
    known = hyperparameters(site, source, function, "n_layer") if in_init and function else []
    return [*known, str(site.finding.values["expected"])]


@fixes("n_layer_mismatch")
def stream_through_blocks(site: Site) -> Iterator[Edits]:
    """Let the next block read the result of a block, in `for block in blocks: y = block(x)`."""
    source = site.source
    match site.statement:
        case ast.Assign([ast.Name(result)], ast.Call(args=[ast.Name(stream), *_])) if (
            result != stream and source.parent(site.statement, ast.For)
        ):
            names = source.nodes(ast.Name, site.function)
            yield [source.replace(name, stream) for name in names if name.id == result]


@fixes("n_layer_mismatch")
def generated_blocks(site: Site) -> Iterator[Edits]:
    """Build the checkpoint's number of blocks in place of blocks that are written out."""
    source, found = site.source, site.finding.values["found"]
    for node in source.nodes(ast.expr, site.function):
        items = getattr(node, "args" if isinstance(node, ast.Call) else "elts", [])
        for first in range(len(items) - found + 1):
            run = items[first : first + found]
            around = items[first - 1 : first] + items[first + found : first + found + 1]
            code = source.code(run[0])
            if {source.code(item) for item in run} != {code}:
                continue
            if code in map(source.code, around) or not isinstance(run[0], ast.Call):
                continue
            if found == 1 and isinstance(node, ast.Call) and called(node) != "Sequential":
                continue
            for size in _numbers(site, source, node):
                blocks = f"{code} for _ in range({size})"
                start, end = source.span(run[0])[0], source.span(run[-1])[1]
                if isinstance(node, ast.List) and len(items) == found:
                    yield [source.replace(node, f"[{blocks}]")]
                elif isinstance(node, (ast.List, ast.Call)):
                    yield [Edit(source.file, start, end, f"*[{blocks}]")]


@fixes("n_layer_mismatch")
def blocks_in_a_loop(site: Site) -> Iterator[Edits]:
    """Make `self.block1 = Block(dim)` and its siblings one list for `forward` to iterate over.

    A single block is repeated as well.
    """
    source, cls = site.source, site.cls
    init = None if cls is None else constructor(cls)
    if cls is None or init is None:
        return
    alike: dict[str, list[tuple[str, ast.Assign]]] = {}
    for statement in init.body:
        match statement:
            case ast.Assign([ast.Attribute(attr=name) as target], ast.Call() as built):
                if is_self(target):
                    alike.setdefault(source.code(built), []).append((name, statement))
    for code, group in alike.items():
        names = [name for name, _ in group]
        if len(group) != site.finding.values["found"] or not (
            len(group) > 1 or site.statement is group[0][1]
        ):
            continue
        listed = _name_of_list(source, cls, names)
        if (used := _iterated(source, cls, names, listed)) is None:
            continue
        kept, *others = [statement for _, statement in group]
        removed = [source.remove(statement) for statement in others]
        for size in _numbers(site, source, kept):
            module = f"{site.torch('torch.nn.ModuleList')}([{code} for _ in range({size})])"
            yield [source.replace(kept, f"self.{listed} = {module}"), *removed, *used]


def _name_of_list(source: Source, cls: ast.ClassDef, names: list[str]) -> str:
    """Return a name for the list of blocks: `blocks` for `block1` and `block2`."""
    known = {node.attr for node in source.nodes(ast.Attribute, cls)} - set(names)
    stem = re.sub(r"_?\d+$", "", names[0])
    return next(
        name for name in (f"{stem}s", "blocks", "layers", f"all_{stem}") if name not in known
    )


def _iterated(source: Source, cls: ast.ClassDef, names: list[str], listed: str) -> Edits | None:
    """Return a loop over the list in place of the calls of the blocks, one after the other."""
    reads = [
        node for node in source.nodes(ast.Attribute, cls)
        if is_self(node) and node.attr in names and isinstance(node.ctx, ast.Load)
    ]  # fmt: skip
    if sorted(node.attr for node in reads) != sorted(names):
        return None
    statements = list(dict.fromkeys(source.parent(node, ast.stmt) for node in reads))
    first = statements[0]
    if first is None:
        return None
    if len(statements) == 1 and len(names) > 1:
        return _unnested(source, first, names, listed)
    loops = []
    for node, statement in zip(reads, statements, strict=False):
        if statement is None or statement not in source.block(first):
            return None
        (start, end), (a, b) = source.span(statement), source.span(node)
        loops.append(f"{source.text[start:a]}block{source.text[b:end]}")
    places = [source.block(first).index(each) for each in statements if each is not None]
    consecutive = places == list(range(places[0], places[0] + len(names)))
    if len(set(loops)) != 1 or not consecutive or not isinstance(first, ast.Assign):
        return None
    loop = _loop(source, first, f"for block in self.{listed}:", loops[0])
    return [loop, *(source.remove(each) for each in statements[1:] if each is not None)]


def _unnested(source: Source, statement: ast.stmt, names: list[str], listed: str) -> Edits | None:
    """Return a loop in place of `self.block3(self.block2(self.block1(x)))`."""
    calls = [
        call for call in source.nodes(ast.Call, statement)
        if is_self(call.func) and getattr(call.func, "attr", "") in names
    ]  # fmt: skip
    match calls:
        case [outer, *_, ast.Call(_, [ast.Name(x)])] if len(calls) == len(names):
            if any(len(call.args) != 1 or call.keywords for call in calls):
                return None
            lines = (f"for block in self.{listed}:", f"    {x} = block({x})")
            return [source.insert_before(statement, *lines), source.replace(outer, x)]
    return None


def _loop(source: Source, statement: ast.stmt, head: str, *body: str) -> Edit:
    """Return a loop in the place of a statement."""
    indent = source.lines[statement.lineno - 1][: statement.col_offset]
    inner = "".join(f"\n{indent}    {text}".replace(f"\n{indent}", "\n" + indent) for text in body)
    return source.replace(statement, f"{head}{inner}")


@fixes("n_layer_mismatch")
def layer_in_a_loop(site: Site) -> Iterator[Edits]:
    """Repeat the statements of a single layer, whose modules become lists of modules."""
    source, cls = site.source, site.cls
    init = None if cls is None else constructor(cls)
    if cls is None or init is None or site.finding.values["found"] != 1:
        return
    built: dict[str, ast.Assign] = {}
    for statement in init.body:
        match statement:
            case ast.Assign([ast.Attribute(attr=name) as target], ast.Call() as call):
                if is_self(target) and not WITHOUT_PARAMETERS.search(called(call)):
                    built[name] = statement
    own = next((name for name, statement in built.items() if statement is site.statement), None)
    if own is None:
        return
    reads = [
        node for node in source.nodes(ast.Attribute, cls)
        if is_self(node) and node.attr in built and isinstance(node.ctx, ast.Load)
    ]  # fmt: skip
    use = next((source.parent(node, ast.stmt) for node in reads if node.attr == own), None)
    if use is None:
        return
    block = source.block(use)
    place = block.index(use)
    ranges = [(i, j) for i in range(place + 1) for j in range(place + 1, len(block) + 1)]
    for i, j in sorted(ranges, key=lambda each: each[1] - each[0]):
        inside = set().union(*(ast.walk(statement) for statement in block[i:j]))
        within = [node for node in reads if node in inside]
        names = list(dict.fromkeys(node.attr for node in within))
        shared = any(node.attr in names and node not in inside for node in reads)
        if shared or not _passes_on(block[i:j]):
            continue
        for size in _numbers(site, source, site.statement):
            edits = [_listed(site, built[name], size) for name in names]
            yield [*edits, _repeated(source, block[i:j], within, own)]


def _passes_on(statements: list[ast.stmt]) -> bool:
    """Return whether the last of some statements assigns a variable that the first reads."""
    last = statements[-1]
    if any(isinstance(each, (ast.Return, ast.FunctionDef)) for each in statements):
        return False
    stored = {n.id for n in ast.walk(last)
              if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
    read = {n.id for each in statements for n in ast.walk(each)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}  # fmt: skip
    return bool(stored & read)


def _listed(site: Site, statement: ast.Assign, size: str) -> Edit:
    """Return a list of modules in place of a module."""
    new = f"[{site.source.code(statement.value)} for _ in range({size})]"
    return site.source.replace(statement.value, f"{site.torch('torch.nn.ModuleList')}({new})")


def _repeated(
    source: Source, statements: list[ast.stmt], modules: list[ast.Attribute], own: str
) -> Edit:
    """Return statements in a loop, with the modules of one layer."""
    first, last = statements[0], statements[-1]
    start, end = source.offset(first.lineno, 0), source.span(last)[1]
    text = source.text[start:end]
    for node in sorted(modules, key=lambda node: source.span(node)[1], reverse=True):
        at = source.span(node)[1] - start
        text = f"{text[:at]}[i]{text[at:]}"
    indent = source.lines[first.lineno - 1][: first.col_offset]
    inner = "\n".join(f"    {line}" if line.strip() else line for line in text.split("\n"))
    return Edit(source.file, start, end, f"{indent}for i in range(len(self.{own})):\n{inner}")
