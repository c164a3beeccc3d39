"""Fixes of the causal mask: none, one that hides other tokens, and finite values in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.source import (
    code_of,
    enclosing,
    find,
    find_calls,
    grouped_code,
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
    is_integer,
    is_size,
    last_name,
    name_of,
    own_attribute,
    sides,
    targets,
    unpacked_sizes,
    variables,
)
from compat.adaptation.repair.tensors import (
    SDPA,
    assigned_values,
    bool_like,
    definition,
    flipped_flags,
    is_cached,
    is_number,
    mask_line,
    minus_inf,
    named_scores,
    operand,
    products,
    size_of,
    softmax_calls,
    with_mask,
)

MASK = re.compile(r"mask|causal|tril|triu|future|visible|^bias$", re.IGNORECASE)


@fixes("mask_value")
def minus_inf_value(site: Site) -> Iterator[Edits]:
    """Fill hidden scores with −∞."""
    for call in site.calls:
        if called(call) in ("masked_fill", "masked_fill_", "where"):
            for value in reversed(call.args):
                if is_number(site, value):
                    yield [Edit.replace(value, minus_inf(site.source))]
    yield from _filled_products(site)


def _filled_products(site: Site) -> Iterator[Edits]:
    """Fill the scores where the mask, by which they are multiplied, is 0."""
    statement = site.statement

    def filled(scores: ast.expr, mask: ast.expr) -> str:
        return with_mask(scores, f"{operand_code(mask)} == 0")

    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        new = filled(statement.target, statement.value)
        yield [Edit.replace(statement, f"{code_of(statement.target)} = {new}")]
    for node in find(ast.BinOp, statement):
        if isinstance(node.op, ast.Mult):
            yield from ([Edit.replace(node, filled(*pair))] for pair in reversed(sides(node)))


@fixes("id_condition")
def no_padding(site: Site) -> Iterator[Edits]:
    """Hide no id as padding: a mask of ones in place of `ids != pad`, here or in the whole file."""
    every = list(_without_padding(site, site.tree))
    for value, edit in _without_padding(site, site.statement):
        yield [edit]
        yield [other for each, other in every if last_name(each) == last_name(value) != ""]


def _without_padding(site: Site, within: ast.AST) -> Iterator[tuple[ast.expr, Edit]]:
    """Yield what tensors are compared with, and the comparison as if no id were equal to it."""
    for node in find(ast.Compare, within):
        if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            fill = "ones" if isinstance(node.ops[0], ast.NotEq) else "zeros"
            new = bool_like(site, code_of(node.left), fill)
            yield node.comparators[0], Edit.replace_group(node, new)
    for call in find_calls("eq", "ne", "not_equal", "eq_", "ne_", within=within):  # ids.eq(pad)
        if (ids := operand(site, call)) is not None and call.args:
            fill = "zeros" if called(call).startswith("eq") else "ones"
            yield call.args[-1], Edit.replace(call, bool_like(site, code_of(ids), fill))


@fixes("no_mask")
def flag_of_mask(site: Site) -> Iterator[Edits]:
    """Change a flag that switches the mask off."""
    yield from flipped_flags(site)


def _masks(site: Site, place: ast.stmt) -> list[tuple[str, ast.expr | None]]:
    """Return masks that the function could use, with their definitions: variables, then buffers."""
    function = site.function
    found: list[tuple[str, ast.expr | None]] = []
    for node in find(ast.Name, function):
        if isinstance(node.ctx, ast.Store) and MASK.search(node.id) and node.lineno < place.lineno:
            values = [v for v, u in assigned_values(function, node.id) if u is None]
            found.append((node.id, values[-1] if values else None))
    found += [(a.arg, None) for a in function.args.args if MASK.search(a.arg)]
    cls = site.cls_or_none
    for call in find_calls("register_buffer", within=cls) if cls is not None else []:
        first = argument(call, 0, "name")
        if isinstance(first, ast.Constant):
            name, value = str(first.value), argument(call, 1, "tensor")
            if isinstance(value, ast.Name):
                value = definition(site, value) or value
            if value is not None and (MASK.search(name) or _triangle(value)):
                views = find_calls("view", "reshape", "unsqueeze", "expand", within=value)
                new_axes = [n for n in find(ast.Constant, value) if n.value is None]
                part = "[:, :, :{T}, :{T}]" if views or new_axes else "[:{T}, :{T}]"
                found.append((f"self.{name}{part}", value))
    if is_cached(function):  # only those that begin at an offset fit
        found = [
            (name, value) for name, value in found
            if value is None or any(isinstance(n, ast.Sub) for n in ast.walk(value))
        ]  # fmt: skip
    used = {code_of(n) for n in find(ast.Attribute, cls)} if cls is not None else set()
    return [(name, value) for name, value in dict(found).items() if name.split("[")[0] not in used]


def _triangle(node: ast.expr | None) -> str:
    """Return the name "tril" or "triu" if an expression contains such a call."""
    calls = [] if node is None else [called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return next((name.rstrip("_") for name in calls if name.rstrip("_") in ("tril", "triu")), "")


def _length(site: Site) -> str | None:
    """Return the name of the number of tokens, as in `B, T, C = x.shape`."""
    for node in find(ast.Assign, site.function):
        sizes = unpacked_sizes(node)
        if len(sizes) in (2, 3) and sizes[1] != "_":
            return sizes[1]
        match node:  # T = x.size(1), T = x.shape[1]
            case ast.Assign(
                [ast.Name(name)],
                ast.Call(_, [ast.Constant(1)]) | ast.Subscript(_, ast.Constant(1)) as value,
            ) if is_size(value):
                return name
    return None


def _masked(site: Site, scores: str, mask: str, value: ast.expr | None) -> list[str]:
    """Return scores to which a mask is applied, for the likeliest meanings of the mask."""
    inf, part = minus_inf(site.source), "" if value is None else code_of(value)
    hidden = f"{scores}.masked_fill({mask} == 0, {inf})"
    shown = f"{scores}.masked_fill({mask}, {inf})" if "bool" in part else (
        f"{scores}.masked_fill({mask}.bool(), {inf})")  # fmt: skip
    added = f"{scores} + {mask}"
    if "inf" in part or "finfo" in part or "1e" in part:
        return [added]
    if _triangle(value) == "tril":
        return [hidden]
    return [shown] if _triangle(value) == "triu" else [added, hidden, shown]


@fixes("no_mask")
def cached_mask(site: Site) -> Iterator[Edits]:
    """Pass a mask to `scaled_dot_product_attention` where a KV cache rules out `is_causal`."""
    for call in site.calls:
        if called(call) != SDPA or not is_cached(site.function_or_none) or len(call.args) < 2:
            continue
        statement, (q, k) = statement_of(call), call.args[:2]
        if not isinstance(q, ast.Name) or not isinstance(k, ast.Name):
            continue
        queries, keys = size_of(site, q.id, -2), size_of(site, k.id, -2)
        dtype = site.torch("torch.bool")
        edits = []
        causal = argument(call, 5, "is_causal")
        if causal is not None and not isinstance(causal, ast.Constant):
            edits.append(Edit.replace(causal, "False"))
        name = site.new_name("attn_mask", "causal_mask", "visible")
        lines = [
            f"{name} = {site.torch('torch.ones')}({queries}, {keys}, dtype={dtype}, "
            f"device={q.id}.device)",
            f"{name} = {name}.tril({keys} - {queries})",
        ]
        edits.append(Edit.insert_before(statement, *lines))
        yield [*edits, Edit.set_argument(call, 3, "attn_mask", name)]


@fixes("no_mask")
def is_causal(site: Site) -> Iterator[Edits]:
    """Let `scaled_dot_product_attention` hide the tokens after each one."""
    for call in site.calls:
        if called(call) != SDPA or is_cached(site.function_or_none):
            continue
        causal = Edit.set_argument(call, 5, "is_causal", "True")
        mask = argument(call, 3, "attn_mask")
        if mask is None or constant(mask) is None:
            yield [causal]
        elif mask in call.args:
            yield [Edit.replace(mask, "None"), causal]
        else:
            yield [Edit.remove_argument(call, mask), causal]


@fixes("no_mask")
def assigned_mask(site: Site) -> Iterator[Edits]:
    """Assign the result of `masked_fill`, where it is not used."""
    for node in find(ast.Expr, site.region):
        match node.value:
            case ast.Call(ast.Attribute(ast.Name(name), "masked_fill")) as call:
                yield [Edit.replace(node, f"{name} = {code_of(call)}")]


@fixes("no_mask")
def masked_scores(site: Site) -> Iterator[Edits]:
    """Mask the scores before the softmax, with a mask of the user's if there is one."""
    source = site.source
    for call, scores in softmax_calls(site)[:2]:
        statement = statement_of(call)
        name, before, edits = named_scores(site, scores)
        length = _length(site) or f"{name}.size(-1)"
        for mask, value in _masks(site, statement):
            for text in _masked(site, name, mask.format(T=length), value):
                yield [*edits, Edit.insert_before(statement, *before, f"{name} = {text}")]
        cached = find_calls("cat", "concat", within=site.region)
        diagonal = f"{name}.size(-1) - {name}.size(-2) + 1" if cached else "1"
        mask = site.new_name("mask", "causal_mask", "future", "hidden")
        created = f"{mask} = {bool_like(site, name)}.triu({diagonal})"
        lines = [*before, created, mask_line(source, name, mask)]
        yield [*edits, Edit.insert_before(statement, *lines)]


