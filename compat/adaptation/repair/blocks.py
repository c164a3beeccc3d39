"""Fixes of the order of norms and branches, of residual connections, and of norms."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from compat.adaptation.repair.fixes import Edits, Site, fixes
from compat.adaptation.repair.formulas import removed, unused
from compat.adaptation.repair.source import Edit, Source, apply
from compat.adaptation.repair.syntax import (
    assigned,
    called,
    constructor,
    is_self,
    is_sum,
    name_of,
    own_attribute,
    parameters,
    self_assignments,
)
from compat.adaptation.repair.values import hyperparameters

NORM = re.compile(r"norm|^ln|(?<![a-z])ln(?![a-z])|(?<![A-Z])LN", re.I)
WRAPPER = re.compile(r"pre|post|add|resid|sub", re.I)
BODY = ("ModuleList", "Sequential", "TransformerEncoder", "clones")
SHAPE = ("shape", "size", "device", "dtype", "dim", "ndim", "numel", "new_zeros", "new_ones")
# Names of the first and the second norm of a block.
PAIRS = (
    ("1", "2"), ("input", "post_attention"), ("before", "after"), ("pre", "post"),
    ("attention", "mlp"), ("attn", "mlp"), ("attn", "ffn"), ("attn", "ff"), ("att", "ff"),
    ("first", "second"), ("_a", "_b"), ("0", "1"),
)  # fmt: skip

Wrap = Callable[[str], str]


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


def _residuals(source: Source, statement: ast.stmt) -> list[Residual]:
    """Return the readings of a statement as a residual sum, the likeliest first."""
    match statement:
        case ast.AugAssign(ast.Name() as target, ast.Add(), ast.Name() as value):
            readings = [(target, value), (value, target)]
            return [Residual(statement, None, stream, branch) for stream, branch in readings]
        case ast.AugAssign(ast.Name() as target, ast.Add(), value):
            return [Residual(statement, None, target, value)]
        case ast.Assign() | ast.Return() | ast.AnnAssign():
            pass
        case _:
            return []
    for node in source.nodes(ast.BinOp, statement):
        if isinstance(node.op, ast.Add) and not isinstance(source.parents[node], ast.Subscript):
            pairs = [(node.left, node.right), (node.right, node.left)]
            both = [Residual(statement, node, a, b) for a, b in pairs if isinstance(a, ast.Name)]
            return [residual for residual in both if not isinstance(residual.branch, ast.Constant)]
    return []


def _stores(statement: ast.stmt) -> set[str]:
    """Return the names that a statement assigns."""
    return {
        node.id for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }  # fmt: skip


def _loads(source: Source, statement: ast.AST, name: str) -> list[ast.Name]:
    """Return where a statement reads a tensor, other than its shape and its type."""
    found = []
    for node in source.nodes(ast.Name, statement):
        above = source.parents[node]
        shape = isinstance(above, ast.Attribute) and above.attr in SHAPE
        length = isinstance(above, ast.Call) and called(above) == "len"
        if node.id == name and isinstance(node.ctx, ast.Load) and not (shape or length):
            found.append(node)
    return found


def _normed_input(
    site: Site, residual: Residual, wrap: Wrap, dropped: tuple[ast.stmt, ...] = ()
) -> Edits | None:
    """Apply a norm to the input of a residual branch.

    Args:
        site: the finding.
        residual: the sum after the branch.
        wrap: the code of the norm of a tensor.
        dropped: statements that are removed.
    """
    source, name = site.source, residual.stream.id
    block = source.block(residual.statement)
    end = block.index(residual.statement)
    start = next((i for i in range(end - 1, -1, -1) if name in _stores(block[i])
                  and block[i] not in dropped), -1)  # fmt: skip
    copied = _copied(block[start], name) if start >= 0 else None
    tensor = name if copied is None else copied
    uses: list[ast.Name] = []
    for statement in block[start + 1 : end + 1]:
        if statement in dropped:
            continue
        uses += [n for n in _loads(source, statement, tensor) if n is not residual.stream]
        if tensor in _stores(statement):
            break
    if not uses and copied is not None:
        tensor, copied = name, None
        for statement in block[start + 1 : end + 1]:
            uses += [n for n in _loads(source, statement, name) if n is not residual.stream]
    if not uses:
        return None
    first = next(s for s in block if uses[0] in set(ast.walk(s)))
    if copied is not None and first is not residual.statement:
        names = _passed_together(site, tensor)
        line = f"{', '.join(names)} = {', '.join(wrap(each) for each in names)}"
        read = (s for s in block[start + 1 :] if any(_loads(source, s, each) for each in names))
        return [source.insert_before(next(read), line)]
    if len(uses) == 1:
        return [source.replace(uses[0], wrap(tensor))]
    new = site.new_name("normed", "y", "x_norm")
    edits = [source.replace(node, new) for node in uses]
    return [source.insert_before(first, f"{new} = {wrap(tensor)}"), *edits]


def _copied(statement: ast.stmt, name: str) -> str | None:
    """Return `x` if a statement assigns `name = x`, alone or among others."""
    return next(
        (value.id for target, value in assigned(statement)
         if isinstance(target, ast.Name) and target.id == name and isinstance(value, ast.Name)),
        None,
    )  # fmt: skip


def _passed_together(site: Site, name: str) -> list[str]:
    """Return the parameters for which the function's callers pass one tensor, such as q, k, v.

    They are those before and after `name` if a call passes its first argument several times.
    """
    names = [] if site.function is None else [each.arg for each in parameters(site.function)]
    names = [each for each in names if each != "self"]
    for source, call in site.every(ast.Call):
        codes = [source.code(each) for each in call.args]
        same = len(list(next(itertools.groupby(codes))[1])) if codes else 0
        root = next((n.id for n in ast.walk(call.func) if isinstance(n, ast.Name)), "")
        is_method = root == "self" or root not in {called(call), *site.imported}
        if is_method and same > 1 and len(codes) <= len(names) and name in names[:same]:
            return names[:same]
    return [name]


# Norms.


def _norm_modules(site: Site) -> dict[str, ast.Call]:
    """Return the calls that build a norm, by the attribute or key under which a module holds it."""
    found: dict[str, ast.Call] = {}
    for source, call in site.every(ast.Call):
        if not _is_norm_class(called(call)):
            continue
        for above in source.ancestors(call):
            match above:
                case ast.keyword(str(name)) | ast.Assign([ast.Attribute(attr=name), *_]):
                    found.setdefault(name, call)
                case ast.Dict(keys, values):
                    for key, value in zip(keys, values, strict=True):
                        if isinstance(key, ast.Constant) and call in set(ast.walk(value)):
                            found.setdefault(str(key.value), call)
                case ast.List() | ast.ListComp() | ast.GeneratorExp() | ast.comprehension():
                    continue
                case ast.Call() if called(above) in ("ModuleList", "ModuleDict", "dict"):
                    continue
            break
    return found


def _is_norm_class(name: str) -> bool:
    return bool(NORM.search(name)) and name[:1].isupper() and not WRAPPER.search(name)


def _is_norm(site: Site, call: ast.Call) -> bool:
    """Return whether a call applies a norm to its first argument."""
    func: ast.expr = call.func
    while isinstance(func, ast.Subscript):
        if isinstance(func.slice, ast.Constant) and func.slice.value in _norm_modules(site):
            return bool(call.args)
        func = func.value
    name = name_of(func)
    known = name in _norm_modules(site) or bool(NORM.search(name))
    return bool(call.args) and known and not name[:1].isupper()


def _wrap(source: Source, call: ast.Call) -> Wrap:
    """Return the code of a norm of another tensor than the one of this call."""
    (start, end), (first, last) = source.span(call), source.span(call.args[0])
    before, after = source.text[start:first], source.text[last:end]
    return lambda tensor: f"{before}{tensor}{after}"


def _statements(site: Site) -> list[ast.stmt]:
    """Return the simple statements of the finding's function, the finding's own first."""
    within = site.function or site.statement
    found = [n for n in site.source.nodes(ast.stmt, within) if not hasattr(n, "body")]
    return sorted(found, key=lambda node: node is not site.statement)


def _all_then_first(candidates: list[Edits]) -> Iterator[Edits]:
    """Yield all edits together if there are several, then those of the first."""
    if len(candidates) > 1:
        yield list(dict.fromkeys(edit for edits in candidates for edit in edits))
    yield from candidates[:1]


@fixes("post_ln")
def pre_norm(site: Site) -> Iterator[Edits]:
    """Move the norms behind the residual sums to the inputs of the branches."""
    found = [
        edits
        for place in site.everywhere
        for statement in _statements(place)
        if (edits := _post_to_pre(place, statement))
    ]
    yield from _all_then_first(found or list(_post_norms(site)))


def _post_norms(site: Site) -> Iterator[Edits]:
    """Yield the edits for every function of the user's, where the finding's line only calls it."""
    for source, function in site.every(ast.FunctionDef):
        place = _site_at(site, source, function.body[0])
        for statement in _statements(place):
            if edits := _post_to_pre(place, statement):
                yield edits


def _site_at(site: Site, source: Source, statement: ast.stmt) -> Site:
    """Return the finding as if it were at another statement."""
    finding = replace(site.finding, file=source.file, line=statement.lineno)
    return replace(site, finding=finding)


@fixes("post_ln")
def pre_norm_of_wrapper(site: Site) -> Iterator[Edits]:
    """Change `x = add_norm(x, branch(x))` to `x = add_norm(x, branch(add_norm.norm(x)))`.

    The wrapper, whose code the finding is in, then only adds.
    """
    source, name = site.source, "" if site.cls is None else site.cls.name
    norms = [call for call in site.calls if _is_norm(site, call) and is_sum(call.args[0])]
    held = {
        name_of(target)
        for _, node in site.every(ast.Assign) if called_in(node.value, name)
        for target in node.targets
    }  # fmt: skip
    for norm, stream in itertools.product(norms, (0, 1)):
        edits = source.unwrap(norm, norm.args[0])
        for other, call in site.every(ast.Call):
            statement = other.parent(call, ast.stmt)
            match call.args[stream:] + call.args[:stream]:
                case [ast.Name() as tensor, branch] if own_attribute(call.func) in held:
                    assert statement is not None
                    wrap: Wrap = f"{other.code(call.func)}.{name_of(norm.func)}({{}})".format
                    residual = Residual(statement, call, tensor, branch)
                    edits += _normed_input(_site_at(site, other, statement), residual, wrap) or []
        yield edits


def _post_to_pre(site: Site, statement: ast.stmt) -> Edits | None:
    source = site.source
    for call in source.nodes(ast.Call, statement):
        if not _is_norm(site, call):
            continue
        summed = call.args[0]
        if isinstance(summed, ast.BinOp):
            for residual in _residuals(source, statement):
                moved = _normed_input(site, residual, _wrap(source, call))
                if residual.sum is summed and moved:
                    return [*source.unwrap(call, summed), *moved]
        block = source.block(statement)
        i = block.index(statement)
        if not isinstance(summed, ast.Name) or not i or summed.id not in _stores(block[i - 1]):
            continue
        for residual in _residuals(source, block[i - 1]):
            moved = _normed_input(site, residual, _wrap(source, call), (statement,))
            if moved:
                return [*_without(source, statement, call), *moved]
    return None


def _without(source: Source, statement: ast.stmt, call: ast.Call) -> Edits:
    """Remove a call of a norm, or its statement if it does nothing else."""
    match statement:
        case ast.Assign([ast.Name(name), *_], ast.Call(_, [ast.Name(tensor), *_]) as value):
            if value is call and name == tensor:
                return [removed(source, statement)]
    return source.unwrap(call, call.args[0])


@fixes("post_ln")
def norm_first(site: Site) -> Iterator[Edits]:
    """Set `norm_first` of torch's own layers."""
    for source in site.sources.values():
        layers = [c for c in source.nodes(ast.Call) if re.match("Transformer.*Layer", called(c))]
        if layers:
            yield [source.set_keyword(call, "norm_first", "True") for call in layers]


