"""Fixes of how modules are kept and of parts that GPT-2 does not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Literal

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import Site, fixes
from compat.adaptation.repair.formulas import only
from compat.adaptation.repair.held import held, reads, unread
from compat.adaptation.repair.source import ancestors, code_of, enclosing, find, source_of
from compat.adaptation.repair.syntax import (
    called,
    constant,
    is_self,
    is_size,
    is_sum,
    last_name,
    name_of,
    own_attribute,
    sides,
)
from compat.adaptation.repair.values import operand, settings

# The modules of torch with this argument.
DECODER = "TransformerDecoder"
BATCH_FIRST = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer")
# Options that name a part of another architecture, and what their names may be for GPT-2's.
OTHER_OPTION = re.compile("glu|gate|rope|rotary|alibi|rms|sinus")
# The functions of torch that draw random numbers in the shape that they are passed.
RANDOM = ("randn", "rand", "randn_like", "rand_like")
# Names of norms of q and k.
NORM = re.compile(r"norm|(?<![a-z])ln|ln$")
USUAL_OPTIONS = ("gelu", "learned", "layernorm")


@fixes("plain_list")
def module_list(site: Site) -> Iterator[Edits]:
    """Change `self.blocks = [...]` to `self.blocks = nn.ModuleList([...])`."""
    name = str(site.values["name"])
    for node in find(ast.Assign, site.tree):
        stored = any(isinstance(t, ast.Attribute) and t.attr == name for t in node.targets)
        if stored and node.lineno <= site.line <= (node.end_lineno or 0):
            kind = "ModuleDict" if site.values["kind"] == "dict" else "ModuleList"
            module, inner = site.torch(f"torch.nn.{kind}"), node.value
            if isinstance(inner, ast.Call) and called(inner) in ("list", "tuple"):
                inner = inner.args[0]
            yield [Edit.replace(node.value, f"{module}({code_of(inner)})")]


@fixes("batch_first")
def batch_first(site: Site) -> Iterator[Edits]:
    """Pass `batch_first=True` to the torch module, and read the length off the axis of tokens."""
    for call in site.calls:
        if called(call) in BATCH_FIRST:
            passed = Edit.set_keyword(call, "batch_first", "True")
            yield [passed]
            sizes = filter(is_size, find(ast.expr, site.cls_or_none or site.tree))
            axes = [axis for axis in map(_axis, sizes) if axis and constant(axis) == 0]
            if axes:
                yield [passed, *(Edit.replace(axis, "1") for axis in axes)]


def _axis(size: ast.expr) -> ast.expr | None:
    """Return the number of the axis in `x.shape[0]` or `x.size(0)`."""
    if isinstance(size, ast.Subscript):
        return size.slice
    return size.args[0] if isinstance(size, ast.Call) and size.args else None


@fixes("shared_parameters")
def separate_blocks(site: Site) -> Iterator[Edits]:
    """Change `[block(dim)] * n`, which repeats a module, to `[block(dim) for _ in range(n)]`."""
    for node in site.every(ast.BinOp):
        for pair in sides(node) if isinstance(node.op, ast.Mult) else ():
            match pair:
                case ast.List([ast.Call() as built]), count:
                    loop = f"for _ in range({code_of(count)})"
                    yield [Edit.replace_group(node, f"[{code_of(built)} {loop}]")]


@fixes("low_precision")
def full_precision(site: Site) -> Iterator[Edits]:
    """Turn autocast off around the line, or remove the cast to half precision."""
    for above in ancestors(site.statement):
        for item in above.items if isinstance(above, ast.With) else ():
            call = item.context_expr
            if isinstance(call, ast.Call) and called(call) == "autocast":
                yield [Edit.set_keyword(call, "enabled", "False")]
    for call in site.calls:
        half = {name_of(a) for a in [*call.args, *(k.value for k in call.keywords)]}
        if isinstance(call.func, ast.Attribute) and (
            called(call) in ("half", "bfloat16") or half & {"float16", "bfloat16", "half"}
        ):
            yield Edit.unwrap(call, call.func.value)


@fixes("cross_attention")
def encoder_of_torch(site: Site) -> Iterator[Edits]:
    """Build torch's encoder in place of its decoder, which is the same without cross-attention."""
    edits: Edits = []
    for source in site.sources.values():
        built = [c for c in find(ast.Call, source.tree) if called(c).startswith(DECODER)]
        for call in built:
            encoder = code_of(call.func).replace(DECODER, "TransformerEncoder")
            edits.append(Edit.replace(call.func, encoder))
            if called(call) == DECODER:  # without a warning for layers with norm_first
                edits.append(Edit.set_keyword(call, "enable_nested_tensor", "False"))
        layers = {name for call in built for name in _names_of(call)}
        stacks = {name for c in built if called(c) == DECODER for name in _names_of(c)}
        for call in find(ast.Call, source.tree):
            name = own_attribute(call.func)
            if name in layers or any(k.arg in ("tgt_mask", "memory") for k in call.keywords):
                edits.append(Edit.replace(call, _encoder_call(call, name not in stacks)))
    yield edits


def _names_of(built: ast.Call) -> set[str]:
    """Return the attributes of `self` that a call's value is stored in."""
    statement = enclosing(built, ast.Assign)
    return {target.attr for target in statement.targets if is_self(target)} if statement else set()


