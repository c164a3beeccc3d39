"""Fixes of the embeddings and of what happens to the logits."""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.formulas import (
    formulas,
    inputs,
    only,
    removed,
    removed_together,
    unused,
)
from compat.adaptation.repair.held import place_of
from compat.adaptation.repair.source import (
    block_of,
    code_of,
    enclosing,
    find,
    find_calls,
    needed,
    operand_code,
    parent_of,
    source_of,
    span,
    statement_of,
)
from compat.adaptation.repair.syntax import (
    argument,
    called,
    constant,
    constructor,
    is_self,
    is_size,
    is_sum,
    name_of,
    parameters,
    sides,
    variable,
)
from compat.adaptation.repair.values import (
    calls_of,
    definition,
    functions,
    hyperparameters,
    operand,
    size_of,
)

# Names of an embedding's argument that is its width.
_WIDTH = re.compile(r"dim|model|embd|embed(?!dings)|width|hidden|features")

# Positions.


# How functions and modules are called that rotate q and k by their position.
ROTATION = re.compile("rot|rope|pos", re.IGNORECASE)


@fixes("pos_offset")
def first_position(site: Site) -> Iterator[Edits]:
    """Remove the number that is added to the positions."""
    for region in [*site.scopes, site.tree]:
        ranges = find_calls("arange", "range", within=region)
        found = [edits for call in ranges if (edits := _range(site, call))]
        found += [edits for each in find(ast.Slice, region) if (edits := _slice(site, each))]
        yield from found
        yield from _sums(site, region)
        if not found:
            yield from _numbers(site, region)
    for call in find_calls("cumsum", within=site.region):  # its first sum is the offset
        new = f"{code_of(call)} - {site.values['found']}"
        inside = isinstance(parent_of(call), (ast.Attribute, ast.BinOp))
        yield [Edit.replace(call, f"({new})" if inside else new)]