@fixes("norm_on_output")
def norm_on_input(site: Site) -> Iterator[Edits]:
    """Move the norms of the branches from their outputs to their inputs."""
    found = [e for statement in _statements(site) if (e := _output_to_input(site, statement))]
    yield from _all_then_first(found)


def _output_to_input(site: Site, statement: ast.stmt) -> Edits | None:
    source = site.source
    block = source.block(statement)
    for call in source.nodes(ast.Call, statement):
        if not _is_norm(site, call) or isinstance(call.args[0], ast.BinOp):
            continue
        dropped = _without(source, statement, call)
        alone = (statement,) if len(dropped) == 1 else ()
        for later in block[block.index(statement) :]:
            for residual in _residuals(source, later):
                if later is statement and call not in set(ast.walk(residual.branch)):
                    continue
                if moved := _normed_input(site, residual, _wrap(source, call), alone):
                    return [*dropped, *moved]
            if _residuals(source, later):
                break
        inner = call.args[0]
        if isinstance(inner, ast.Call) and inner.args and isinstance(inner.args[0], ast.Name):
            tensor = inner.args[0]
            normed = source.replace(tensor, _wrap(source, call)(tensor.id))
            return [*source.unwrap(call, inner), normed]
    return None


@fixes("extra_ln")
def norm_of_branches(site: Site) -> Iterator[Edits]:
    """Start the residual connections before the norms: the first norm then is not an extra one."""
    yield from residual_before_norm(site)


