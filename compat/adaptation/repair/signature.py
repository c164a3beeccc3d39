"""Fixes that change the signature of a constructor, which `--unsafe-fixes` allows.

A position embedding needs the context length, the parameters of a norm its width, and an attention
that is to have several heads their number. Where a constructor has no argument or config entry for
such a size, one is added, and passed by the constructors that build the class. The fixes that keep
signatures are then tried on the new code.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator

from compat.adaptation.repair.edits import Edit, Edits
from compat.adaptation.repair.fixes import FIXES, UNSAFE, Site, fixes, followed
from compat.adaptation.repair.source import enclosing, find, find_calls, source_of, span
from compat.adaptation.repair.syntax import (
    called,
    constant,
    constructor,
    default_of,
    last_name,
    name_of,
    parameters,
    targets,
)
from compat.adaptation.repair.values import calls_of, classes, hyperparameters
from compat.user_models.synonyms import role_of, value_of

# The size that the fixes of a deviation need.
NEEDED = {
    "no_pos": "n_positions",
    "sinusoidal_pos": "n_positions",
    "no_ln_bias": "n_embd",
    "no_ln_weight": "n_embd",
    "no_out_proj": "n_embd",
    "n_head_mismatch": "n_head",
}
# The names of a new argument: among those of Hugging Face's config, and among others.
NAMES = {
    "n_positions": ("n_positions", "context_length"),
    "n_embd": ("n_embd", "emb_dim"),
    "n_head": ("n_head", "n_heads"),
}
HUGGING_FACE = {"n_embd", "n_head", "n_layer", "n_ctx"}


@fixes(*NEEDED, unsafe=True)
def with_new_argument(site: Site) -> Iterator[Edits]:
    """Add the size as an argument, and then repair the model as if it had always been one."""
    role = NEEDED[site.finding.code]
    for cls in _classes(site):
        _, added = _size(site, cls, role) or ("", [])
        for fix in FIXES[site.finding.code] if added else ():
            if fix not in UNSAFE:
                with contextlib.suppress(LookupError):  # as in the search
                    yield from followed(site, added, fix)


def _classes(site: Site) -> list[ast.ClassDef]:
    """Return the classes that may lack the size.

    A table of positions belongs to the class with the token embedding. Other sizes are lacking
    around the finding's lines, or in a class that is named there.
    """
    if NEEDED[site.finding.code] == "n_positions":
        return [cls for cls in site.every(ast.ClassDef) if find_calls("Embedding", within=cls)]
    near = [each.cls for each in site.everywhere if each.cls_or_none]
    named = [each for call in site.calls for each in classes(site, called(call))]
    return list(dict.fromkeys([*near, *named]))


# Where the size is added.


def _size(site: Site, cls: ast.ClassDef, role: str) -> tuple[str, Edits] | None:
    """Return how a constructor can write a size, and the edits for that; None if it cannot."""
    init = constructor(cls)
    if init is not None:
        if known := hyperparameters(site, init, role):
            return known[0], []
        if init.args.vararg or init.args.kwarg:
            return None
        if entry := _config_entry(site, init, role):
            return entry
    callers = [
        (call, above)
        for call in calls_of(site, cls.name)
        if (builder := enclosing(call, ast.FunctionDef)) is not None
        and builder.name == "__init__"
        and (above := enclosing(builder, ast.ClassDef)) is not None and above is not cls
    ]  # fmt: skip
    if not callers:
        return None if init is None else _optional_argument(site, init, role)
    sizes = [_size(site, above, role) for _, above in callers]
    written = [each for each in sizes if each is not None]
    if len(written) < len(callers):
        return None
    name = last_name(ast.parse(written[0][0], mode="eval").body)  # `emb_dim` of `cfg["emb_dim"]`
    edits = [edit for _, passed_on in written for edit in passed_on]
    edits.append(_required_argument(cls, init, name))
    for (call, _), (size, _) in zip(callers, written, strict=True):
        edits.append(_passed(call, init, name, size))
    return name, list(dict.fromkeys(edits))


def _new_name(role: str, known: set[str]) -> str:
    """Return a name for a size, in the style of the known names."""
    hugging_face, other = NAMES[role]
    return hugging_face if known & HUGGING_FACE else other


def _config_entry(site: Site, init: ast.FunctionDef, role: str) -> tuple[str, Edits] | None:
    """Return a new entry of the config that a constructor takes: a field of its class, or a key."""
    names = [name for name in parameters(init) if name != "self"]
    reads = [
        node for node in find(ast.expr, init)
        if isinstance(node, (ast.Attribute, ast.Subscript))
        and name_of(node.value) in names and role_of(last_name(node))
    ]  # fmt: skip
    read = {last_name(node) for node in reads}
    if len(read) < 2:
        return None
    config = name_of(reads[0].value)
    new, value = _new_name(role, read), value_of(role, site.user_config)
    if isinstance(reads[0], ast.Attribute):
        for cls in site.every(ast.ClassDef):
            fields = [node for node in cls.body if isinstance(node, (ast.AnnAssign, ast.Assign))]
            if len(read & {name_of(targets(node)[0]) for node in fields}) > 1:
                typed = ": int" if isinstance(fields[-1], ast.AnnAssign) else ""
                field = f"{new}{typed} = {value}"
                return f"{config}.{new}", [Edit.insert_after(fields[-1], field)]
        return None
    edits = [
        _listed_after(key, node.values[-1], f"{source_of(node).quoted(new)}: {value}")
        for node in site.every(ast.Dict)
        if len(read & {constant(key) for key in node.keys}) > 1
        and (key := node.keys[-1]) is not None
    ]  # fmt: skip
    return (f"{config}[{source_of(init).quoted(new)}]", edits) if edits else None


def _listed_after(first: ast.AST, last: ast.AST, text: str) -> Edit:
    """Return one more item after an item of a list: on a line of its own if that one is."""
    (start, _), (_, end), whole = span(first), span(last), source_of(first).text
    indent = whole[whole.rfind("\n", 0, start) + 1 : start]
    if indent.strip():
        return Edit.suffix(last, f", {text}")
    if whole[end : end + 1] != ",":
        return Edit.suffix(last, f",\n{indent}{text}")
    line_end = whole.find("\n", end)  # after the item's comment
    return Edit.at(last, line_end, line_end, f"\n{indent}{text},")


def _optional_argument(site: Site, init: ast.FunctionDef, role: str) -> tuple[str, Edits]:
    """Return a last argument of the model's constructor, by default the checkpoint's size."""
    last = [*init.args.posonlyargs, *init.args.args][-1]
    name, value = _new_name(role, set(parameters(init))), value_of(role, site.user_config)
    text = f"{name}: int = {value}" if last.annotation else f"{name}={value}"
    end = default_of(init, last.arg) or last
    return name, [_listed_after(last, end, text)]


def _required_argument(cls: ast.ClassDef, init: ast.FunctionDef | None, name: str) -> Edit:
    """Return an argument of a module's constructor after those without a default."""
    if init is None:
        first = cls.body[1] if ast.get_docstring(cls) is not None else cls.body[0]
        lines = (f"def __init__(self, {name}):", "    super().__init__()", "")
        return Edit.insert_before(first, *lines)
    after = [*init.args.posonlyargs, *init.args.args][_place(init)]
    typed = any(each.annotation for each in find(ast.arg, init.args))
    return _listed_after(after, after, f"{name}: int" if typed else name)


def _place(init: ast.FunctionDef | None) -> int:
    """Return how many arguments without a default a constructor has, besides `self`."""
    if init is None:
        return 0
    return len(init.args.posonlyargs) + len(init.args.args) - len(init.args.defaults) - 1


def _passed(call: ast.Call, init: ast.FunctionDef | None, name: str, size: str) -> Edit:
    """Return a call of a module's class with one more argument."""
    place = _place(init)
    if len(call.args) > place:
        return Edit.prefix(call.args[place], f"{size}, ")
    if len(call.args) == place and not call.keywords:
        return Edit.last_argument(call, f", {size}" if call.args else size)
    return Edit.set_keyword(call, name, size)