MODULE_MASKS = {
    "MultiheadAttention": "attn_mask", "TransformerEncoderLayer": "src_mask",
    "TransformerEncoder": "mask",
}  # fmt: skip


@fixes("no_mask")
def module_mask(site: Site) -> Iterator[Edits]:
    """Pass a causal mask to a module of torch."""
    built = [called(call) for call in find(ast.Call, site.tree)]
    for call in site.calls:
        value = definition(site, call.func) if own_attribute(call.func) else None
        kinds = [called(n) for n in ast.walk(value) if isinstance(n, ast.Call)] if value else []
        kinds = [kind for kind in kinds if kind in MODULE_MASKS]
        if not kinds and isinstance(call.func, (ast.Name, ast.Subscript)):
            kinds = [kind for kind in MODULE_MASKS if kind in built]
        first = argument(call, 0, "query") or argument(call, 0, "src")
        if not kinds or first is None:
            continue
        statement = statement_of(call)
        keyword = MODULE_MASKS[kinds[0]]
        names = [n.id for n in find(ast.Name, first) if n.id != "self"]
        x = names[-1] if names else operand_code(first)
        length = f"{x}.size({1 if _is_batch_first(site) else 0})"
        for mask, _ in _masks(site, statement):
            for size in dict.fromkeys([_length(site) or length, length]):
                text = mask.format(T=size).replace("[:, :, ", "[")
                yield [Edit.set_keyword(call, keyword, text)]
        new = _new_mask(site, length, x)
        for present in call.keywords:
            if present.arg == keyword and isinstance(present.value, ast.Name):
                name = present.value.id
                lines = (f"if {name} is None:", f"    {name} = {new}")
                yield [Edit.insert_before(statement, *lines)]
        created = Edit.insert_before(statement, f"{keyword} = {new}")
        yield [created, Edit.set_keyword(call, keyword, keyword)]


