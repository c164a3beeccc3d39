"""Fixes of a block: its norms, its residual connections, and branches in parallel."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compat.adaptation.repair.edits import Edit, Edits, apply
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.formulas import only, removed, unused
from compat.adaptation.repair.held import place_of
from compat.adaptation.repair.source import (
    block_of,
    code_around,
    code_of,
    enclosing,
    find,
    find_calls,
    following,
    indent_of,
    parent_of,
    preceding,
    source_of,
    span,
    statement_of,
)
from compat.adaptation.repair.syntax import (
    assignments,
    called,
    is_self,
    is_sum,
    name_of,
    own_attribute,
    parameters,
    self_assignments,
    sides,
    variable,
    variables,
)
from compat.adaptation.repair.values import hyperparameters

BODY = ("ModuleList", "Sequential", "TransformerEncoder", "clones")
# Names of the first and the second norm of a block.
PAIRS = (
    ("1", "2"), ("input", "post_attention"), ("before", "after"), ("pre", "post"),
    ("attention", "mlp"), ("attn", "mlp"), ("attn", "ffn"), ("attn", "ff"), ("att", "ff"),
    ("first", "second"), ("_a", "_b"), ("0", "1"),
)  # fmt: skip
Wrap = Callable[[str], str]
NORM = re.compile(r"norm|^ln|(?<![a-z])ln(?![a-z])|(?<![A-Z])LN", re.I)
WRAPPER = re.compile(r"pre|post|add|resid|sub", re.I)
SHAPE = ("shape", "size", "device", "dtype", "dim", "ndim", "numel", "new_zeros", "new_ones")


@dataclass(frozen=True)
class Residual:
    """A sum of the residual stream and the output of a branch.

    Args:
        statement: the statement that computes the sum.
        sum: the sum; None if the statement is `x += branch` or `branch += x`.
        stream: the operand that carries the stream.
        branch: the other operand.
    """

    statement: ast.stmt
    sum: ast.expr | None
    stream: ast.Name
    branch: ast.expr


def residuals_of(statement: ast.stmt) -> list[Residual]:
    """Return the readings of a statement as a residual sum, the likeliest first."""
    match statement:
        case ast.AugAssign(ast.Name() as target, ast.Add(), value):
            swapped = (
                [Residual(statement, None, value, target)] if isinstance(value, ast.Name) else []
            )
            return [Residual(statement, None, target, value), *swapped]
        case ast.Assign() | ast.Return():
            for node in filter(is_sum, find(ast.BinOp, statement)):
                if not isinstance(parent_of(node), ast.Subscript):
                    return [
                        Residual(statement, node, stream, branch) for branch, stream in sides(node)
                        if isinstance(stream, ast.Name) and not isinstance(branch, ast.Constant)
                    ]  # fmt: skip
    return []


def stored(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement assigns."""
    return variables(statement, ast.Store)


def tensor_reads(statement: ast.AST, name: str) -> list[ast.Name]:
    """Return where a statement reads a tensor, other than its shape and its type."""

    def is_size(node: ast.AST) -> bool:
        is_length = isinstance(node, ast.Call) and called(node) == "len"
        return is_length or (isinstance(node, ast.Attribute) and node.attr in SHAPE)

    names = [node for node in find(ast.Name, statement) if node.id == name]
    return [n for n in names if isinstance(n.ctx, ast.Load) and not is_size(parent_of(n))]


def copied_as(statement: ast.stmt, name: str) -> str | None:
    """Return `x` if a statement assigns `name = x`, alone or among others."""
    values = assignments(statement, name, deep=False)
    return next((value.id for value in values if isinstance(value, ast.Name)), None)


def simple_statements(site: Site) -> list[ast.stmt]:
    """Return the simple statements of the finding's function, the finding's own first."""
    found = [n for n in find(ast.stmt, site.within) if not hasattr(n, "body")]
    return sorted(found, key=lambda node: node is not site.statement)


# Norms.


