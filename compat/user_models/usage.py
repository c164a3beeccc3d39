"""Which names a user's code reads from its config, found in the source."""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import resolve_name
from itertools import chain, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from compat.user_code import SIBLINGS, is_users, project_folders
from compat.user_models.synonyms import CONFIG_NAMES, SIZES, is_config_name, plain, role_of

_ITEM = re.compile(r"""(?:(?:\[|\.(?:get|pop)\()\s*["']|\.get_\w+\(\s*["'](?:\w+\.)+)(\w+)["']""")
_ATTRIBUTE = re.compile(r"\b([^\W\d][\w.]*)\.([^\W\d]\w*)\b(?!\s*\()")
_IMPORT = re.compile(r"^\s*(from|import)\s.*", re.MULTILINE)
_GETTER = re.compile(r"\b([^\W\d][\w.]*)\.(get_\w+)\(\)")
_GETATTR = re.compile(r"""getattr\([^,()]+,\s*["'](\w+)["']""")
_DEFAULT = re.compile(r"""getattr\([^,()]+,\s*["'](\w+)["']\s*,""")
# The first branch consumes the `in` of loops.
_TABLE = re.compile(r"""\bfor\s[\w\s,()]+\sin\b|\bin\s+[\w.]+\[\s*["'](\w+)["']\s*\]""")
# What is a table by its default: `config.get("name", {})`.
_TABLE_BY_DEFAULT = re.compile(r"""\.get\(\s*["'](\w+)["']\s*,\s*(?:\{\}|dict\(\))""")
_OWN = re.compile(r"\bself\.(\w+)\b(?!\s*\()")
# Attributes that hold modules, as in `self.feed_forward = FeedForward(config)`.
_MODULE = re.compile(r"""\bself\.(\w+)\s*=\s*(?:nn\.)?[A-Z]\w*\(""")
# Buffers, and attributes that the code assigns without reading their previous value.
_MADE = re.compile(r"""\bself\.(\w+)\s*=(?!=)(?!.*self\.\1\b)|register_buffer\(\s*["'](\w+)""")
# What torch's modules call their arguments.
_TORCH = {
    "Embedding": ["", "embedding_dim"], "LayerNorm": ["normalized_shape"],
    "MultiheadAttention": ["embed_dim", "num_heads"], "TransformerEncoder": ["", "num_layers"],
    "TransformerEncoderLayer": ["d_model", "nhead", "dim_feedforward"],
    "TransformerDecoderLayer": ["d_model", "nhead", "dim_feedforward"],
}  # fmt: skip
MOST_MODULES = 1024  # of a project, whose syntax is kept while a model is built many times
# Attributes of these modules are not config entries.
LIBRARIES = set("F math nn np numpy os sys torch".split())
OF_TENSORS = {"T", "H", "mT", "mH", "ndim", "shape", "grad"}  # attributes