def _encoder_call(call: ast.Call, is_layer: bool) -> str:
    """Return a call of torch's decoder, or of one of its layers, as one of the encoder."""
    mask = "src_mask" if is_layer else "mask"
    order = ("src", "memory", mask, "memory_mask", "src_key_padding_mask")
    names = {"tgt": "src", "tgt_mask": mask, "tgt_key_padding_mask": "src_key_padding_mask",
             "tgt_is_causal": "is_causal"}  # fmt: skip
    arguments = [(order[i], argument) for i, argument in enumerate(call.args[: len(order)])]
    arguments += [(names.get(k.arg, k.arg), k.value) for k in call.keywords if k.arg]
    texts = [
        code_of(value) if name == "src" else f"{name}={code_of(value)}"
        for name, value in arguments if not name.startswith("memory")
    ]  # fmt: skip
    return f"{code_of(call.func)}({', '.join(texts)})"


@fixes("extra_projection")
def without_projection(site: Site) -> Iterator[Edits]:
    """Remove the statement, or replace the call by its argument."""
    statement = site.statement
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        yield [Edit.remove(statement)]
    for call in site.calls:
        if len(call.args) == 1:
            yield [Edit.replace(call, code_of(call.args[0]))]


@fixes("random_in_forward")
def without_new_module(site: Site) -> Iterator[Edits]:
    """Remove a module that `forward` creates: `nn.Linear(C, C)(x)` becomes `x`."""
    for call in site.calls:
        if isinstance(call.func, ast.Call) and len(call.args) == 1:
            yield [Edit.replace(call, code_of(call.args[0]))]


@fixes("random_in_forward")
def without_noise(site: Site) -> Iterator[Edits]:
    """Remove random numbers that are added, or put zeros in their place."""
    for call in site.calls:
        if called(call) not in RANDOM:
            continue
        for node in ancestors(call):
            if is_sum(node):
                kept = node.left if call in set(ast.walk(node.right)) else node.right
                yield only(node, kept)
        if isinstance(site.statement, ast.AugAssign):
            yield [Edit.remove(site.statement)]
        name = "zeros_like" if called(call).endswith("_like") else "zeros"
        yield [Edit.replace(call.func, site.torch(f"torch.{name}"))]


@fixes("no_mlp", "shared_parameters")
def unused_module(site: Site) -> Iterator[Edits]:
    """Call a module that the class builds and never calls where another one is called again."""
    cls = site.cls
    built = {module.name for module in held(cls)}
    every = reads(cls, *built)
    read = [node.attr for node in every]
    for name in dict.fromkeys(module.name for module in unread(cls)):
        for node in reversed(every):
            if read.count(node.attr) > 1:
                yield [Edit.replace(node, f"self.{name}")]


@fixes("time_shift")
def without_shift(site: Site) -> Iterator[Edits]:
    """Remove the assignment that shifts, or replace the call by the tensor that it shifts."""
    statement = site.statement
    if isinstance(statement, ast.Assign):
        yield [Edit.remove(statement)]
    for call in site.calls:
        if called(call) in ("roll", "pad") and (tensor := operand(site, call)) is not None:
            yield [Edit.replace(call, code_of(tensor))]


@fixes("qk_norm")
def without_normalization(site: Site) -> Iterator[Edits]:
    """Remove the statements that normalize q and k, or replace the calls by their arguments."""
    within = site.within
    yield [
        Edit.remove(node)
        for node in find(ast.Assign, within)
        if _normalizes(node.value) or (node is site.statement and _updates(node))
    ]
    yield [
        Edit.replace(call, code_of(call.args[0]))
        for call in find(ast.Call, within)
        if call.args and NORM.search(called(call).lower())
    ]


def _updates(node: ast.Assign) -> bool:
    """Return whether a statement has the form `q, k = f(q), g(k)`."""
    names = [ast.unparse(target) for target in _items(node.targets[0])]
    calls = [item for item in _items(node.value) if isinstance(item, ast.Call) and item.args]
    return names == [ast.unparse(call.args[0]) for call in calls]


def _normalizes(value: ast.expr) -> bool:
    """Return whether a value, or every item of a tuple, calls something named like a norm."""
    items = _items(value)
    return all(isinstance(item, ast.Call) and NORM.search(called(item).lower()) for item in items)


def _items(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, ast.Tuple) else [value]


@fixes("gated_mlp", "rope", "no_pos", "rmsnorm")
def other_option(site: Site) -> Iterator[Edits]:
    """Choose another option where the code compares a setting with strings or tests a flag."""
    options: dict[str, list[str | Literal[False]]] = {}
    for test in site.every(ast.Compare):
        sides = [test.left, *test.comparators]
        values = [constant(each) for side in sides for each in getattr(side, "elts", [side])]
        strings = [each for each in values if isinstance(each, str)]
        for name in map(last_name, sides) if strings else ():
            options.setdefault(name, []).extend([*strings, *USUAL_OPTIONS])
    tests = [each.test for each in site.every(ast.If)]
    tests += [each.test for each in site.every(ast.IfExp)]
    for name in map(last_name, tests):
        options.setdefault(name, []).append(False)
    for name, others in options.items():
        written = [*settings(site, name)]
        for other in dict.fromkeys(others) if written else ():
            yield [
                Edit.replace(node, "False" if other is False else source_of(node).quoted(other))
                for node in written
                if type(value := constant(node)) is type(other) and value != other
                and OTHER_OPTION.search(f"{name if other is False else value}".lower())
            ]  # fmt: skip