@fixes("no_mask")
def mask_in_loop(site: Site) -> Iterator[Edits]:
    """Call torch's layers in a loop, because an nn.Sequential of them passes no mask on."""
    match site.statement:
        case ast.Assign([ast.Name(x)], ast.Call(func, [ast.Name() as passed], []) as call):
            value = definition(site, func) if own_attribute(func) else None
        case _:
            return
    kinds = [called(n) for n in ast.walk(value) if isinstance(n, ast.Call)] if value else []
    layers = [kind for kind in kinds if kind in MODULE_MASKS]
    if kinds[:1] != ["Sequential"] or not layers:
        return
    keyword = MODULE_MASKS[layers[0]]
    length = f"{passed.id}.size({1 if _is_batch_first(site) else 0})"
    lines = [
        f"{keyword} = {_new_mask(site, length, passed.id)}",
        *([] if x == passed.id else [f"{x} = {passed.id}"]),
        f"for layer in {code_of(func)}:",
    ]
    yield [
        Edit.insert_before(site.statement, *lines),
        Edit.prefix(site.statement, "    "),
        Edit.replace(func, "layer"),
        *([] if x == passed.id else [Edit.replace(passed, x)]),
        Edit.set_keyword(call, keyword, keyword),
    ]


def _is_batch_first(site: Site) -> bool:
    return any(keyword.arg == "batch_first" for keyword in find(ast.keyword, site.tree))