@fixes("extra_ln")
def norm_after_loop(site: Site) -> Iterator[Edits]:
    """Move a norm from the end of the loop over the blocks to the line after it."""
    source, statement = site.source, site.statement
    loop = source.parents.get(statement)
    if (
        isinstance(loop, ast.For)
        and len(loop.body) > 1
        and statement is loop.body[-1]
        and any(_is_norm(site, call) for call in site.calls)
        and statement.lineno == statement.end_lineno
        and source.text[: source.span(statement)[0]].rpartition("\n")[2].isspace()
    ):
        yield [source.remove(statement), source.insert_after(loop, source.code(statement))]


@fixes("extra_ln")
def removed_norm(site: Site) -> Iterator[Edits]:
    """Remove the call of a norm, and the module that is then not used."""
    source = site.source
    for call in site.calls:
        if _is_norm(site, call):
            edits = _without(source, site.statement, call)
            yield [*edits, *_unused_norm(site, call)]
            yield edits


def _unused_norm(site: Site, call: ast.Call) -> Edits:
    """Return the removal of the module that only this call uses."""
    source = site.source
    edits = unused(site, [call.func])
    if edits or not isinstance(call.func, ast.Attribute):
        return edits
    name = call.func.attr
    if sum(node.attr == name for node in source.nodes(ast.Attribute)) == 1:
        for built in source.nodes(ast.Call):
            edits += [source.remove_argument(built, k) for k in built.keywords if k.arg == name]
    return edits


@fixes("extra_ln")
def removed_norm_module(site: Site) -> Iterator[Edits]:
    """Remove a norm from a Sequential, or the last norm of torch's own encoder."""
    for source in sorted(site.sources.values(), key=lambda source: source is not site.source):
        for call in source.nodes(ast.Call):
            items: list[ast.expr | ast.keyword] = []
            if called(call) == "Sequential":
                items = [a for a in call.args
                         if isinstance(a, ast.Call) and _is_norm_class(called(a))]  # fmt: skip
            elif called(call).startswith("Transformer"):
                items = [k for k in call.keywords if k.arg == "norm"]
            yield from ([source.remove_argument(call, item)] for item in items)


@fixes("missing_ln")
def added_norm(site: Site) -> Iterator[Edits]:
    """Apply a norm to the input of a branch: an unused one of the class, or a new one."""
    if site.cls is None or site.finding.tap is None:
        return
    source, first = site.source, site.finding.tap.endswith("ln_1")
    block = source.block(site.statement)
    sums = [r for s in block[block.index(site.statement) :] for r in _residuals(source, s)][:2]
    for name in _unused_norms(site, site.cls):
        wrap = _norm_like(site, name)
        for residual in sums:
            if edits := _normed_input(site, residual, wrap):
                yield edits
    init = constructor(site.cls)
    if init is None:
        return
    for name, statement, new in _new_norms(site, init, first):
        place = (
            source.insert_before(statement, new) if first else source.insert_after(statement, new)
        )
        for residual in sums:
            if edits := _normed_input(site, residual, _norm_like(site, name)):
                yield [place, *edits]