def _is_offset(site: Site, node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == site.values["found"]


def _less(site: Site, node: ast.expr) -> Edit | None:
    """Return a sum without the offset."""
    pairs = sides(node) if is_sum(node) else ()
    rests = (rest for offset, rest in pairs if _is_offset(site, offset))
    return next((Edit.replace(node, code_of(rest)) for rest in rests), None)


def _range(site: Site, call: ast.Call) -> Edits:
    """Let `arange(1, T + 1)` begin at 0."""
    match call.args:
        case [start, end, *_] if _is_offset(site, start):
            length = Edit.replace(end, f"{code_of(end)} - {code_of(start)}")
            return [Edit.replace(start, "0"), _less(site, end) or length]
    return []


def _slice(site: Site, node: ast.Slice) -> Edits:
    """Let `table[1 : T + 1]` begin at 0."""
    match node:
        case ast.Slice(ast.expr() as lower, ast.expr() as upper) if _is_offset(site, lower):
            if (length := _less(site, upper)) is not None:
                start, last = span(lower)[0], span(upper)[0]
                short = re.fullmatch(r"\w+", length.text) or site.source.text[last - 1] == ":"
                return [Edit.at(node, start, last, ":" if short else ": "), length]
    return []


def _sums(site: Site, region: ast.AST) -> Iterator[Edits]:
    """Remove the offset in `positions + 1`, or `positions += 1`."""
    for node in find(ast.BinOp, region):
        statement = statement_of(node)
        if (edit := _less(site, node)) is None:
            continue
        rest = node.left if _is_offset(site, node.right) else node.right
        is_own = (
            isinstance(statement, ast.Assign) and statement.value is node
            and ast.unparse(statement.targets[0]) == ast.unparse(rest)
        )  # fmt: skip
        yield [removed(statement) if is_own else edit]
    for augmented in find(ast.AugAssign, region):
        if isinstance(augmented.op, ast.Add) and _is_offset(site, augmented.value):
            yield [removed(augmented)]
    if region is site.statement:
        yield from _named_offset(site)


def _named_offset(site: Site) -> Iterator[Edits]:
    """Remove `self.offset` from `positions + self.offset`."""
    for region in dict.fromkeys((site.statement, site.within)):
        for node in filter(is_sum, find(ast.BinOp, region)):
            for offset, rest in sides(node):
                if re.search("offset|shift|start|pad|bias", name_of(offset), re.I):
                    edit = Edit.replace(node, code_of(rest))
                    yield [edit, *unused(site, [offset])]


def _numbers(site: Site, region: ast.AST) -> Iterator[Edits]:
    """Set a number to 0 that is the offset, such as `start = 2 if cache is None else …`."""
    places = (ast.IfExp, ast.Assign, ast.AnnAssign, ast.arguments, ast.keyword)
    for node in find(ast.Constant, region):
        above = parent_of(node)
        if _is_offset(site, node) and type(node.value) is int and isinstance(above, places):
            yield [Edit.replace(node, "0")]


@fixes("no_pos")
def added_positions(site: Site) -> Iterator[Edits]:
    """Add the position embedding: an unused one of the class, or a new one."""
    for each in site.everywhere:  # the class that has the context length may call the embedding's
        with contextlib.suppress(LookupError):
            yield from _added_positions(each)


def _added_positions(site: Site) -> Iterator[Edits]:
    init = site.init
    tables = _tables(init)
    read = [n.attr for n in find(ast.Attribute, site.tree) if isinstance(n.ctx, ast.Load)]
    for lookup in site.calls:
        token = getattr(lookup.func, "attr", "")
        if token not in tables or len(lookup.args) != 1:
            continue
        ids = operand_code(lookup.args[0])
        for name, (holder, _) in tables.items():
            if name not in read:
                yield [_with_positions(site, lookup, f"{holder}.{name}", ids)]
        name = _position_name(token)
        for embedding, statement in _new_embeddings(site, init, [tables[token][1]]):
            edit = Edit.insert_after(statement, f"self.{name} = {embedding}")
            yield [edit, _with_positions(site, lookup, f"self.{name}", ids)]


@fixes("rope")
def without_rotation(site: Site) -> Iterator[Edits]:
    """Remove the calls that rotate q and k; a table of positions is added afterwards."""
    edits: Edits = []
    statements: list[ast.stmt] = []
    for statement in _rotating(site):
        match statement:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(calls)):
                pass
            case ast.Assign([ast.Tuple(targets)], value):
                calls = [value]
            case ast.Assign([target], value):
                targets, calls = [target], [value]
            case _:
                continue
        rotations = [
            call for call in calls
            if isinstance(call, ast.Call) and ROTATION.search(code_of(call.func))
        ]  # fmt: skip
        if not rotations or len(rotations) < len(calls):
            continue
        count = len(targets) // len(calls)  # what each call rotates
        arguments = [[code_of(argument) for argument in call.args[:count]] for call in rotations]
        if [code for codes in arguments for code in codes] == [code_of(t) for t in targets]:
            statements.append(statement)
        else:
            pairs = zip(rotations, arguments, strict=True)
            edits += [Edit.replace(call, ", ".join(codes)) for call, codes in pairs]
    yield [*edits, *removed_together(statements)]


def _rotating(site: Site) -> list[ast.stmt]:
    """Return the statements of the finding, and others that call the same, as in another branch."""
    found = dict.fromkeys(each.statement for each in site.everywhere)
    for each in site.everywhere:
        names = {code_of(call.func) for call in each.calls if ROTATION.search(code_of(call.func))}
        for statement in find(ast.Assign, each.region):
            if any(code_of(call.func) in names for call in find(ast.Call, statement)):
                found[statement] = None
    return list(found)