def norm_modules(site: Site) -> dict[str, ast.Call]:
    """Return the calls that build a norm, by the attribute or key under which a module holds it."""
    found: dict[str, ast.Call] = {}
    for call in site.every(ast.Call):
        if is_norm_class(called(call)) and (name := place_of(call)[1]):
            found.setdefault(name, call)
    return found


def is_norm_class(name: str) -> bool:
    return bool(NORM.search(name)) and name[:1].isupper() and not WRAPPER.search(name)


def is_norm(site: Site, call: ast.Call) -> bool:
    """Return whether a call applies a norm to its first argument."""
    func: ast.expr = call.func
    while isinstance(func, ast.Subscript):
        if isinstance(func.slice, ast.Constant) and func.slice.value in norm_modules(site):
            return bool(call.args)
        func = func.value
    name = name_of(func)
    known = name in norm_modules(site) or bool(NORM.search(name))
    return bool(call.args) and known and not name[:1].isupper()


def norm_calls(site: Site, within: ast.AST) -> list[ast.Call]:
    return [call for call in find(ast.Call, within) if is_norm(site, call)]


# The order of the norms and the branches.


def _normed_input(
    site: Site, residual: Residual, wrap: Wrap, dropped: tuple[ast.stmt, ...] = ()
) -> Edits:
    """Apply a norm to the input of a residual branch; nothing if no statement reads it.

    Args:
        site: the finding.
        residual: the sum after the branch.
        wrap: the code of the norm of a tensor.
        dropped: statements that are removed.
    """
    name = residual.stream.id
    block = block_of(residual.statement)
    end = block.index(residual.statement)
    start = next((i for i in range(end - 1, -1, -1) if name in stored(block[i])
                  and block[i] not in dropped), -1)  # fmt: skip
    copied = copied_as(block[start], name) if start >= 0 else None
    tensor = name if copied is None else copied
    uses: list[ast.Name] = []
    for statement in block[start + 1 : end + 1]:
        if statement in dropped:
            continue
        uses += [n for n in tensor_reads(statement, tensor) if n is not residual.stream]
        if tensor in stored(statement):
            break
    if not uses and copied is not None:
        tensor, copied = name, None
        for statement in block[start + 1 : end + 1]:
            uses += [n for n in tensor_reads(statement, name) if n is not residual.stream]
    if not uses:
        return []
    first = next(s for s in block if uses[0] in set(ast.walk(s)))
    if copied is not None and first is not residual.statement:
        names = _passed_together(site, tensor)
        line = f"{', '.join(names)} = {', '.join(wrap(each) for each in names)}"
        read = (s for s in block[start + 1 :] if any(tensor_reads(s, each) for each in names))
        return [Edit.insert_before(next(read), line)]
    if len(uses) == 1:
        return [Edit.replace(uses[0], wrap(tensor))]
    new = site.new_name("normed", "y", "x_norm")
    edits = [Edit.replace(node, new) for node in uses]
    return [Edit.insert_before(first, f"{new} = {wrap(tensor)}"), *edits]


def _passed_together(site: Site, name: str) -> list[str]:
    """Return the parameters for which the function's callers pass one tensor, such as q, k, v.

    They are those before and after `name` if a call passes its first argument several times.
    """
    names = [name for name in parameters(site.function) if name != "self"]
    for call in site.every(ast.Call):
        codes = [code_of(each) for each in call.args]
        same = len(list(next(itertools.groupby(codes))[1])) if codes else 0
        root = next((n.id for n in ast.walk(call.func) if isinstance(n, ast.Name)), "")
        is_method = root == "self" or root not in {called(call), *site.imported}
        if is_method and same > 1 and len(codes) <= len(names) and name in names[:same]:
            return names[:same]
    return [name]


def _wrap(call: ast.Call) -> Wrap:
    """Return the code of a norm of another tensor than the one of this call."""
    before, after = code_around(call, call.args[0])
    return lambda tensor: f"{before}{tensor}{after}"


def _all_then_first(candidates: list[Edits]) -> Iterator[Edits]:
    """Yield all edits together if there are several, then those of the first."""
    if len(candidates) > 1:
        yield list(dict.fromkeys(edit for edits in candidates for edit in edits))
    yield from candidates[:1]