def _new_mask(site: Site, length: str, x: str) -> str:
    """Return a causal mask that is True at the tokens to be hidden, on the device of x."""
    ones, dtype = site.torch("torch.ones"), site.torch("torch.bool")
    return f"{ones}({length}, {length}, dtype={dtype}, device={x}.device).triu(1)"


@fixes("other_attention", "nan_scores", "no_mask", "mask_value")
def infinite_mask(site: Site) -> Iterator[Edits]:
    """Set masked scores to -inf, where they are set to, or combined with, another number."""
    source, function = site.source, site.function
    if function is None:
        return
    calls = find(ast.Call, function)
    masked = any(keyword.arg in MODULE_MASKS.values() for c in calls for keyword in c.keywords)
    if not masked and not find_calls(SDPA, within=function) and not products(function):
        return
    for call in calls:
        name = called(call).rstrip("_")
        value = argument(call, 1, "value") if name == "masked_fill" else None
        if name == "where" and len(call.args) == 3:
            value = next((a for a in call.args[1:] if is_number(site, a)), None)
        if value is not None and is_number(site, value):
            yield [Edit.replace(value, minus_inf(source))]
        passed = [k.value for k in call.keywords if k.arg in MODULE_MASKS.values()]
        mask = argument(call, 3, "attn_mask") if name == SDPA else next(iter(passed), None)
        if mask is not None and constant(mask) is not None:
            yield [Edit.replace(mask, f"{operand_code(mask)}.bool()")]
            yield [Edit.replace(mask, f"{operand_code(mask)} == 0")]
    for node in find(ast.BinOp, function):
        for mask, scores in sides(node):
            if isinstance(node.op, (ast.Add, ast.Mult)) and _is_mask(mask):
                text = with_mask(scores, f"{operand_code(mask)} == 0")
                yield [Edit.replace(node, text)]
    for augmented in find(ast.AugAssign, function):
        if _is_mask(augmented.value):
            hidden = f"{operand_code(augmented.value)} == 0"
            line = mask_line(source, code_of(augmented.target), hidden)
            yield [Edit.replace(augmented, line)]


def _is_mask(node: ast.expr) -> bool:
    """Return whether an operand is named like a mask or creates one, or is 1 less a mask."""
    if isinstance(node, ast.BinOp) and constant(node.left) == 1:
        node = node.right
    while isinstance(node, ast.Subscript):
        node = node.value
    return bool(_triangle(node) or MASK.search(name_of(node)))


@fixes("mask_off", "no_mask", "sliding_window")
def causal_mask(site: Site) -> Iterator[Edits]:
    """Change what creates or applies a mask so that it hides the tokens after each one."""
    scopes: list[ast.AST] = [site.statement]
    if site.finding.code == "no_mask" or site.function_or_none is None:
        scopes = [site.function] if site.function_or_none else []
    elif site.cls_or_none is not None:
        scopes += [site.function, *find(ast.FunctionDef, site.cls)]
    scopes = list(dict.fromkeys([*scopes, site.tree]))
    yield from _diagonals(scopes[0])
    yield from _comparisons(scopes[0])
    yield from _restrictions(scopes[0])
    for scope in scopes[1:]:
        yield from _diagonals(scope)
        yield from _applications(scope)
    for scope in scopes:
        yield from _shifts(scope)
        yield from _comparisons(scope)
    for scope in scopes[:2]:
        yield from _changes_of_mask(scope)
        yield from _other_triangles(scope)


def _triangles(scope: ast.AST) -> list[ast.Call]:
    return find_calls("tril", "triu", "tril_", "triu_", within=scope)