@fixes("no_pos")
def added_position_module(site: Site) -> Iterator[Edits]:
    """Add the user's own module of positions, which is built and not used."""
    every = find(ast.Attribute, site.tree)
    read = {node.attr for node in every if isinstance(node.ctx, ast.Load)}
    unread = [n.attr for n in every if "pos" in n.attr.lower() and n.attr not in read]
    for name in dict.fromkeys(unread):
        for call in find(ast.Call, site.tree):
            token = re.search("emb|tok|wte", called(call), re.I) and not called(call)[0].isupper()
            if not token or len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
                continue
            code = code_of(call)
            yield [Edit.replace(call, f"{code} + self.{name}({code_of(call.args[0])})")]
            yield [_with_positions(site, call, f"self.{name}", code_of(call.args[0]))]


@fixes("sinusoidal_pos")
def learned_table(site: Site) -> Iterator[Edits]:
    """Make the fixed table of positions a parameter, which starts with the same values."""
    parameter = site.torch("torch.nn.Parameter")
    for cls in site.every(ast.ClassDef):
        for call in find_calls("register_buffer", within=cls):
            name, value = str(constant(argument(call, 0, "name"))), argument(call, 1, "tensor")
            statement = parent_of(call)
            if isinstance(statement, ast.Expr) and value and _is_table(site, name, value):
                new = f"self.{name} = {parameter}({code_of(value)})"
                yield [Edit.replace(statement, new), *_attached(cls, name)]
        if (init := constructor(cls)) is None:
            continue
        for node in find(ast.Assign, init):
            target, value = node.targets[0], node.value
            is_module = isinstance(value, ast.Call) and called(value)[:1].isupper()
            if is_self(target) and not is_module and _is_table(site, target.attr, value):
                attached = _attached(cls, target.attr)
                parts = [
                    each for each in find(ast.Subscript, cls) if isinstance(each.ctx, ast.Store)
                ]
                if not any(is_self(each.value, target.attr) for each in parts):
                    yield [Edit.replace(value, f"{parameter}({code_of(value)})"), *attached]
                line = f"self.{target.attr} = {parameter}(self.{target.attr})"
                yield [Edit.insert_after(init.body[-1], line), *attached]


def _is_table(site: Site, name: str, value: ast.expr) -> bool:
    """Return whether a value is named like positions, or computed with a sine."""
    text = f"{name} {code_of(value)}"
    named = re.search(r"pos|(?<![a-z])pe(?![a-z])|sin|encod|table", text, re.I)
    calls = find(ast.Call, value)
    return bool(named) or _has_sine(value) or any(_is_wave(site, call) for call in calls)


def _is_wave(site: Site, call: ast.Call) -> bool:
    """Return whether a function of the user's that computes sines is called."""
    return any(map(_has_sine, functions(site, called(call))))


def _has_sine(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and called(n) in ("sin", "sin_") for n in ast.walk(node))


def _attached(cls: ast.ClassDef, name: str) -> Edits:
    """Return the removal of what cuts a table off from its gradient, such as `.detach()`."""
    edits: Edits = []
    for node in find(ast.Assign, cls):
        match node.targets:
            case [ast.Attribute(table, "requires_grad"), *_] if is_self(table, name):
                edits.append(Edit.remove(node))
    for call in find_calls("detach", "requires_grad_", "Variable", within=cls):
        match call:
            case ast.Call(ast.Attribute(tensor, "detach" | "requires_grad_")) | ast.Call(
                ast.Name("Variable") | ast.Attribute(attr="Variable"), [tensor, *_]
            ) if any(is_self(each, name) for each in ast.walk(tensor)):
                edits.append(Edit.replace(call, code_of(tensor)))
    return edits


@fixes("sinusoidal_pos")
def learned_embedding(site: Site) -> Iterator[Edits]:
    """Look the positions up in a new embedding instead of computing them."""
    for cls in site.every(ast.ClassDef):
        if (init := constructor(cls)) is None:
            continue
        for call in find(ast.Call, cls):
            if enclosing(call, ast.FunctionDef) is not init and _is_wave(site, call):
                yield from _looked_up(site, init, call)