@fixes("post_ln")
def pre_norm(site: Site) -> Iterator[Edits]:
    """Move the norms behind the residual sums to the inputs of the branches.

    The finding's lines may only call the functions with the sums.
    """
    functions = site.every(ast.FunctionDef)
    elsewhere = (site.around(each.body[0]) for each in functions)
    for places in (site.everywhere, elsewhere):
        pairs = ((place, each) for place in places for each in simple_statements(place))
        found = [edits for place, each in pairs if (edits := _post_to_pre(place, each))]
        yield from _all_then_first(found)
        if found:
            break


@fixes("post_ln")
def pre_norm_of_wrapper(site: Site) -> Iterator[Edits]:
    """Change `x = add_norm(x, branch(x))` to `x = add_norm(x, branch(add_norm.norm(x)))`.

    The wrapper, whose code the finding is in, then only adds.
    """
    name = site.cls.name if site.cls_or_none else ""
    norms = [call for call in site.calls if is_norm(site, call) and is_sum(call.args[0])]
    held = {
        name_of(target)
        for node in site.every(ast.Assign) if find_calls(name, within=node.value)
        for target in node.targets
    }  # fmt: skip
    for norm, stream in itertools.product(norms, (0, 1)):
        edits = Edit.unwrap(norm, norm.args[0])
        for call in site.every(ast.Call):
            statement = statement_of(call)
            match call.args[stream:] + call.args[:stream]:
                case [ast.Name() as tensor, branch] if own_attribute(call.func) in held:
                    wrap: Wrap = f"{code_of(call.func)}.{name_of(norm.func)}({{}})".format
                    residual = Residual(statement, call, tensor, branch)
                    edits += _normed_input(site.around(statement), residual, wrap)
        yield edits


def _post_to_pre(site: Site, statement: ast.stmt) -> Edits | None:
    for call in norm_calls(site, statement):
        summed = call.args[0]
        if isinstance(summed, ast.BinOp):
            for residual in residuals_of(statement):
                moved = _normed_input(site, residual, _wrap(call))
                if residual.sum is summed and moved:
                    return [*Edit.unwrap(call, summed), *moved]
        for total in preceding(statement)[-1:]:
            if isinstance(summed, ast.Name) and summed.id in stored(total):
                for residual in residuals_of(total):
                    if moved := _normed_input(site, residual, _wrap(call), (statement,)):
                        return [*only(call, summed), *moved]
    return None


@fixes("post_ln")
def norm_first(site: Site) -> Iterator[Edits]:
    """Set `norm_first` of torch's own layers."""
    for source in site.sources.values():
        calls = find(ast.Call, source.tree)
        layers = [call for call in calls if re.match("Transformer.*Layer", called(call))]
        yield [Edit.set_keyword(call, "norm_first", "True") for call in layers]


@fixes("norm_on_output")
def norm_on_input(site: Site) -> Iterator[Edits]:
    """Move the norms of the branches from their outputs to their inputs."""
    found = [e for statement in simple_statements(site) if (e := _output_to_input(site, statement))]
    yield from _all_then_first(found)


def _output_to_input(site: Site, statement: ast.stmt) -> Edits | None:
    for call in norm_calls(site, statement):
        if isinstance(call.args[0], ast.BinOp):
            continue
        dropped = only(call, call.args[0])
        alone = (statement,) if len(dropped) == 1 else ()
        for later in [statement, *following(statement)]:
            for residual in residuals_of(later):
                if later is statement and call not in set(ast.walk(residual.branch)):
                    continue
                if moved := _normed_input(site, residual, _wrap(call), alone):
                    return [*dropped, *moved]
            if residuals_of(later):
                break
        inner = call.args[0]
        if isinstance(inner, ast.Call) and inner.args and isinstance(inner.args[0], ast.Name):
            tensor = inner.args[0]
            normed = Edit.replace(tensor, _wrap(call)(tensor.id))
            return [*Edit.unwrap(call, inner), normed]
    return None