@fixes("shared_parameters")
def second_norm(site: Site) -> Iterator[Edits]:
    """Call another norm where a block calls one a second time: an unused one, or a new one."""
    source, cls = site.source, site.cls
    init = None if cls is None else constructor(cls)
    if cls is None or init is None:
        return
    for norm in [call.func for call in site.calls if _is_norm(site, call)]:
        if not is_self(norm):
            continue
        for name in _unused_norms(site, cls):
            yield [source.replace(norm, f"self.{name}")]
        for value in self_assignments(init, norm.attr):
            if statement := source.parent(value, ast.stmt):
                new = f"self.{norm.attr}_2"
                built = source.insert_after(statement, f"{new} = {source.code(value)}")
                yield [built, source.replace(norm, new)]


@fixes("missing_ln")
def norm_of_wrapper(site: Site) -> Iterator[Edits]:
    """Apply the unused norm of a class that wraps the branches."""
    source = site.source
    for cls in source.nodes(ast.ClassDef):
        names = [] if cls is site.cls else _unused_norms(site, cls)
        for name in names:
            for statement in source.nodes(ast.Return, cls):
                residuals = _residuals(source, statement)
                for residual in residuals:
                    if edits := _normed_input(site, residual, _of_self(name)):
                        yield edits
                value = statement.value
                if not residuals and isinstance(value, ast.Call) and value.args:
                    tensor = value.args[0]
                    yield [source.replace(tensor, f"self.{name}({source.code(tensor)})")]


def _norm_like(site: Site, name: str) -> Wrap:
    """Return the code of a norm of this name, applied like another one in the function."""
    for call in site.source.nodes(ast.Call, site.function):
        if _is_norm(site, call) and isinstance(call.func, (ast.Attribute, ast.Subscript)):
            owner: ast.expr = call.func
            while isinstance(owner, ast.Subscript):
                owner = owner.value
            if isinstance(owner, ast.Attribute):
                end = site.source.span(owner)[1]
                code, rest = (
                    site.source.code(owner),
                    site.source.text[end : site.source.span(call.func)[1]],
                )
                func = code[: len(code) - len(owner.attr)] + name + rest
                return lambda tensor: f"{func}({tensor})"
    return _of_self(name)


def _of_self(name: str) -> Wrap:
    return lambda tensor: f"self.{name}({tensor})"


def _unused_norms(site: Site, cls: ast.ClassDef) -> list[str]:
    """Return the attributes and keys of norms that a class builds and nothing reads."""
    within = set(ast.walk(cls))
    every = {
        node.attr
        for source, node in site.every(ast.Attribute)
        if isinstance(node.ctx, ast.Load) and (node in within or not is_self(node))
    }
    return [name for name, call in _norm_modules(site).items()
            if call in within and name not in every]  # fmt: skip


def _new_norms(
    site: Site, init: ast.FunctionDef, first: bool
) -> Iterator[tuple[str, ast.stmt, str]]:
    """Yield the name of a new norm, the statement beside it, and the statement that builds it."""
    source = site.source
    own = []
    for statement in init.body:
        match statement:
            case ast.Assign([ast.Attribute(attr=old), *_], value):
                own.append(statement)
                if old in _norm_modules(site):
                    name = _sibling(old, first)
                    yield name, statement, f"self.{name} = {source.code(value)}"
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
    local = {node.id for node in ast.walk(init) if isinstance(node, ast.Name)
             and isinstance(node.ctx, ast.Store)}  # fmt: skip
    module = [statement for source in _same_module(site) for statement in source.tree.body]
    known |= local | {s.name for s in module if isinstance(s, ast.ClassDef)}
    known |= {t.id for s in module if isinstance(s, ast.Assign)
              for t in s.targets if isinstance(t, ast.Name)}  # fmt: skip
    own = {n.attr for n in ast.walk(init) if isinstance(n, ast.Attribute)
           and isinstance(n.ctx, ast.Store)}  # fmt: skip

    def is_known(node: ast.AST) -> bool:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        attributes = {name_of(n) for n in ast.walk(node) if is_self(n)}
        return names <= known and attributes <= own

    seen: set[str] = set()
    norms = list(_norm_modules(site).values())
    for call in norms:
        code = ast.unparse(call)
        written = [s.code(call) for s in site.sources.values() if call in set(ast.walk(s.tree))]
        if is_known(call) and code not in seen:
            seen.add(code)
            yield written[0]
    torchs = site.torch("torch.nn.LayerNorm")  # for where the user's own takes other arguments
    classes = [*sorted({ast.unparse(call.func) for call in norms} - {torchs}), torchs]
    widths = [
        site.source.code(call.args[place])
        for call in site.source.nodes(ast.Call, init)
        if (place := {"Linear": 0, "Embedding": 1}.get(called(call))) is not None
        and len(call.args) > place and is_known(call.args[place])
    ]  # fmt: skip
    for width in widths or hyperparameters(site, site.source, init, "n_embd"):
        for cls in classes:
            new = f"{cls}({width})"
            if new not in seen:
                seen.add(new)
                yield new


def _same_module(site: Site) -> list[Source]:
    """Return the source of the finding's line, and the other cells if it is one of a notebook."""
    own = str(site.finding.file).partition("#")[0]
    return [source for file, source in site.sources.items() if file.partition("#")[0] == own]


@fixes("no_final_ln")
def final_norm(site: Site) -> Iterator[Edits]:
    """Apply a norm before the head: an unused one of the class, or a new one."""
    for other in site.everywhere[1:]:  # in a method that the finding's line calls
        yield from final_norm(replace(other, finding=replace(other.finding, also=[])))
    if site.cls is None or (init := constructor(site.cls)) is None:
        # A class without a constructor inherits its modules.
        for name in _unused_norms(site, site.cls) if site.cls else ():
            yield from _before_head(site, _held(site, name))
        return
    for name in _unused_norms(site, site.cls):
        for edits in _before_head(site, _held(site, name)):
            yield edits
    if not _unused_norms(site, site.cls):
        name = _final_name(site)
        for new in _constructors(site, init):
            place = _beside_head(site, init, f"self.{name} = {new}")
            for edits in _before_head(site, f"self.{name}"):
                yield [place, *edits]