def _looked_up(site: Site, init: ast.FunctionDef, call: ast.Call) -> Iterator[Edits]:
    """Yield a new embedding in place of a call that computes positions in `forward`."""
    inputs = _inputs(enclosing(call, ast.FunctionDef))[:1]
    tables = find_calls("Embedding", within=init)[:1]
    for embedding, statement in _new_embeddings(site, init, tables)[:1]:
        new = Edit.insert_after(statement, f"self.pos_emb = {embedding}")
        for each in call.args[:1]:  # the length of the sequence, or a tensor
            code = code_of(each)
            measured = [n.id for n in find(ast.Name, each)] if is_size(each) else []
            for tensor in [*measured, *inputs][:1]:
                lookup = f"self.pos_emb({_arange(site, tensor, code)})"
                yield [new, Edit.replace(call, lookup)]
            if isinstance(each, ast.Name):
                lookup = f"self.pos_emb({_arange(site, code)})"
                yield [new, Edit.replace(call, lookup)]
                yield [new, Edit.replace(call, f"{code} + {lookup}")]  # the function adds them
            elif isinstance(each, ast.Call) and not is_size(each):
                for ids in inputs:
                    lookup = f"{code} + self.pos_emb({_arange(site, ids)})"
                    yield [new, Edit.replace(call, lookup)]


def _arange(site: Site, tensor: str, length: str = "") -> str:
    """Return the positions of a tensor's tokens, by default as many as its second axis has."""
    length = length or f"{tensor}.size(1)"
    return f"{site.torch('torch.arange')}({length}, device={tensor}.device)"


def _inputs(function: ast.FunctionDef | None) -> list[str]:
    """Return the parameters of a method."""
    return [] if function is None else [name for name in parameters(function) if name != "self"]


def _new_embeddings(
    site: Site, init: ast.FunctionDef, tables: list[ast.Call]
) -> list[tuple[str, ast.stmt]]:
    """Return code of position embeddings like the token embedding, and that one's statement."""
    found = []
    for table in tables:
        keywords = [each.value for each in table.keywords if _WIDTH.search(each.arg or "")]
        for width in [*table.args[1:2], *keywords][:1]:
            holding = (each for each in init.body if table in set(ast.walk(each)))
            statement = needed(next(holding, None))
            found += [
                (f"{code_of(table.func)}({length}, {code_of(width)})", statement)
                for length in hyperparameters(site, init, "n_positions")
            ]
    return found


@fixes("sinusoidal_pos")
def embedding_for_module(site: Site) -> Iterator[Edits]:
    """Build an embedding in place of a module that computes its table in `forward`."""
    for cls in site.every(ast.ClassDef):
        calls = find(ast.Call, cls)
        if not _has_sine(cls) and not any(_is_wave(site, call) for call in calls):
            continue
        for built in calls_of(site, cls.name):
            init, statement = enclosing(built, ast.FunctionDef), parent_of(built)
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if init is None or not isinstance(target, ast.Attribute):
                continue
            yield from _embedding_built(site, init, built, target.attr)


def _embedding_built(
    site: Site, init: ast.FunctionDef, built: ast.Call, name: str
) -> Iterator[Edits]:
    """Build an embedding instead of a module, and look positions up where the module is called."""
    found = _new_embeddings(site, init, find_calls("Embedding", within=init)[:1])
    cls = enclosing(init, ast.ClassDef) or source_of(init).tree
    uses = [call for call in find(ast.Call, cls) if is_self(call.func, name)]
    function = enclosing(uses[0], ast.FunctionDef) if len(uses) == 1 else None
    if not found or function is None:
        return
    call, new = uses[0], Edit.replace(built, found[0][0])
    read = [n.id for each in call.args for n in find(ast.Name, each) if n.id != "self"]
    for tensor in (read or _inputs(function))[:1]:  # of the length of the sequence
        lookup = f"self.{name}({_arange(site, tensor)})"
        if call.args:
            yield [new, Edit.replace(call, f"{code_of(call.args[0])} + {lookup}")]
        yield [new, Edit.replace(call, lookup)]