@fixes("extra_ln", "residual_from_norm")
def residual_before_norm(site: Site) -> Iterator[Edits]:
    """Start the residual connections before the norms: the first norm then is not an extra one."""
    found: list[Edits] = []
    for statement in simple_statements(site):
        moved = (_from_before_norm(site, residual) for residual in residuals_of(statement))
        found.append(next(filter(None, moved), []) or _normed_operand(site, statement))
    yield from _all_then_first([edits for edits in found if edits])


def _normed_operand(site: Site, statement: ast.stmt) -> Edits:
    """Remove the norm from `ln(x)` in `ln(x) + branch(ln(x))`."""
    for node in filter(is_sum, find(ast.BinOp, statement)):
        for operand in (node.left, node.right):
            match operand:
                case ast.Call(_, [ast.Name() as tensor, *_]) if is_norm(site, operand):
                    return Edit.unwrap(operand, tensor)
    return []


def _from_before_norm(site: Site, residual: Residual) -> Edits:
    name = residual.stream.id
    block = block_of(residual.statement)
    end = block.index(residual.statement)
    i = next((i for i in range(end - 1, -1, -1) if name in stored(block[i])), -1)
    if i < 0 or not isinstance(definition := block[i], ast.Assign):
        return []
    match (block[i - 1] if i else None), definition.value:
        case ((ast.Assign(_, ast.Call() as call) as before), ast.Name(copied) as value):
            if copied not in stored(before) or not is_norm(site, call):
                return []
            tensor = call.args[0]
            if not isinstance(tensor, ast.Name) or tensor.id != copied:  # h = ln(x); residual = h
                return [Edit.replace(value, code_of(tensor))]
            return [  # x = ln(x); residual = x
                Edit.replace(before, code_of(definition)),
                Edit.replace(definition, code_of(before)),
            ]
        case _, ast.Call(_, [ast.Name(normed), *_]) as call if is_norm(site, call):
            if normed != name:  # h = ln(x); x = h + branch(h)
                return [Edit.replace(residual.stream, normed)]
            if moved := _normed_input(site, residual, _wrap(call), (definition,)):
                edits = [removed(definition), *moved]  # without two of one place
                return list({(edit.start, edit.end): edit for edit in edits}.values())
    return []


@fixes("extra_ln")
def norm_after_loop(site: Site) -> Iterator[Edits]:
    """Move a norm from the end of the loop over the blocks to the line after it."""
    statement = site.statement
    loop = parent_of(statement)
    if (
        isinstance(loop, ast.For)
        and len(loop.body) > 1
        and statement is loop.body[-1]
        and any(is_norm(site, call) for call in site.calls)
        and statement.lineno == statement.end_lineno
        and indent_of(statement).isspace()
    ):
        yield [Edit.remove(statement), Edit.insert_after(loop, code_of(statement))]


@fixes("extra_ln")
def removed_norm(site: Site) -> Iterator[Edits]:
    """Remove the call of a norm, and the module that is then not used."""
    for call in site.calls:
        if is_norm(site, call):
            edits = only(call, call.args[0])
            yield [*edits, *_unused_norm(site, call)]
            yield edits


def _unused_norm(site: Site, call: ast.Call) -> Edits:
    """Return the removal of the module that only this call uses."""
    edits = unused(site, [call.func])
    if edits or not isinstance(call.func, ast.Attribute):
        return edits
    name = call.func.attr
    if sum(node.attr == name for node in find(ast.Attribute, site.tree)) > 1:
        return []
    keywords = [(built, k) for built in find(ast.Call, site.tree) for k in built.keywords]
    return [Edit.remove_argument(built, k) for built, k in keywords if k.arg == name]


@fixes("extra_ln")
def removed_norm_module(site: Site) -> Iterator[Edits]:
    """Remove a norm from a Sequential, or the last norm of torch's own encoder."""
    for source in site.ordered:
        for call in find(ast.Call, source.tree):
            items: list[ast.expr | ast.keyword] = []
            if called(call) == "Sequential":
                calls = (item for item in call.args if isinstance(item, ast.Call))
                items = [item for item in calls if is_norm_class(called(item))]
            elif called(call).startswith("Transformer"):
                items = [k for k in call.keywords if k.arg == "norm"]
            yield from ([Edit.remove_argument(call, item)] for item in items)