def _held(site: Site, name: str) -> str:
    """Return how the class reaches a module of its own, or one in a ModuleDict."""
    assert site.cls is not None
    for statement in site.source.nodes(ast.Assign, site.cls):
        target = statement.targets[0]
        if not isinstance(target, ast.Attribute):
            continue
        if target.attr == name:
            break
        if _norm_modules(site)[name] in set(ast.walk(statement)):
            keyed = site.source.nodes(ast.Subscript, site.cls)
            owners = [s.value.attr for s in keyed if isinstance(s.value, ast.Attribute)]
            if target.attr in owners:
                return f"self.{target.attr}[{site.source.quoted(name)}]"
            return f"self.{target.attr}.{name}"
    return f"self.{name}"


def _before_head(site: Site, norm: str) -> Iterator[Edits]:
    """Apply a norm to the tensor that the finding's line passes to the head."""
    source, statement = site.source, site.statement
    if site.function is None:
        return
    local = {a.arg for a in site.function.args.args} | _stores(site.function)
    tensors = [n for n in source.nodes(ast.Name, statement) if n.id in local - {"self"}
               and n in _loads(source, statement, n.id)]  # fmt: skip
    for node in tensors:
        new = source.insert_before(_outermost(site), f"{node.id} = {norm}({node.id})")
        inline = source.replace(node, f"{norm}({node.id})")
        nested = _outermost(site) is not statement or isinstance(
            source.parents[node], ast.Subscript
        )
        if nested or isinstance(statement, ast.Assign):
            yield [new]
            yield [inline]
        else:
            yield [inline]
            yield [new]
    calls = [c for c in site.calls if c.args and isinstance(c.args[0], (ast.Call, ast.Subscript))]
    for call in calls:
        yield [source.replace(call.args[0], f"{norm}({source.code(call.args[0])})")]


def _outermost(site: Site) -> ast.stmt:
    """Return the statement of the function's body that the finding's line is in."""
    assert site.function is not None
    return next(s for s in site.function.body if site.statement in set(ast.walk(s)))


def _final_name(site: Site) -> str:
    """Return a name for the final norm in the style of the others."""
    styles = (("ln", "ln_f"), ("layernorm", "final_layernorm"), ("layer_norm", "final_layer_norm"),
              ("norm", "norm"))  # fmt: skip
    for name in _norm_modules(site):
        for start, new in styles:
            if start in name.lower():
                return new
    return "ln_f"


def _beside_head(site: Site, init: ast.FunctionDef, new: str) -> Edit:
    """Insert a statement before the one that builds the head, or after the blocks."""
    read = {n.attr for n in site.source.nodes(ast.Attribute, site.statement)}
    built = [s for s in init.body if isinstance(s, ast.Assign)]
    for statement in built:
        held = isinstance(statement.targets[0], ast.Attribute)
        if held and name_of(statement.targets[0]) in read and called_in(statement, "Linear"):
            return site.source.insert_before(statement, new)
    blocks = [s for s in built if any(called_in(s, name) for name in BODY)]
    return site.source.insert_after((blocks or built or init.body)[-1], new)


def called_in(node: ast.AST, name: str) -> bool:
    """Return whether a call of this name is in the node."""
    return any(isinstance(n, ast.Call) and called(n) == name for n in ast.walk(node))


# Residual connections.


@fixes("missing_residual")
def added_residual(site: Site) -> Iterator[Edits]:
    """Add the input of a branch to its output."""
    source = site.source
    if site.function is None:
        return
    block = source.block(site.statement)
    start = block.index(site.statement)
    for statement in _branch_end(source, block, start):
        value = getattr(statement, "value", None)
        if not isinstance(statement, (ast.Assign, ast.Return)) or not isinstance(value, ast.expr):
            continue
        if isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name):
            continue
        for name in _streams(site, block[:start], statement):
            left = f"{name} + {source.code(value)}"
            right = f"{source.code(value)} + {name}"
            last = is_sum(value) or _stream_last(site)  # a sum with a bias
            yield [source.replace(value, right if last else left)]
    yield from _saved_residual(site, block, start)


def _branch_end(source: Source, block: list[ast.stmt], start: int) -> list[ast.stmt]:
    """Yield statements with which a branch may end, the last first: its call, dropout, a copy."""
    found = [block[start]]
    for i in range(start + 1, len(block)):
        value = getattr(block[i], "value", None)
        names = _stores(found[-1])
        dropout = isinstance(value, ast.Call) and "drop" in ast.unparse(value.func).lower()
        read = (
            {n.id for n in source.nodes(ast.Name, value)} if isinstance(value, ast.expr) else set()
        )
        copied = isinstance(value, ast.Name) and not any(
            _loads(source, later, value.id) for later in block[i + 1 :]
        )
        if not names & read or not (dropout or copied):
            break
        if copied and isinstance(block[i], ast.Return):
            break
        found.append(block[i])
    return found[::-1]


def _streams(site: Site, before: list[ast.stmt], statement: ast.stmt) -> list[str]:
    """Return the names that may hold the residual stream, the likeliest first."""
    source = site.source
    assert site.function is not None
    copies = [s.targets[0].id for s in before if isinstance(s, ast.Assign)
              and isinstance(s.targets[0], ast.Name) and isinstance(s.value, ast.Name)]  # fmt: skip
    idle = [name for name in reversed(copies) if not _loads(source, statement, name)]
    read = [n.id for n in source.nodes(ast.Name, statement) if n in _loads(source, statement, n.id)]
    written = [name for s in reversed(before) for name in sorted(_stores(s))]
    parameters = [a.arg for a in site.function.args.args if a.arg != "self"]
    local = {*parameters, *_stores(site.function)}
    target = [n for n in _stores(statement) & local if n not in read]  # x = dropout(y)
    every = dict.fromkeys([*idle, *target, *(n for n in read if n in local), *written, *parameters])
    return list(every)[:4]