def _diagonal(call: ast.Call) -> ast.expr | None:
    """Return the diagonal that a call of tril or triu passes."""
    match call.func:
        case ast.Name() | ast.Attribute(ast.Name("torch" | "np" | "numpy")):
            return argument(call, 1, "diagonal")
    return argument(call, 0, "diagonal")


def _diagonals(scope: ast.AST) -> Iterator[Edits]:
    """Begin at the diagonal above the main one (triu), or end at the main one (tril)."""
    for call in _triangles(scope):
        upper, diagonal = called(call).startswith("triu"), _diagonal(call)
        if diagonal is None and upper:
            keywords = find(ast.keyword, source_of(call).tree)
            keyword = any(k.arg == "diagonal" for k in keywords)
            if keyword or (isinstance(call.func, ast.Attribute) and not call.args):
                yield [Edit.set_keyword(call, "diagonal", "1")]
            yield [Edit.last_argument(call, ", 1" if call.args else "1")]
        elif diagonal is not None and is_integer(diagonal):
            if upper:
                yield [Edit.replace(diagonal, "1")]
            elif code_of(diagonal) != "0":
                yield [Edit.remove_argument(call, diagonal)]
        elif diagonal is not None:
            yield from _other_offsets(call, diagonal, upper)


def _other_offsets(call: ast.Call, diagonal: ast.expr, upper: bool) -> Iterator[Edits]:
    """Shift a diagonal that is computed, such as `n_key - n_query + 1` or a variable."""
    function = enclosing(call, ast.FunctionDef)
    places = [diagonal]
    if isinstance(diagonal, ast.Name) and function is not None:
        places += [v for v, u in assigned_values(function, diagonal.id) if u is None]
    for place in places:
        for node in find(ast.BinOp, place):
            if isinstance(node.op, (ast.Add, ast.Sub)) and is_integer(node.right):
                yield [Edit.replace(node, code_of(node.left))]
            elif isinstance(node.op, ast.Add) and is_integer(node.left):
                yield [Edit.replace(node, code_of(node.right))]
    code = code_of(diagonal)
    for sign in ("+", "-") if upper else ("-", "+"):
        yield [Edit.replace(diagonal, f"{code} {sign} 1")]
    if not is_cached(function):
        yield [Edit.replace(diagonal, "1" if upper else "0")]


OPPOSITES: dict[type[ast.cmpop], tuple[str, list[str]]] = {
    ast.Gt: (">", [">=", "<", "<="]), ast.GtE: (">=", [">", "<=", "<"]),
    ast.Lt: ("<", ["<=", ">", ">="]), ast.LtE: ("<=", ["<", ">=", ">"]),
    ast.Eq: ("==", ["!="]), ast.NotEq: ("!=", ["=="]),
}  # fmt: skip


def _comparisons(scope: ast.AST) -> Iterator[Edits]:
    """Compare positions, or a mask with 0 or 1, in another way."""
    for node in find(ast.Compare, scope):
        old, others = OPPOSITES.get(type(node.ops[0]), ("", []))
        parts = [node.left, node.comparators[0]]
        for part in parts:
            if isinstance(part, ast.BinOp) and is_integer(part.right) and len(others) > 1:
                yield [Edit.replace(part, code_of(part.left))]
        start, end = span(parts[0])[1], span(parts[1])[0]
        if any(constant(part) is None for part in parts):
            continue
        if len(others) == 1 and not _near_mask(node):
            continue
        for other in others:
            text = source_of(node).text[start:end].replace(old, other, 1)
            if old:
                yield [Edit.at(node, start, end, text)]


def _near_mask(node: ast.AST) -> bool:
    """Return whether a statement of a node names a mask."""
    statement = enclosing(node, ast.stmt)
    return any(MASK.search(name_of(each)) for each in ast.walk(statement or node))