@fixes("missing_ln")
def added_norm(site: Site) -> Iterator[Edits]:
    """Apply a norm to the input of a branch: an unused one of the class, or a new one."""
    if site.finding.tap is None:
        return
    first = site.finding.tap.endswith("ln_1")
    statements = [site.statement, *following(site.statement)]
    sums = [r for statement in statements for r in residuals_of(statement)][:2]
    norms: list[tuple[str, Edits]] = [(name, []) for name in _unused_norms(site, site.cls)]
    if site.init_or_none is not None:
        insert = Edit.insert_before if first else Edit.insert_after
        new_norms = _new_norms(site, site.init, first)
        norms += [(name, [insert(statement, new)]) for name, statement, new in new_norms]
    for (name, created), residual in itertools.product(norms, sums):
        if edits := _normed_input(site, residual, _norm_like(site, name)):
            yield [*created, *edits]


@fixes("shared_parameters")
def second_norm(site: Site) -> Iterator[Edits]:
    """Call another norm where a block calls one a second time: an unused one, or a new one."""
    cls, init = site.cls, site.init
    for norm in [call.func for call in site.calls if is_norm(site, call)]:
        if not is_self(norm):
            continue
        for name in _unused_norms(site, cls):
            yield [Edit.replace(norm, f"self.{name}")]
        for value in self_assignments(init, norm.attr):
            if statement := enclosing(value, ast.stmt):
                new = f"self.{norm.attr}_2"
                built = Edit.insert_after(statement, f"{new} = {code_of(value)}")
                yield [built, Edit.replace(norm, new)]


@fixes("missing_ln")
def norm_of_wrapper(site: Site) -> Iterator[Edits]:
    """Apply the unused norm of a class that wraps the branches."""
    for cls in find(ast.ClassDef, site.tree):
        names = [] if cls is site.cls_or_none else _unused_norms(site, cls)
        for name, statement in itertools.product(names, find(ast.Return, cls)):
            residuals = residuals_of(statement)
            yield from (_normed_input(site, each, _of_self(name)) for each in residuals)
            match statement.value:
                case ast.Call(_, [tensor, *_]) if not residuals:
                    yield [Edit.replace(tensor, f"self.{name}({code_of(tensor)})")]


def _norm_like(site: Site, name: str) -> Wrap:
    """Return the code of a norm of this name, applied like another one in the function."""
    for call in find(ast.Call, site.region):
        if is_norm(site, call) and isinstance(call.func, (ast.Attribute, ast.Subscript)):
            owner: ast.expr = call.func
            while isinstance(owner, ast.Subscript):
                owner = owner.value
            if isinstance(owner, ast.Attribute):
                _, rest = code_around(call.func, owner)
                func = code_of(owner).removesuffix(owner.attr) + name + rest
                return lambda tensor: f"{func}({tensor})"
    return _of_self(name)


def _of_self(name: str) -> Wrap:
    return lambda tensor: f"self.{name}({tensor})"


def _unused_norms(site: Site, cls: ast.ClassDef) -> list[str]:
    """Return the attributes and keys of norms that a class builds and nothing reads."""
    within = set(ast.walk(cls))
    every = {
        node.attr
        for node in site.every(ast.Attribute)
        if isinstance(node.ctx, ast.Load) and (node in within or not is_self(node))
    }
    return [name for name, call in norm_modules(site).items()
            if call in within and name not in every]  # fmt: skip


def _new_norms(
    site: Site, init: ast.FunctionDef, first: bool
) -> Iterator[tuple[str, ast.stmt, str]]:
    """Yield the name of a new norm, the statement beside it, and the statement that builds it."""
    own = []
    for statement in init.body:
        match statement:
            case ast.Assign([ast.Attribute(attr=old), *_], value):
                own.append(statement)
                if old in norm_modules(site):
                    name = _sibling(old, first)
                    yield name, statement, f"self.{name} = {code_of(value)}"
    name = "ln_1" if first else "ln_2"
    for new in _constructors(site, init):
        yield name, own[0], f"self.{name} = {new}"