def _with_positions(site: Site, lookup: ast.Call, table: str, ids: str) -> Edit:
    """Return the lookup of the tokens plus the one of their positions."""
    inside = isinstance(parent_of(lookup), (ast.BinOp, ast.Attribute))
    new = f"{code_of(lookup)} + {table}({_arange(site, ids, f'{ids}.size(-1)')})"
    return Edit.replace(lookup, f"({new})" if inside else new)


def _tables(init: ast.FunctionDef) -> dict[str, tuple[str, ast.Call]]:
    """Return the embeddings of a constructor by name, each with what holds it and the call."""
    calls = [call for call in find(ast.Call, init) if "Embedding" in called(call)]
    places = {call: place_of(call) for call in calls}
    return {name: (holder, call) for call, (holder, name) in places.items() if holder}


def _position_name(token: str) -> str:
    """Return a name for the position embedding in the style of the token embedding's."""
    for old, new in (("wte", "wpe"), ("token", "position"), ("tok", "pos"), ("word", "position")):
        if old in token:
            return token.replace(old, new)
    return "wpe"


# Factors.

PRODUCTS = ("mul", "div", "multiply", "divide")


@fixes("residual_weights")
def removed_factors(site: Site) -> Iterator[Edits]:
    """Remove the factors of all branches at once."""
    every = [next(removed_factor(each), []) for each in site.everywhere]
    yield [edit for edits in every for edit in edits]


@fixes("scaled_embedding", "scaled_logits")
def removed_factor(site: Site) -> Iterator[Edits]:
    """Remove a multiplication or a division."""
    for region in dict.fromkeys((site.statement, site.within)):
        for node in find(ast.AugAssign, region):
            if isinstance(node.op, (ast.Mult, ast.Div)):
                yield [removed(node), *unused(site, [node.value])]
        for product in find(ast.expr, region):
            for tensor, factor in _factors(product):
                of_factor = unused(site, [factor])
                yield [*only(product, tensor), *of_factor]


@fixes("extra_operation")
def without_assignment(site: Site) -> Iterator[Edits]:
    """Remove the statements that change a tensor that GPT-2 passes on."""
    places = site.everywhere if site.values.get("passed_on") else []
    every = dict.fromkeys(each.statement for each in places)
    assigned = [node for node in every if isinstance(node, ast.Assign)]
    yield [removed(node) for node in assigned]
    if len(assigned) > 1:  # others may call the function in which the tensor is changed
        yield from ([removed(node)] for node in assigned)
    for each in places:
        for node in find(ast.BinOp, each.statement):
            yield from (only(node, part) for part in (node.left, node.right))
        for call in each.calls:
            if len(call.args) == 1:
                yield [Edit.replace(call, code_of(call.args[0]))]


@fixes("pooled_positions")
def every_position(site: Site) -> Iterator[Edits]:
    """Compute logits from the hidden states of all positions instead of from their mean."""
    for call in find_calls("mean", "sum", "max", "amax", within=site.statement):
        above = parent_of(call)
        pooled = above if isinstance(above, ast.Attribute) else call  # x.max(dim=1).values
        if (hidden := operand(site, call)) is not None:
            same = variable(site.statement) == code_of(hidden)
            yield [removed(site.statement) if same else Edit.replace(pooled, code_of(hidden))]


@fixes("scaled_embedding", "position_bias", "sinusoidal_pos", "low_rank_term")
def counted_once(site: Site) -> Iterator[Edits]:
    """Remove a term of a sum, as of `x + positions(x)` with `positions` that adds to x as well."""
    for node in find(ast.BinOp, site.statement):
        if isinstance(node.op, (ast.Add, ast.Sub)):
            for part, other in sides(node):
                yield [*only(node, part), *unused(site, [other])]
    if isinstance(site.statement, ast.AugAssign):
        yield [removed(site.statement)]