def _stream_last(site: Site) -> bool:
    """Return whether the function writes its other sums as `branch + x`."""
    sums = [s for s in _statements(site) if _residuals(site.source, s)]
    found = [_residuals(site.source, s)[0] for s in sums]
    return any(isinstance(r.sum, ast.BinOp) and r.sum.right is r.stream for r in found)


@fixes("doubled_residual")
def without_second_sum(site: Site) -> Iterator[Edits]:
    """Remove the second sum, or the assignment in place before it."""
    yield [site.source.remove(site.statement)]
    before = [s for s in _statements(site) if s.lineno < site.line and isinstance(s, ast.AugAssign)]
    for statement in reversed(before):
        code = site.source.code(statement.value)
        target = site.source.code(statement.target)
        yield [site.source.replace(statement, f"{target} = {code}")]


def _saved_residual(site: Site, block: list[ast.stmt], start: int) -> Iterator[Edits]:
    """Save the stream before a branch that overwrites it, and add it behind the branch."""
    source, statement = site.source, site.statement
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return
    name = statement.targets[0].id
    names = [s.targets[0].id for s in _statements(site) if isinstance(s, ast.Assign)
             and isinstance(s.targets[0], ast.Name) and isinstance(s.value, ast.Name)]  # fmt: skip
    saved = names[0] if names else site.new_name("residual", "shortcut")
    first = start
    while (
        first and _stores(block[first - 1]) == {name} and not _residuals(source, block[first - 1])
    ):
        first -= 1
    last = start
    while last + 1 < len(block) and _stores(block[last + 1]) == {name}:
        if any(_is_norm(site, call) for call in source.nodes(ast.Call, block[last + 1])):
            break
        last += 1
    for begin in range(first, start + 1):
        end = block[last]
        if isinstance(end, ast.Assign):
            added = source.replace(end.value, f"{saved} + {source.code(end.value)}")
            yield [source.insert_before(block[begin], f"{saved} = {name}"), added]


@fixes("missing_residual")
def residual_wrapper(site: Site) -> Iterator[Edits]:
    """Put a module into the user's wrapper that adds the input to the output."""
    for source, wrapper in site.every(ast.ClassDef):
        if not re.search("resid", wrapper.name, re.I):
            continue
        wrapped = [c for c in source.nodes(ast.Call) if called(c) == wrapper.name and c.args]
        names = {called(c.args[0]) for c in wrapped if isinstance(c.args[0], ast.Call)}
        for call in source.nodes(ast.Call):
            above = source.parents[call]
            inside = isinstance(above, ast.Call) and called(above) == wrapper.name
            if called(call) in names and not inside:
                yield [source.replace(call, f"{wrapper.name}({source.code(call)})")]


@fixes("missing_residual")
def residual_inside(site: Site) -> Iterator[Edits]:
    """Add the result of a branch that is part of the next one: `x + mlp(attn(x))`.

    Its sum with the stream may be written there: `x + mlp(x + attn(x))`.
    """
    source, statement = site.source, site.statement
    for residual in _residuals(source, statement):
        name = residual.stream.id
        for total in source.nodes(ast.BinOp, residual.branch):
            if is_sum(total) and name in (name_of(total.left), name_of(total.right)):
                first = source.insert_before(statement, f"{name} = {source.code(total)}")
                yield [first, source.replace_group(total, name)]
        for outer in source.nodes(ast.Call, residual.sum):
            for inner in outer.args:
                if isinstance(inner, ast.Call) and _loads(source, inner, name):
                    new = f"{name} = {name} + {source.code(inner)}"
                    yield [source.insert_before(statement, new), source.replace(inner, name)]


@fixes("missing_residual")
def residual_from_attention(site: Site) -> Iterator[Edits]:
    """Add the MLP to the sum that includes attention instead of the input of the block."""
    source = site.source
    block = source.block(site.statement)
    for statement in block[block.index(site.statement) :]:
        for residual in _residuals(source, statement):
            read = [name for s in block[: block.index(statement)] for name in _stores(s)]
            for name in reversed(read):
                if name != residual.stream.id:
                    yield [source.replace(residual.stream, name)]


@fixes("residual_from_norm")
def residual_before_norm(site: Site) -> Iterator[Edits]:
    """Start the residual connections before the norms."""
    found: list[Edits] = []
    for statement in _statements(site):
        for residual in _residuals(site.source, statement):
            if edits := _from_before_norm(site, residual):
                found.append(edits)
                break
        else:
            found += _normed_operand(site, statement)
    yield from _all_then_first(found)


@fixes("residual_from_norm", "doubled_residual")
def branch_without_its_input(site: Site) -> Iterator[Edits]:
    """Let a branch return its result without its own input, which the block adds."""
    for node in site.source.nodes(ast.BinOp, site.statement):
        if is_sum(node):
            yield from (site.source.unwrap(node, part) for part in (node.right, node.left))


def _normed_operand(site: Site, statement: ast.stmt) -> list[Edits]:
    """Remove the norm from `ln(x)` in `ln(x) + branch(ln(x))`."""
    source = site.source
    for node in source.nodes(ast.BinOp, statement):
        for operand in (node.left, node.right) if is_sum(node) else ():
            match operand:
                case ast.Call(_, [ast.Name() as tensor, *_]) if _is_norm(site, operand):
                    return [source.unwrap(operand, tensor)]
    return []