def _sibling(name: str, first: bool) -> str:
    """Derive the name of a block's first norm from that of its second, or the reverse."""
    for pair in PAIRS:
        new, old = pair if first else pair[::-1]
        if old in name:
            return new.join(name.rsplit(old, 1))
    return "ln_1" if first else "ln_2"


def _constructors(site: Site, init: ast.FunctionDef) -> Iterator[str]:
    """Yield code of a new norm, the user's norms first. Each name is known in the method."""
    known = {a.arg for a in ast.walk(init.args) if isinstance(a, ast.arg)} | site.imported
    known |= variables(init, ast.Store)
    notebook = str(site.finding.file).partition("#")[0]  # whose cells are one module, or the file
    for file, source in site.sources.items():
        for each in source.tree.body if file.partition("#")[0] == notebook else ():
            known |= {each.name} if isinstance(each, ast.ClassDef) else set()
            if isinstance(each, ast.Assign):
                known |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    own = {n.attr for n in ast.walk(init) if isinstance(n, ast.Attribute)
           and isinstance(n.ctx, ast.Store)}  # fmt: skip

    def is_known(node: ast.AST) -> bool:
        attributes = {name_of(n) for n in ast.walk(node) if is_self(n)}
        return variables(node) <= known and attributes <= own

    norms = list(norm_modules(site).values())
    for call in filter(is_known, norms):
        yield code_of(call)
    torchs = site.torch("torch.nn.LayerNorm")  # for where the user's own takes other arguments
    classes = [*sorted({ast.unparse(call.func) for call in norms} - {torchs}), torchs]
    widths = [
        code_of(call.args[place])
        for call in find(ast.Call, init)
        if (place := {"Linear": 0, "Embedding": 1}.get(called(call))) is not None
        and len(call.args) > place and is_known(call.args[place])
    ]  # fmt: skip
    for width in widths or hyperparameters(site, init, "n_embd"):
        yield from (f"{cls}({width})" for cls in classes)


@fixes("no_final_ln")
def final_norm(site: Site) -> Iterator[Edits]:
    """Apply a norm before the head: an unused one of the class, or a new one."""
    for place in [*site.everywhere[1:], site]:  # first in the methods that the line calls
        unused = _unused_norms(place, place.cls) if place.cls_or_none else []
        for name in unused:
            yield from _before_head(place, _held(place, name))
        if place.init_or_none is not None and not unused:
            name = _final_name(place)
            for new in _constructors(place, place.init):
                created = _beside_head(place, place.init, f"self.{name} = {new}")
                for edits in _before_head(place, f"self.{name}"):
                    yield [created, *edits]


def _held(site: Site, name: str) -> str:
    """Return how the class reaches a module of its own, or one in a ModuleDict."""
    holder, _ = place_of(norm_modules(site)[name])
    if holder in ("", "self"):
        return f"self.{name}"
    keyed = find(ast.Subscript, site.cls)
    if any(code_of(each.value) == holder for each in keyed):
        return f"{holder}[{site.source.quoted(name)}]"
    return f"{holder}.{name}"


def _before_head(site: Site, norm: str) -> Iterator[Edits]:
    """Apply a norm to the tensor that the finding's line passes to the head."""
    statement, function = site.statement, site.function_or_none
    if function is None or function is statement:
        return
    local = {a.arg for a in function.args.args} | stored(function)
    tensors = [n for n in find(ast.Name, statement) if n.id in local - {"self"}
               and n in tensor_reads(statement, n.id)]  # fmt: skip
    outermost = next(s for s in function.body if statement in set(ast.walk(s)))
    for node in tensors:
        new = Edit.insert_before(outermost, f"{node.id} = {norm}({node.id})")
        inline = Edit.replace(node, f"{norm}({node.id})")
        nested = outermost is not statement or isinstance(parent_of(node), ast.Subscript)
        line_first = nested or isinstance(statement, ast.Assign)
        yield from ([edit] for edit in ((new, inline) if line_first else (inline, new)))
    calls = [c for c in site.calls if c.args and isinstance(c.args[0], (ast.Call, ast.Subscript))]
    for call in calls:
        yield [Edit.replace(call.args[0], f"{norm}({code_of(call.args[0])})")]