@fixes("position_ids")
def consecutive_positions(site: Site) -> Iterator[Edits]:
    """Number the tokens in place of `torch.zeros(T)`, `torch.zeros_like(ids)` or steps."""
    arange = site.torch("torch.arange")
    for call in site.calls:
        name = called(call)
        if name.endswith("_like") and call.args:
            ids = operand_code(call.args[0])
            yield [Edit.replace(call, f"{arange}({ids}.shape[-1], device={ids}.device)")]
        elif name in ("zeros", "ones", "full") and call.args:
            yield [Edit.replace(call.func, arange)]
        elif name in ("arange", "range"):
            yield from _without_step(call)
            yield from _of_tokens(site, call)
    for node in find(ast.BinOp, site.statement):
        yield Edit.unwrap(node, node.left)


def _of_tokens(site: Site, call: ast.Call) -> Iterator[Edits]:
    """Count the ids of a sequence in place of the sequences of the batch."""
    for end in call.args:
        length = definition(site, end) or end
        match length:
            case (
                ast.Call(ast.Name("len"), [ast.Name(ids)])
                | ast.Call(ast.Attribute(ast.Name(ids), "size"), [ast.Constant(0)])
                | ast.Subscript(ast.Attribute(ast.Name(ids), "shape"), ast.Constant(0))
            ):
                yield [Edit.replace(length, size_of(site, ids, -1))]


def _without_step(call: ast.Call) -> Iterator[Edits]:
    """Put `arange(0, T)` in place of `arange(0, T, step)` and `arange(0, step * T, step)`."""
    step = argument(call, 2, "step")
    if step is None:
        return
    without = Edit.remove_argument(call, step)
    yield [without]
    match argument(call, 1, "end"):
        case ast.BinOp(op=ast.Mult()) as end:
            for factor, length in sides(end):
                if ast.dump(factor) == ast.dump(step):
                    yield [without, *Edit.unwrap(end, length)]