def _from_before_norm(site: Site, residual: Residual) -> Edits | None:
    source, name = site.source, residual.stream.id
    block = source.block(residual.statement)
    end = block.index(residual.statement)
    i = next((i for i in range(end - 1, -1, -1) if name in _stores(block[i])), -1)
    if i < 0 or not isinstance(definition := block[i], ast.Assign):
        return None
    match (block[i - 1] if i else None), definition.value:
        case ((ast.Assign(_, ast.Call() as call) as before), ast.Name(copied) as value):
            if copied not in _stores(before) or not _is_norm(site, call):
                return None
            tensor = call.args[0]
            if not isinstance(tensor, ast.Name) or tensor.id != copied:  # h = ln(x); residual = h
                return [source.replace(value, source.code(tensor))]
            return [  # x = ln(x); residual = x
                source.replace(before, source.code(definition)),
                source.replace(definition, source.code(before)),
            ]
        case _, ast.Call(_, [ast.Name(normed), *_]) as call if _is_norm(site, call):
            if normed != name:  # h = ln(x); x = h + branch(h)
                return [source.replace(residual.stream, normed)]
            moved = _normed_input(site, residual, _wrap(source, call), (definition,))
            return None if moved is None else _merged([removed(source, definition), *moved])
    return None


def _merged(edits: Edits) -> Edits:
    """Return the edits without two that begin at the same place."""
    return list({(edit.start, edit.end): edit for edit in edits}.values())


# Parallel branches.


@fixes("parallel_block")
def sequential_branches(site: Site) -> Iterator[Edits]:
    """Add attention to the stream before the MLP reads it."""
    source, statement = site.source, site.statement
    for later in [statement, *_statements(site)]:
        terms = _terms(source, later)
        streams = [t for t in terms if isinstance(t, ast.Name)]
        if len(terms) != 3:
            continue
        for stream in streams:
            first, last = [t for t in terms if t is not stream]
            for attention, mlp in ((first, last), (last, first)):
                edits = _split_sum(site, later, stream, attention, mlp)
                if edits:
                    yield edits
                if edits := _split_shared(site, later, stream, attention, mlp):
                    yield edits


def _terms(source: Source, statement: ast.stmt) -> list[ast.expr]:
    """Return the terms of the sum that a statement assigns or returns."""
    match statement:
        case ast.AugAssign(ast.Name() as target, _, value):
            return [target, *_flat(value)]
        case ast.Assign() | ast.AnnAssign() | ast.Return() | ast.Expr() | ast.AugAssign():
            return [] if statement.value is None else _flat(statement.value)
    return []


def _flat(node: ast.expr) -> list[ast.expr]:
    return [*_flat(node.left), *_flat(node.right)] if is_sum(node) else [node]


def _split_sum(
    site: Site, statement: ast.stmt, stream: ast.Name, attention: ast.expr, mlp: ast.expr
) -> Edits | None:
    """Add attention to the stream in a statement of its own, before the MLP."""
    source, x = site.source, stream.id
    block = source.block(statement)
    place, needed = statement, {n.id for n in source.nodes(ast.Name, mlp)}
    if not _loads(source, mlp, x):
        for other in reversed(block[: block.index(statement)]):
            if _stores(other) & needed:
                needed |= {n.id for n in source.nodes(ast.Name, other)}
                place = other if _loads(source, other, x) else place
    known = set().union(*(_stores(s) for s in block[block.index(place) :]))
    if place is not statement and known & {n.id for n in source.nodes(ast.Name, attention)} - {x}:
        return None  # attention is computed later
    last = source.span(stream)[0] > source.span(attention)[0]
    sums = [f"{source.code(a)} + {x}" if last else f"{x} + {source.code(a)}"
            for a in (attention, mlp)]  # fmt: skip
    if isinstance(statement, ast.AugAssign):
        lines = [f"{x} += {source.code(attention)}", f"{x} += {source.code(mlp)}"]
        return [source.insert_before(place, lines[0]), source.replace(statement, lines[1])]
    value = getattr(statement, "value")  # noqa: B009
    return [source.insert_before(place, f"{x} = {sums[0]}"), source.replace(value, sums[1])]


def _split_shared(
    site: Site, statement: ast.stmt, stream: ast.Name, attention: ast.expr, mlp: ast.expr
) -> Edits | None:
    """Split the sum of branches that read one norm, which is applied once more for the MLP."""
    source, x = site.source, stream.id
    block, dropped = source.block(statement), []
    if isinstance(mlp, ast.Name):  # m = mlp(h); return x + a + m
        made = _assignment_before(source, statement, mlp.id)
        if made is None or made not in block:
            return None
        mlp, dropped = made.value, [source.remove(made)]
    if (normed := _normed_again(site, statement, mlp, x)) is None:
        return None
    code, last = source.code(attention), source.span(stream)[0] > source.span(attention)[0]
    if isinstance(statement, ast.AugAssign):
        total, value = f"{x} += {code}", normed
    else:
        total = f"{x} = {code} + {x}" if last else f"{x} = {x} + {code}"
        value = f"{normed} + {x}" if last else f"{x} + {normed}"
    replaced = source.replace(getattr(statement, "value"), value)  # noqa: B009
    return [*dropped, source.insert_before(statement, total), replaced]


def _assignment_before(source: Source, statement: ast.stmt, name: str) -> ast.Assign | None:
    """Return the last assignment of a variable in a statement's block before the statement."""
    block = source.block(statement)
    for before in reversed(block[: block.index(statement)]):
        if name in _stores(before):
            return before if isinstance(before, ast.Assign) and len(_stores(before)) == 1 else None
    return None