def _final_name(site: Site) -> str:
    """Return a name for the final norm in the style of the others."""
    styles = (("ln", "ln_f"), ("layernorm", "final_layernorm"), ("layer_norm", "final_layer_norm"),
              ("norm", "norm"))  # fmt: skip
    for name in norm_modules(site):
        for start, new in styles:
            if start in name.lower():
                return new
    return "ln_f"


def _beside_head(site: Site, init: ast.FunctionDef, new: str) -> Edit:
    """Insert a statement before the one that builds the head, or after the blocks."""
    read = {n.attr for n in find(ast.Attribute, site.statement)}
    built = [s for s in init.body if isinstance(s, ast.Assign)]
    for statement in built:
        target = statement.targets[0]
        if isinstance(target, ast.Attribute) and target.attr in read:
            if find_calls("Linear", within=statement):
                return Edit.insert_before(statement, new)
    blocks = [s for s in built if find_calls(*BODY, within=s)]
    return Edit.insert_after((blocks or built or init.body)[-1], new)


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
    for each in reversed(simple_statements(site)):
        if each.lineno < site.line and isinstance(each, ast.AugAssign):
            new = f"{code_of(each.target)} = {code_of(each.value)}"
            yield [Edit.replace(each, new)]


def _saved_residual(site: Site) -> Iterator[Edits]:
    """Save the stream before a branch that overwrites it, and add it behind the branch."""
    statement, name = site.statement, variable(site.statement)
    if not name:
        return
    saved = [*_copies(simple_statements(site)), site.new_name("residual", "shortcut")][0]
    own = itertools.takewhile(lambda s: stored(s) == {name}, reversed(preceding(statement)))
    before = itertools.takewhile(lambda s: not residuals_of(s), own)
    own = itertools.takewhile(lambda s: stored(s) == {name}, following(statement))
    after = itertools.takewhile(lambda s: not norm_calls(site, s), own)
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
    for node in filter(is_sum, find(ast.BinOp, site.statement)):
        yield from (Edit.unwrap(node, part) for part in (node.right, node.left))


# Parallel branches.


@fixes("parallel_block")
def sequential_branches(site: Site) -> Iterator[Edits]:
    """Add attention first where branches share a norm, which is applied once more for the MLP."""
    for later in [site.statement, *simple_statements(site)]:
        for stream, rest in _with_rest(_terms(later)):
            for attention, mlp in (rest, rest[::-1]) if len(rest) == 2 else ():
                yield _split_shared(site, later, stream, attention, mlp)


def _terms(statement: ast.stmt) -> list[ast.expr]:
    """Return the terms of the sum that a statement assigns or returns."""
    value = getattr(statement, "value", None)
    terms = _flat(value) if isinstance(value, ast.expr) else []
    match statement:
        case ast.AugAssign(ast.Name() as target):
            return [target, *terms]
    return terms


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
) -> Edits:
    """Split the sum of branches that read one norm, which is applied once more for the MLP."""
    x, dropped = stream.id, []
    if isinstance(mlp, ast.Name):  # m = mlp(h); return x + a + m
        if (made := _assignment_before(statement, mlp.id)) is None:
            return []
        mlp, dropped = made.value, [Edit.remove(made)]
    if (normed := _normed_again(site, statement, mlp, x)) is None:
        return []
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
                    yield _summed_first(site, last, None, stream, attention, mlp)
            before = reversed(preceding(last))
            total = next((s for s in before if stream.id in stored(s)), None)
            if len(rest) != 1 or total is None or len(stored(total)) != 1:
                continue
            for x, others in _with_rest(_terms(total)):  # h = x + attention; out = h + mlp
                if len(others) == 1:
                    yield _summed_first(site, last, total, x, others[0], rest[0])


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
) -> Edits:
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
        return []
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