def _factors(node: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the two readings of a product as a tensor and a factor, the likelier first."""
    match node:
        case ast.BinOp(left, ast.Div(), right):
            return [(left, right)]
        case ast.BinOp(ast.Constant() | ast.Attribute() as left, ast.Mult(), right):
            return [(right, left), (left, right)]
        case ast.BinOp(left, ast.Mult(), right):
            both = [(left, right), (right, left)]
            return both[::-1] if "sqrt" in ast.unparse(left) else both
        case ast.Call(_, arguments) if called(node).rstrip("_") in PRODUCTS:
            match node.func, arguments:
                case _, [first, second]:
                    return [(first, second), (second, first)]
                case ast.Attribute(tensor), [factor]:
                    return [(tensor, factor)]
    return []


# The logits.


@fixes("no_head")
def added_head(site: Site) -> Iterator[Edits]:
    """Return the product of the hidden states with the token embedding, in a dictionary as well."""
    head = f"self.{site.values['table']}.T"
    for function in reversed([*site.every(ast.FunctionDef)]):
        for node in find(ast.Return, function) if function.name == "forward" else []:
            match node.value:
                case ast.Dict([ast.expr() as first, *_], states) as returned:
                    quoted = source_of(node).quoted("logits")
                    line = "\n" + " " * first.col_offset
                    space = line if first.lineno > returned.lineno else " "
                    for x in states:
                        entry = f"{quoted}: {operand_code(x)} @ {head},{space}"
                        yield [Edit.prefix(first, entry)]
                case ast.Tuple([x, *_]) | (ast.expr() as x):
                    yield [Edit.replace_group(x, f"{operand_code(x)} @ {head}")]


@fixes("softmax_output")
def removed_softmax(site: Site) -> Iterator[Edits]:
    """Return the logits instead of their softmax."""
    for call in [*site.calls, *find(ast.Call, site.region), *find(ast.Call, site.tree)]:
        name = called(call.func) if isinstance(call.func, ast.Call) else called(call)
        is_module = name[:1].isupper() and not isinstance(call.func, ast.Call)  # it is not called
        if "softmax" not in name.lower().replace("_", "") or is_module:
            continue
        tensor = _argument(call)
        if tensor is None:
            continue
        result = variable(parent_of(call))
        if isinstance(tensor, ast.Name) and result not in ("", tensor.id):
            function = enclosing(call, ast.FunctionDef)
            reads = [n for n in find(ast.Name, function or site.tree)
                     if n.id == result and isinstance(n.ctx, ast.Load)]  # fmt: skip
            yield [removed(statement_of(call)), *(Edit.replace(n, tensor.id) for n in reads)]
        own = isinstance(call.func, ast.Attribute) and call.func.value is not tensor
        yield [*only(call, tensor), *(unused(site, [call.func]) if own else [])]


def _argument(call: ast.Call) -> ast.expr | None:
    """Return the tensor of `softmax(x, dim)` or `x.softmax(dim)`."""
    if isinstance(call.func, ast.Attribute):
        owner = ast.unparse(call.func.value)
        module = re.fullmatch(r"torch|F|nn|self|.*\.(functional|special)", owner, re.DOTALL)
        axis = not call.args or isinstance(call.args[0], (ast.Constant, ast.UnaryOp))
        if not module and (axis or not owner.startswith("self.")):
            return call.func.value
    return argument(call, 0, "input") or argument(call, 0, "x")


@fixes("softmax_output")
def removed_softmax_module(site: Site) -> Iterator[Edits]:
    """Remove a softmax from a Sequential, or its module together with the calls of it."""
    modules = find_calls("Softmax", "LogSoftmax", within=site.tree)
    for module in modules:
        if isinstance(call := parent_of(module), ast.Call) and module in call.args:
            yield [Edit.remove_argument(call, module)]
    for module in modules:
        match parent_of(module):
            case ast.Assign([ast.Attribute(attr=name), *_]) as node:
                uses = [call for call in find_calls(name, within=site.tree) if call.args]
                edits = [edit for use in uses for edit in only(use, use.args[0])]
                if edits:
                    yield [Edit.remove(node), *edits]


@fixes("changed_logits", "scaled_logits", "changed_scores")
def unchanged_logits(site: Site) -> Iterator[Edits]:
    """Remove element-wise operations on the logits."""
    found = _steps(site)
    if len(found) > 1:
        yield [removed(statement) for statement in found]
    for formula in formulas(site, site.statement):
        operands = inputs(site, formula)
        order = (ast.Call, ast.BinOp, ast.Name, ast.Subscript, ast.Attribute)
        ranked = [o for kind in order for o in operands if isinstance(o, kind)]
        for kept in ranked:
            without: list[ast.AST] = [o for o in operands if o is not kept]
            yield [*only(formula, kept), *unused(site, without)]
    statement = site.statement
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)):
        yield [removed(statement)]
    for call in site.calls:
        if isinstance(call.func, ast.Attribute) and isinstance(statement, (ast.Assign, ast.Return)):
            yield only(call, call.func.value)
        yield from (only(call, first) for first in call.args[:1])


def _steps(site: Site) -> list[ast.stmt]:
    """Return the statements around the finding's that all change the same tensor by element."""

    def changed(statement: ast.stmt) -> str:
        if isinstance(statement, ast.AugAssign):
            return ast.unparse(statement.target)
        name = variable(statement)
        if not name or not isinstance(statement, ast.Assign):
            return ""
        whole = statement.value in formulas(site, statement)
        own = any(isinstance(o, ast.Name) and o.id == name for o in inputs(site, statement.value))
        return name if whole and own else ""

    block = itertools.groupby(block_of(site.statement), changed)
    runs = [list(statements) for name, statements in block if name]
    return next((run for run in runs if site.statement in run), [])