@dataclass(frozen=True)
class Usage:
    """The names that may be read from a config.

    Args:
        items: Names read as `config["name"]`, `config.get("name")` or
            `config.get_setting("section.name")`.
        attributes: Names read as `config.name`, `getattr(config, "name")` or `config.get_name()`.
        tables: Names of tables in which a key is looked up: `key in config["name"]`, or which are
            empty by default: `config.get("name", {})`.
        with_default: Attributes that are read with a default: `getattr(config, "name", 1)`.
        optional: Those that are only read so.
        sections: Names off which sizes are read in turn: `model` of `config.model.n_layer`.
    """

    items: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()
    with_default: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    sections: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Both, sorted."""
        return sorted(self.items | self.attributes)


def reads(cls: Callable[..., Any], parameter: str) -> Usage:
    """Return the names that the user's code reads from a constructor's config parameter.

    A parameter is a config if it has a usual name of configs, or if the constructor reads a name
    from it. The config is not followed through the code: the result has the names that the class's
    modules read from any variable, and from attributes such as `self.config`. If the constructor
    assigns the parameter to another attribute, it is a config if a size is read from that; and so
    is a dictionary whose items the constructor copies to the model.
    """
    own = init_source(cls)
    tensors = "|".join(OF_TENSORS)  # a parameter is not a config if only these are read from it
    name = rf"(?!(?:{tensors})\b)[^\W\d]\w*\b(?!\s*\()"
    reading = rf"""\b{parameter}(?:\.{name}|\[["']|\.get\()"""
    direct = re.search(rf"""{reading}|getattr\(\s*{parameter}\s*,""", own)
    text = _IMPORT.sub("", modules_text(cls))  # `import llama.feedforward` reads no entry
    aliases = {
        alias for alias in re.findall(rf"\bself\.(\w+)\s*=\s*{parameter}[ \t]*(?:#.*)?$", own, re.M)
        if any(role_of(n) in SIZES for n in re.findall(rf"\bself\.{alias}\.(\w+)\b(?!\s*\()", text))
    }  # fmt: skip
    copied = _copied(cls, parameter)
    if not direct and not aliases and not copied and not is_config_name(parameter):
        return Usage()
    names = {*CONFIG_NAMES, *map(plain, aliases)}
    items, attributes = _ITEM.findall(text), list[str]()
    modules = {*_MODULE.findall(text)}
    parts = {*re.findall(rf"(?m)^\s*(\w+)\s*=\s*{parameter}\.\w+\s*$", own)}  # m = cfg.model
    for owner, name in (*_ATTRIBUTE.findall(text), *_GETTER.findall(text)):
        first, *rest = owner.removeprefix("self.").split(".")
        if first in LIBRARIES or (name in OF_TENSORS and plain(first) not in names):
            continue
        is_config = first == parameter or plain(first) in names or (rest and first in parts)
        if is_config:
            attributes += [*rest, name]
        elif owner == first != "self" and name not in modules:  # as `layer.feed_forward` is one
            attributes.append(name)
    items += copied
    if isinstance(cls, type) and f"**{parameter})" in own:  # to the base class's constructor
        items += inspect.signature(cls.__mro__[1]).parameters
    with_default = {*_DEFAULT.findall(text)}
    optional = with_default - {*attributes, *items}
    attributes += _GETATTR.findall(text)
    items += unpacked_values(cls, parameter)
    return Usage(
        frozenset(items),
        frozenset(attributes),
        frozenset([*_TABLE.findall(text), *_TABLE_BY_DEFAULT.findall(text)]) - {""},
        frozenset(with_default),
        frozenset(optional),
        frozenset(_sections(cls) & {*items, *attributes}),
    )


def _copied(cls: Callable[..., Any], parameter: str) -> list[str]:
    """Return the names with a role that are read as `self.name`, if a dictionary is copied there.

    Examples are `self.__dict__.update(kwargs)` and a loop with `setattr`.
    """
    if not re.search(rf"\b{parameter}\.items\(\)|\.update\((\*\*)?{parameter}\)", init_source(cls)):
        return []
    made = {name for pair in _MADE.findall(source_of(cls)) for name in pair}
    return [n for n in _OWN.findall(modules_text(cls)) if role_of(n) and n not in made]


def unpacked_values(cls: Callable[..., Any], parameter: str) -> list[str]:
    """Return the variables that the values of a config are unpacked to, in their order."""
    line = rf"^[ \t]*(\w+(?:, *\w+)+) *=.*\b{parameter}\.values\(\)"
    found = re.search(line, init_source(cls), re.MULTILINE)
    return re.findall(r"\w+", found[1]) if found else []


def _sections(cls: Callable[..., Any]) -> set[str]:
    """Return names that sizes are read from: `cfg.model.n_layer`, `m.get("dim")`."""
    return set().union(*(_sections_in(tree_of(module)) for module in user_modules(cls)))


@lru_cache(maxsize=MOST_MODULES)
def _sections_in(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    variables: dict[str, str] = {}
    for node in _nodes(tree):
        pairs = assigned(node)
        variables |= {ast.unparse(t): name for t, v in pairs if (name := _read(_unwrapped(v))[1])}
    for node in _nodes(tree):
        owner, name = _read(node)
        if owner is not None and len(name) > 1 and role_of(name):
            found.add(variables.get(ast.unparse(owner)) or _read(owner)[1])
    return found


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets and values of a statement: two of `a, b = 1, 2`; none of other nodes."""
    match node:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
            before_rest = takewhile(lambda target: not isinstance(target, ast.Starred), targets)
            return [*zip(before_rest, values, strict=False)]
        case ast.Assign([target], value) | ast.AnnAssign(target, _, ast.expr() as value):
            return [(target, value)]
    return []


def _unwrapped(node: ast.expr) -> ast.expr:
    """Return `config.model` of `Config(config.model)` and of `Namespace(**config.model)`."""
    match node:
        case ast.Call(ast.Name(), [inner], []) | ast.Call(
            ast.Name(), [], [ast.keyword(None, inner)]
        ):
            return inner
    return node


def _read(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Return what `node` reads a name from, and the name: `o.name`, `o["name"]`, `o.get(…)`."""
    match node:
        case (
            ast.Attribute(owner, str(name))
            | ast.Subscript(owner, ast.Constant(str(name)))
            | ast.Call(ast.Attribute(owner, "get"), [ast.Constant(str(name)), *_])
        ):
            return owner, name
    return None, ""


def counts(cls: Callable[..., Any], parameter: str) -> bool:
    """Return whether a constructor computes `len(parameter)` or `set(parameter)`.

    The parameter may be an attribute of another one, as in `len(tokenizer.vocab)`.
    """
    own = init_source(cls)
    return re.search(rf"\b(len|set)\(\s*([\w.]+\.)?{parameter}\s*\)", own) is not None


def indexed(cls: Callable[..., Any]) -> dict[str, int]:
    """Return the sizes of lists in configs, as 2 for `cfg["drop"][0]` and `cfg["drop"][1]`."""
    sizes: dict[str, int] = {}
    for name, index in re.findall(r"""["'](\w+)["']\]\[(\d)\]""", modules_text(cls)):
        sizes[name] = max(sizes.get(name, 0), int(index) + 1)
    return sizes


def items_of(cls: type, parameter: str) -> dict[str, bool]:
    """Return the names that a constructor reads from a dictionary, such as its **kwargs.

    Returns:
        Whether each name is required, as in `kwargs["bias"]`.
    """
    own = init_source(cls)
    kept = re.findall(rf"\bself\.(\w+)\s*=\s*{parameter}[ \t]*(?:#.*)?$", own, re.M)
    holder = "|".join([rf"\b{parameter}", *(rf"\bself\.{name}" for name in kept)])
    names = re.findall(rf"(?:{holder}){_ITEM.pattern}", own)
    copied = dict.fromkeys(_copied(cls, parameter), True)
    return copied | {n: bool(re.search(rf"""(?:{holder})\[\s*["']{n}["']""", own)) for n in names}


def forwarded(cls: Callable[..., Any], parameter: str) -> Iterator[tuple[type, set[str]]]:
    """Return classes that a constructor passes `**parameter` to, and parameters it sets itself."""
    with contextlib.suppress(SyntaxError, TypeError, ValueError):
        own = textwrap.dedent(init_source(cls))
        for node in ast.walk(syntax_tree(own)) if f"**{parameter}" in own else ():
            match node:
                case ast.Call(ast.Name(name), positional, keywords) if any(
                    k.arg is None and ast.unparse(k.value) == parameter for k in keywords
                ):
                    inner = vars(sys.modules[cls.__module__]).get(name)
                    if isinstance(inner, type) and inner is not cls:
                        first = list(inspect.signature(inner).parameters)[: len(positional)]
                        yield inner, {*first, *(k.arg for k in keywords if k.arg)}


@lru_cache(maxsize=256)  # finding the end of a function takes milliseconds
def source_of(function: object) -> str:
    """Return the source of a function; empty if it has none."""
    try:
        return inspect.getsource(function)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


def init_source(cls: Callable[..., Any]) -> str:
    """Return the source of a class's constructor; empty if it has none."""
    return source_of(inspect.getattr_static(cls, "__init__"))


def modules_text(cls: Callable[..., Any]) -> str:
    """Return the code of the class's modules, without comments and docstrings."""
    files = [str(module.__file__) for module in user_modules(cls)]
    for file in files:
        linecache.checkcache(file)
    return "\n".join(_code("".join(linecache.getlines(file))) for file in files)


@lru_cache(maxsize=MOST_MODULES)
def _code(text: str) -> str:
    """Return code without its comments and docstrings, in which `i.e` looks like an attribute."""
    try:
        tree = ast.parse(text)  # not a shared tree, because it is changed
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        match node:
            case ast.Module([ast.Expr(ast.Constant(str())), *rest]):
                node.body = rest
            case (
                ast.FunctionDef(body=[ast.Expr(ast.Constant(str())), *rest])
                | ast.ClassDef(body=[ast.Expr(ast.Constant(str())), *rest])
            ):
                node.body = [*rest, ast.Pass()]
    return ast.unparse(tree)


def embeddings(module: ModuleType) -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """Yield every nn.Embedding in a module's code: its name, if it is assigned, and its sizes.

    The sizes have the names of torch's parameters: `num_embeddings` and `embedding_dim`.
    """
    return _embeddings_in(tree_of(module))


def rows_role(table: str) -> str:
    """Return the role of the number of rows of an nn.Embedding with this name."""
    return "n_positions" if re.search("pos|wpe", table.lower()) else "vocab_size"


def _embeddings_in(tree: ast.Module) -> Iterator[tuple[str, dict[str, ast.expr]]]:
    names: dict[ast.expr, str] = {}
    for node in _nodes(tree):
        match node:
            case ast.Assign([ast.Attribute(attr=name) | ast.Name(name)], value) | ast.keyword(
                str(name), value
            ):
                names[value] = name
            case ast.Call(ast.Attribute(attr="Embedding") | ast.Name("Embedding"), args, keywords):
                sizes = dict(zip(("num_embeddings", "embedding_dim"), args, strict=False))
                sizes |= {k.arg: k.value for k in keywords if k.arg}
                yield names.get(node, ""), sizes


def embedding_widths(cls: Callable[..., Any]) -> set[str]:
    """Return the names of widths in the user's code, such as C in `nn.Embedding(V, config.C)`."""
    tables = (sizes for module in user_modules(cls) for _, sizes in embeddings(module))
    widths = (sizes["embedding_dim"] for sizes in tables if "embedding_dim" in sizes)
    return {name for width in widths if (name := name_of(width))}


def name_of(node: ast.expr) -> str:
    """Return the last name of `name`, `o.name` and `o["name"]`; empty for other expressions."""
    return node.id if isinstance(node, ast.Name) else _read(node)[1]


def factors_of(cls: Callable[..., Any], name: str) -> set[str]:
    """Return the names by which the user's code multiplies an entry: `dim` in `dim * ratio`."""
    found: set[str] = set()
    for node in users_nodes(cls):
        names = {name_of(operand) for operand in _operands(node)}
        found |= names - {name, ""} if name in names else set()
    return found


def is_of_one_head(cls: Callable[..., Any], name: str) -> bool:
    """Return whether the code multiplies an entry by the number of heads: `d_k * n_heads`."""
    return any(role_of(factor) == "n_head" for factor in factors_of(cls, name))


def is_number_of_heads(cls: Callable[..., Any], name: str) -> bool:
    """Return whether an entry divides the width into heads: `x.view(B, T, name, C // name)`."""
    for node in users_nodes(cls):
        match node:
            case ast.Call(ast.Attribute(attr="view" | "reshape"), [*_, heads, size]):
                if isinstance(size, ast.BinOp) and isinstance(size.op, ast.FloorDiv):
                    if name_of(heads) == name_of(size.right) == name:
                        return True
    return False


def is_width(cls: Callable[..., Any], name: str) -> bool:
    """Return whether the code multiplies an entry by 4, or passes it to a norm or as a width."""
    for node in users_nodes(cls):
        operands = _operands(node)
        if isinstance(node, ast.Call):
            is_norm = ast.unparse(node.func).lower().endswith("norm")
            operands = [k.value for k in node.keywords if k.arg in ("d_model", "embed_dim")]
            operands += node.args[:1] if is_norm else []
        elif not any(isinstance(n, ast.Constant) and n.value == 4 for n in operands):
            continue
        if name in map(name_of, operands):
            return True
    return False


def roles_by_use(cls: Callable[..., Any], name: str) -> set[str]:
    """Return the roles that the user's code gives an entry whose name has none.

    They are those of the arguments and attributes that it becomes, as in `num_heads=cfg.units` and
    `self.d_model = units`. A number of rows of a table is the vocabulary's or, by the table's name,
    that of positions, a number of rows and columns of a mask is that of positions, and what the
    width is divided by is the number of heads.
    """
    found, names, becomes = set[str](), [name], _becomes(cls)
    for each in names:  # grows
        for other in becomes.get(each, ()):
            role = other if other in SIZES else role_of(other) if len(other) > 1 else "unknown"
            if role in SIZES:
                found.add(role)
            elif role is None and other not in names:
                names.append(other)
    return found


def _becomes(cls: Callable[..., Any]) -> dict[str, set[str]]:
    """Return what the values of entries become, and what they are: names and roles."""
    return _becomes_in(tuple(tree_of(module) for module in user_modules(cls)))


@lru_cache(maxsize=16)
def _becomes_in(trees: tuple[ast.Module, ...]) -> dict[str, set[str]]:
    nodes = [node for tree in trees for node in _nodes(tree)]
    constructors = {
        node.name: [a.arg for a in method.args.args[1:]]
        for node in nodes if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    }  # fmt: skip
    found = defaultdict[str, set[str]](set)
    for table, sizes in chain.from_iterable(map(_embeddings_in, trees)):
        if table and (rows := name_of(sizes.get("num_embeddings", ast.Constant(None)))):
            found[rows].add(rows_role(table))
    for node in nodes:
        pairs = [(value, name_of(target)) for target, value in assigned(node)]
        match node:
            case ast.Call(function, arguments, keywords):
                called = function.attr if isinstance(function, ast.Attribute) else name_of(function)
                own = constructors.get(called) or _TORCH.get(called, [])
                pairs += [*zip(arguments, own, strict=False)]
                rows = "num_embeddings"  # whose role depends on the table
                pairs += [(k.value, k.arg) for k in keywords if k.arg and k.arg != rows]
                shape = getattr(arguments[0], "elts", arguments) if arguments else []
                if called in ("ones", "zeros", "full") and len(shape) > 1:
                    square = name_of(shape[0]) == name_of(shape[1])
                    pairs += [(shape[0], "n_positions")] if square else []
            case ast.BinOp(width, ast.FloorDiv() | ast.Div() | ast.Mod(), divisor):
                pairs += [(divisor, "n_head")] if role_of(name_of(width)) == "n_embd" else []
        for value, name in pairs:
            other = name_of(value)
            if name and other and name != other:
                found[other].add(name)
                if isinstance(value, ast.Name):  # as in `Config(units=num_heads)`
                    found[name].add(other)
    return found


def _operands(node: ast.AST) -> list[ast.expr]:
    """Return the operands of a product: three of `a * b * c`; none of other nodes."""
    match node:
        case ast.BinOp(left, ast.Mult(), right):
            return [*(_operands(left) or [left]), *(_operands(right) or [right])]
    return []


def compared_strings(cls: Callable[..., Any]) -> dict[str, set[str]]:
    """Return the strings that the user's code compares variables and entries with, by name."""
    found: dict[str, set[str]] = {}
    for node in users_nodes(cls):
        match node:
            case ast.Compare(left, _, others):
                sides = [left, *others]
            case ast.Match(subject, cases):
                patterns = [n for case in cases for n in ast.walk(case.pattern)]
                sides = [subject, *(n.value for n in patterns if isinstance(n, ast.MatchValue))]
            case _:
                continue
        strings = {
            n.value for side in sides for n in getattr(side, "elts", [side])
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }  # fmt: skip
        for side in sides if strings else ():
            match side:
                case ast.Call(ast.Attribute(ast.expr() as side, "lower" | "strip")):
                    pass
            name = side.id if isinstance(side, ast.Name) else _read(side)[1]
            if name:
                found.setdefault(name, set()).update(strings)
    return found


def tree_of(module: ModuleType) -> ast.Module:
    """Return the syntax of a module's source; empty if it has none."""
    with contextlib.suppress(SyntaxError):
        return syntax_tree("".join(linecache.getlines(str(module.__file__))))
    return ast.Module(body=[], type_ignores=[])


def users_nodes(cls: Callable[..., Any]) -> Iterator[ast.AST]:
    """Yield all nodes of the syntax of the class's modules."""
    return (node for module in user_modules(cls) for node in nodes_of(module))


def nodes_of(module: ModuleType) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax of a module's source."""
    return _nodes(tree_of(module))


@lru_cache(maxsize=MOST_MODULES)
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@lru_cache(maxsize=MOST_MODULES)
def syntax_tree(text: str) -> ast.Module:
    """Return the syntax of a source, which is shared and must not be changed."""
    return ast.parse(text)


def user_modules(target: Callable[..., Any]) -> list[ModuleType]:
    """Return the module of a class or function, and those of its project that it imports from."""
    first = sys.modules.get(target.__module__)
    if first is None or not getattr(first, "__file__", None):
        return []
    folder = os.path.join(Path(str(first.__file__)).parent, "")
    found = [first]
    for module in found:  # grows
        values = list(vars(module).values())
        names = [getattr(value, "__module__", None) for value in values]
        names += [value.__name__ for value in values if isinstance(value, ModuleType)]
        names += [  # numbers do not say where they come from
            "." * node.level + (node.module or "") for node in tree_of(module).body
            if isinstance(node, ast.ImportFrom)
        ]  # fmt: skip
        for name in dict.fromkeys(map(str, names)):
            with contextlib.suppress(ImportError):  # a relative name outside of a package
                name = resolve_name(name, module.__package__)
            other = sys.modules.get(name)
            if other is None or other in found:
                continue
            file = str(getattr(other, "__file__", None) or "/")
            if (file.startswith(folder) and is_users(file)) or other.__name__ in SIBLINGS:
                found.append(other)
    return found


def users_globals(cls: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the names and values in the class's modules."""
    return [item for module in user_modules(cls) for item in list(vars(module).items())]


def users_folders(cls: Callable[..., Any]) -> list[Path]:
    """Return the folder of the class's file, and those above it in its project."""
    files = [Path(str(module.__file__)).resolve() for module in user_modules(cls)[:1]]
    return [folder for file in files for folder in project_folders(file.parent)]


def is_users_class(value: object) -> bool:
    """Return whether a value is a class that is defined in a user's file."""
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    file = str(getattr(module, "__file__", "<unknown>"))
    return isinstance(value, type) and is_users(file)