def _normed_again(site: Site, statement: ast.stmt, branch: ast.expr, x: str) -> str | None:
    """Return the code of a branch that reads `h` of `h = norm(x)`, with the norm for `h`."""
    source = site.source
    for node in source.nodes(ast.Name, branch):
        made = _assignment_before(source, statement, node.id)
        match made.value if made is not None else None:
            case ast.Call(_, [ast.Name(read), *_]) as norm if read == x and _is_norm(site, norm):
                (start, end), (first, last) = source.span(branch), source.span(node)
                return source.text[start:first] + source.code(norm) + source.text[last:end]
    return None


@fixes("parallel_block")
def mlp_after_attention(site: Site) -> Iterator[Edits]:
    """Let the MLP read the sum that includes attention."""
    source = site.source
    found = [s for s in reversed(sorted(_statements(site), key=lambda s: s.lineno))]
    for statement in found:
        for residual in _residuals(source, statement):
            block = source.block(statement)
            for other in block[: block.index(statement)]:
                for first in _residuals(source, other):
                    old, new = first.stream.id, sorted(_stores(other))
                    uses = [
                        n for s in block[block.index(other) + 1 : block.index(statement) + 1]
                        for n in _loads(source, s, old) if n is not residual.stream
                    ]  # fmt: skip
                    yield from _moved_behind(source, block, other, old)
                    normed = _normed_again(site, statement, residual.branch, old)
                    if normed is not None and new == [old]:
                        yield [source.replace(residual.branch, normed)]
                    if uses and new and new[0] != old:
                        yield [source.replace(node, new[0]) for node in uses]
                        yield [source.replace(uses[0], new[0])]


@fixes("parallel_block")
def attention_added_first(site: Site) -> Iterator[Edits]:
    """Add attention to the stream before the statements that compute the MLP from it."""
    source = site.source
    for last in _statements(site):
        block = source.block(last)
        for stream, rest in _with_rest(_terms(source, last)):
            if len(rest) == 2:  # out = x + attention + mlp
                for attention, mlp in (rest, rest[::-1]):
                    if edits := _summed_first(site, last, None, stream, attention, mlp):
                        yield edits
            before = reversed(block[: block.index(last)])
            total = next((s for s in before if stream.id in _stores(s)), None)
            if len(rest) != 1 or total is None or len(_stores(total)) != 1:
                continue
            for x, others in _with_rest(_terms(source, total)):  # h = x + attention; out = h + mlp
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
    source, block = site.source, site.source.block(last)
    before = block[: block.index(last)]
    names = {stream.id}  # of the tensor to which attention is added
    if (made := _assignment_before(source, last, stream.id)) is not None:
        names |= {copied} if (copied := _copied(made, stream.id)) is not None else set()
    kept, derived, moved = _computing(source, before, attention), set(names), list[ast.stmt]()
    for node in _computing(source, before, mlp):
        from_stream = any(_loads(source, node, name) for name in derived)
        if from_stream and node not in kept and node is not first:
            moved.append(node)
            derived |= _stores(node)
    read = [node for s in [*moved, mlp] for name in names for node in _loads(source, s, name)]
    if not read or any(hasattr(node, "body") for node in moved):
        return None
    total = stream.id if first is None else min(_stores(first))

    def summed(node: ast.AST) -> str:
        """Return a node's code with the sum in place of the stream, and the comment after it."""
        start, end = source.span(node)
        if isinstance(node, ast.stmt):
            end = source.text.find("\n", end)
        within = [n for n in read if n in set(ast.walk(node))]
        renamed = (Edit("", a - start, b - start, total) for a, b in map(source.span, within))
        return apply(source.text[start:end], renamed)

    dropped, lines = [source.remove(s) for s in moved], [summed(s) for s in moved]
    if first is not None:
        place = source.insert_after(first, *lines)
        return [*dropped, place, source.replace(mlp, summed(mlp))]
    if isinstance(last, ast.AugAssign):
        sums = [f"{total} += {source.code(attention)}", f"{total} += {summed(mlp)}"]
        return [
            *dropped,
            source.insert_before(last, sums[0], *lines),
            source.replace(last, sums[1]),
        ]
    after = source.span(stream)[0] > min(source.span(t)[0] for t in (attention, mlp))
    sums = [f"{branch} + {total}" if after else f"{total} + {branch}"
            for branch in (source.code(attention), summed(mlp))]  # fmt: skip
    place = source.insert_before(last, f"{total} = {sums[0]}", *lines)
    return [*dropped, place, source.replace(getattr(last, "value"), sums[1])]  # noqa: B009


def _computing(source: Source, before: list[ast.stmt], branch: ast.expr) -> list[ast.stmt]:
    """Return the statements of a block that a branch is computed by."""
    needed = {node.id for node in source.nodes(ast.Name, branch)}
    found = []
    for statement in reversed(before):
        if _stores(statement) & needed:
            found.append(statement)
            if not isinstance(statement, ast.AugAssign):
                needed -= _stores(statement)
            names = source.nodes(ast.Name, statement)
            needed |= {node.id for node in names if isinstance(node.ctx, ast.Load)}
    return found[::-1]


def _moved_behind(
    source: Source, block: list[ast.stmt], total: ast.stmt, stream: str
) -> Iterator[Edits]:
    """Move a statement that reads the stream, such as `h = ln_2(x)`, behind a sum."""
    for statement in block[: block.index(total)]:
        unread = not any(_loads(source, total, name) for name in _stores(statement))
        if _loads(source, statement, stream) and unread and isinstance(statement, ast.Assign):
            lines = source.code(statement)
            yield [source.remove(statement), source.insert_after(total, lines)]