def _restrictions(scope: ast.AST) -> Iterator[Edits]:
    """Leave out one of two conditions, such as a window."""
    for node in find(ast.BinOp, scope):
        tight = isinstance(parent_of(node), (ast.BinOp, ast.UnaryOp, ast.Attribute))
        is_condition = isinstance(node.op, (ast.BitAnd, ast.BitOr))
        for part in (node.left, node.right):
            changes_mask = isinstance(node.op, (ast.Mult, ast.Sub, ast.Add)) and _triangle(part)
            if is_condition or changes_mask:
                bare = is_condition and not tight
                yield [Edit.replace(node, code_of(part) if bare else grouped_code(part))]
    for call in _triangles(scope):
        base = call.func.value if isinstance(call.func, ast.Attribute) else None
        inner = base if _triangle(base) else next(iter(call.args), None)
        if inner is not None and _triangle(inner):
            yield [Edit.replace(call, code_of(inner))]


def _applications(scope: ast.AST) -> Iterator[Edits]:
    """Use a mask the other way round, and without a step that leaves something out."""
    for call in find(ast.Call, scope):
        name = called(call).rstrip("_")
        mask = argument(call, 0, "mask") if name == "masked_fill" else None
        mask = argument(call, 0, "condition") if name == "where" else mask
        if name in (SDPA, "MultiheadAttention") or any(k.arg == "attn_mask" for k in call.keywords):
            mask = argument(call, 3, "attn_mask")
        match mask:
            case None | ast.Constant(None):
                continue
            case ast.UnaryOp(ast.Invert(), operand):
                yield [Edit.replace(mask, code_of(operand))]
            case ast.Compare(_, [ast.Eq() | ast.NotEq(), *_], [value, *_]):
                if constant(value) in (0, 1):
                    yield [Edit.replace(value, "0" if constant(value) else "1")]
                yield from _comparisons(mask)
            case _:
                yield [Edit.replace(mask, f"~{operand_code(mask)}")]


def _shifts(scope: ast.AST) -> Iterator[Edits]:
    """Slice a mask without an offset of one."""
    for node in find(ast.Subscript, scope):
        name = code_of(node.value)
        if not MASK.search(name):
            continue
        shifted: Edits = []
        for part in find(ast.Slice, node.slice):
            if part.lower is not None and is_integer(part.lower) and part.upper is not None:
                shifted.append(Edit.replace(part.lower, ""))
            if isinstance(part.upper, ast.BinOp) and is_integer(part.upper.right):
                shifted.append(Edit.replace(part.upper, code_of(part.upper.left)))
        if shifted:
            yield shifted
        for binary in find(ast.BinOp, node.slice):
            if is_integer(binary.right):
                yield [Edit.replace(binary, code_of(binary.left))]


def _changes_of_mask(scope: ast.AST) -> Iterator[Edits]:
    """Leave out what changes a mask after it was created, and what transposes it."""
    items: Edits = []
    for node in find(ast.stmt, scope):
        for target in targets(node):
            base = target.value if isinstance(target, ast.Subscript) else target
            if not isinstance(base, ast.Name) or not MASK.search(base.id):
                continue
            value = getattr(node, "value", None)
            own = base.id in variables(value or node)
            if isinstance(target, ast.Subscript):
                items.append(Edit.remove(node))
            elif isinstance(node, ast.AugAssign) or own:
                yield [Edit.remove(node)]
    if items:
        yield items
    for inner in find(ast.expr, scope):
        turned = inner.func if isinstance(inner, ast.Call) else inner
        if isinstance(turned, ast.Attribute) and _near_mask(inner):
            if turned.attr in (("transpose", "flip", "t") if inner is not turned else ("T", "mT")):
                yield [Edit.replace(inner, code_of(turned.value))]


def _other_triangles(scope: ast.AST) -> Iterator[Edits]:
    """Exchange the lower and the upper triangle."""
    for call in _triangles(scope):
        name = called(call)
        other = name.replace("tril", "triu") if "tril" in name else name.replace("triu", "tril")
        renamed = Edit.rename(call.func, other)
        diagonal = _diagonal(call)
        if diagonal is not None and not is_integer(diagonal):
            continue
        if diagonal is None:
            above = Edit.last_argument(call, f"{', ' if call.args else ''}diagonal=1")
            yield [renamed] if "tril" in other else [renamed, above]
        elif "tril" in other:
            yield [renamed, Edit.remove_argument(call, diagonal)]
        else:
            yield [renamed, Edit.replace(diagonal, "1")]
