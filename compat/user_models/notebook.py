"""Notebooks and training scripts as modules that execute a statement only when it is needed."""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import importlib
import json
import linecache
import re
import symtable
import sys
import tokenize
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from compat.errors import AdaptError
from compat.user_code import translated
from compat.user_models.accelerators import needs_a_device
from compat.user_models.missing import Unknown
from compat.user_models.synonyms import plain, role_of
from compat.user_models.time_limit import limited_time

# Cell magics that run the cell's code in the notebook's own namespace.
TRANSPARENT = {"time", "capture", "prun", "memit", "mprun", "wandb"}
# What nearly all notebooks with models import.
USUAL_IMPORTS = {
    "torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "math": "math", "np": "numpy",
}  # fmt: skip
# A cell that writes a module, which other cells import; its code is read as that of a cell.
WRITES_MODULE = re.compile(r"\s*%%(?:writefile|file)\b.*?(\w+)\.py[ \t]*$", re.MULTILINE)
# %matplotlib inline, !pip install, ?help, pip install; files = !ls; help? - with lines continued by
# a backslash.
MAGIC = re.compile(
    r"""^([ \t]*)(?:%\w|!(?!=)|\?|(?:pip|conda)\d?[ ]+install\b|[\w ,.]+=[ ]*[%!]"""
    r"""|[^#'"\n]*\?[ \t]*$)(?:.*\\\n)*.*""",
    re.MULTILINE,
)
# An f-string that begins, and the rest of its line.
F_STRING = re.compile(r"""\b[rR]?[fF][rR]?(['"])(?!\1).*""")
UNKNOWN = "__compat_unknown__"  # a global name that holds the value of an attribute that failed
_COUNT = re.compile("^n|num|size|len|count|dim")  # in the name of a number or its function
# Texts that replace those of files and cells, by name; see `edited_sources`.
EDITED: dict[str, str] = {}
# Methods that change their object.
MUTATORS = {
    "add", "add_argument", "add_special_tokens", "add_tokens", "append", "extend", "insert",
    "merge_from_dict", "set_defaults", "setdefault", "update",
}  # fmt: skip


@dataclass(frozen=True)
class Statement:
    """One top-level statement.

    Args:
        node: Its syntax.
        filename: The name under which its source is in linecache.
        offset: The number of lines of the cells before its own.
        binds: The names that it assigns.
        changes: The names whose values it changes: `config["n"] = 1`, `Model.forward = forward`.
        reads: The global names that it reads, also in functions.
        calls: The names that it calls, unless it defines a function or class.
    """

    node: ast.stmt
    filename: str
    offset: int
    binds: set[str]
    changes: set[str]
    reads: set[str]
    calls: set[str]


class LazyModule:
    """The code of a module that executes what a name needs when the name is first looked up.

    A name needs the statements that bind it or change its value, and what these read. Other
    statements, such as a training loop, are never executed. A statement that raises, as one that
    reads a file that is missing, or that takes too long binds its names to an `Unknown`, unless
    it lacks a library or a device.
    """

    def __init__(self, name: str, path: Path) -> None:
        """Read a notebook, or a Python file as a notebook of one cell.

        Raises:
            AdaptError: The file cannot be read.
            SyntaxError: The Python file is broken. A broken cell only matters if it is needed.
        """
        self.module = ModuleType(name)
        self.module.__file__ = str(path)
        vars(self.module)["__getattr__"] = self._lookup
        self.statements: list[Statement] = []
        self._executed: set[int] = set()
        self._broken: list[tuple[str, SyntaxError]] = []
        if path.suffix == ".py":
            tree = python_tree(path)
            own_code = chain.from_iterable(map(_separate, unguarded(tree)))
            self.statements = [_statement(node, str(path), 0) for node in own_code]
        else:
            self._read_cells(path)
        nodes = [s.node for s in self.statements]
        future = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
        names = {alias.name for node in future for alias in node.names}
        self._flags = sum(getattr(__future__, feature).compiler_flag for feature in names)

    def _read_cells(self, path: Path) -> None:
        lines: list[str] = []
        written = set[str]()  # modules whose code is in the cells above, and not imported
        for number, cell in enumerate(code_cells(path), 1):
            filename = f"{path}#cell-{number}"
            source, tree, error = _parsed(EDITED.get(filename, cell), filename)
            own = [f"{line}\n" for line in source.split("\n")]
            linecache.cache[filename] = (len(source), None, own, filename)
            for node in chain.from_iterable(map(_separate, tree.body)):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                if module.rpartition(".")[2] not in written:
                    self.statements.append(_statement(node, filename, len(lines)))
            written |= {*WRITES_MODULE.findall(cell)}
            if error is not None:
                self._broken.append((source, error))
            lines += own
        bound = {name for statement in self.statements for name in statement.binds}
        read = {name for statement in self.statements for name in statement.reads}
        for name in USUAL_IMPORTS.keys() & read - bound:  # another notebook imports and runs it
            vars(self.module)[name] = importlib.import_module(USUAL_IMPORTS[name])
        # `inspect.getsource` of a class reads the lines of its module's __file__.
        linecache.cache[str(path)] = (sum(map(len, lines)), None, lines, str(path))

    def _lookup(self, name: str) -> Any:
        """Return the module's `__getattr__`."""
        escaped = re.escape(name)  # "*" is the name of a star import
        definition = re.compile(rf"^(class|def)\s+{escaped}\b|^{escaped}\s*=", re.MULTILINE)
        with translated(f"{self.module.__file__} cannot be executed"):
            if any(name in statement.binds for statement in self.statements):
                self._execute(name)
            elif errors := [e for source, e in self._broken if definition.search(source)]:
                raise errors[0]
        if name not in vars(self.module):
            submodule = sys.modules.get(f"{self.module.__name__}.{name}")  # of a package
            if submodule is None:
                raise AttributeError(f"{self.module.__file__} has no {name!r}")
            return submodule
        return vars(self.module)[name]

    def _execute(self, name: str) -> None:
        """Execute what the name needs and has not been executed, in the notebook's order."""
        fresh = sorted(_needed(self.statements, name) - self._executed)
        self._executed.update(fresh)
        for place, index in enumerate(fresh):
            statement = self.statements[index]
            imports = isinstance(statement.node, (ast.Import, ast.ImportFrom))
            try:
                with contextlib.nullcontext() if imports else limited_time():
                    self._run(statement.node, statement.filename)
            except (Exception, SystemExit) as error:
                if imports or needs_a_device(error):  # executed again with a replacement
                    self._executed -= {*fresh[place:]}
                    raise
                vars(self.module).update(dict.fromkeys(statement.binds, Unknown(error)))
                continue
            if isinstance(statement.node, ast.ClassDef):
                made = vars(self.module)[statement.node.name]
                if hasattr(made, "__firstlineno__"):  # inspect reads it since Python 3.13
                    made.__firstlineno__ += statement.offset

    def _run(self, node: ast.stmt, filename: str) -> None:
        """Execute a statement. An attribute of a class whose value raises becomes an `Unknown`."""
        code = compile(
            ast.Module(body=[node], type_ignores=[]), filename, "exec", self._flags, True
        )
        try:
            exec(code, vars(self.module))
        except Exception as error:
            failed = _failed_attribute(node, filename, error)
            if failed is None:
                raise
            value = failed.value
            failed.value = ast.copy_location(ast.Name(UNKNOWN, ast.Load()), failed)
            vars(self.module)[UNKNOWN] = Unknown(error)
            try:
                self._run(node, filename)
            finally:
                failed.value = value
                vars(self.module).pop(UNKNOWN, None)


def _failed_attribute(
    node: ast.stmt, filename: str, error: Exception
) -> ast.Assign | ast.AnnAssign | None:
    """Return the assignment in the body of a class whose value raised an error, if one did.

    The class is one of settings; a model, which has a base, is not built without such a value.
    """
    if not isinstance(node, ast.ClassDef) or node.bases:
        return None
    frames = traceback.walk_tb(error.__traceback__)
    lines = [
        n for f, n in frames if (f.f_code.co_filename, f.f_code.co_name) == (filename, node.name)
    ]
    for each in node.body if lines else []:
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None:
            if each.lineno <= lines[0] <= (each.end_lineno or 0):
                return each
    return None


# Reading.


def read_source(path: Path) -> str:
    """Return a Python file's text, in the encoding that it declares, or its edited text."""
    if str(path) in EDITED:
        return EDITED[str(path)]
    linecache.checkcache(str(path))
    try:
        with tokenize.open(path) as file:
            return file.read()
    except UnicodeDecodeError:
        compile(path.read_bytes(), str(path), "exec")  # Python accepts any bytes in comments
        return path.read_text(encoding(path), errors="replace")


def encoding(path: Path) -> str:
    """Return the encoding that a Python file declares; a byte order mark is a character in it."""
    with path.open("rb") as file:
        return tokenize.detect_encoding(file.readline)[0].removesuffix("-sig")


def python_tree(path: Path) -> ast.Module:
    """Parse a Python file. Magics in it, as Colab exports them, are replaced by `pass`.

    Raises:
        SyntaxError: The file is broken otherwise.
    """
    source = read_source(path)
    text, tree, error = _parsed(source, str(path))
    if error is not None:
        raise error
    if str(path) not in EDITED:
        linecache.cache.pop(str(path), None)
    if text != source or not linecache.getlines(str(path)):  # `inspect` has to parse them too
        lines = text.splitlines(keepends=True)
        linecache.cache[str(path)] = (len(text), None, lines, str(path))
    return tree


def code_cells(path: Path) -> list[str]:
    """Return the sources of a notebook's code cells."""
    try:
        document = json.loads(path.read_bytes())  # in UTF-8, -16 or -32
        code = [cell["source"] for cell in document["cells"] if cell["cell_type"] == "code"]
        return ["".join(source).replace("\r\n", "\n") for source in code]
    except json.JSONDecodeError as error:
        raise AdaptError(f"{path} is not a notebook: not JSON: {error}") from None
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise AdaptError(
            f"{path} is not a notebook of format 4 with a list of cells ({type(error).__name__}: "
            f"{error}). Open and save it in Jupyter"
        ) from None
    except OSError as error:
        raise AdaptError(f"cannot read {path}: {error}") from error


def blanked_magics(source: str) -> str:
    """Replace each magic of a cell by a `0` and spaces, so that all other characters stay."""

    def blank(found: re.Match[str]) -> str:
        indent = found[1]
        return f"{indent}0" + re.sub(r"[^\n]", " ", found[0][len(indent) + 1 :])

    return MAGIC.sub(blank, source)


def cell_line(file: str, line: int) -> tuple[str, int]:
    """Return the cell of a notebook that has a line of all its cells, and the line in the cell.

    Other files, and lines of a cell, are returned unchanged.
    """
    number = 1
    while file.endswith(".ipynb") and (cell := linecache.getlines(f"{file}#cell-{number}")):
        if line <= len(cell):
            return f"{file}#cell-{number}", line
        line, number = line - len(cell), number + 1
    return file, line


def _parsed(source: str, filename: str) -> tuple[str, ast.Module, SyntaxError | None]:
    """Replace a cell's magics by `pass`; return it, its syntax, and its syntax error if any.

    Magics are only looked for in a cell that Python cannot parse: a line that starts with `%` may
    be the second line of an expression. So are f-strings in the syntax of Python 3.12. Line numbers
    stay.
    """
    nothing = ast.Module(body=[], type_ignores=[])
    magic = re.match(r"\s*%%(\w+).*", source)
    if magic and magic[1] not in TRANSPARENT and not WRITES_MODULE.match(source):
        return "\n" * source.count("\n"), nothing, None
    if magic:
        source = "\n" * magic[0].count("\n") + source[magic.end() :]
    without = MAGIC.sub(lambda found: f"{found[1]}pass" + "\n" * found[0].count("\n"), source)
    for text in map(older_syntax, (source, without)):
        try:
            return text, ast.parse(text, filename), None
        except (SyntaxError, ValueError) as error:
            fault = error if isinstance(error, SyntaxError) else SyntaxError(str(error))
            fault.filename, fault.text = filename, fault.text or ""
    return without, nothing, fault


def older_syntax(source: str) -> str:
    """Return the same code for Python 3.11, where an f-string contains no quotes of its own kind.

    Python 3.12 accepts `f'{a['b']}'`, which becomes `f'{a["b"]}'`. Every other character stays in
    its place.
    """
    if sys.version_info >= (3, 12):
        return source
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:  # a ValueError for null bytes
        if "f-string" in str(error):
            return F_STRING.sub(_other_quotes, source)
    return source


def _other_quotes(found: re.Match[str]) -> str:
    """Return the rest of a line from an f-string on, with other quotes within its braces."""
    quote, depth = found[1], 0
    start = found.end(1) - found.start()
    characters = list(found[0])
    for i, character in enumerate(characters[start:], start):
        if character == quote and depth == 0:
            rest = F_STRING.sub(_other_quotes, "".join(characters[i + 1 :]))
            return "".join(characters[: i + 1]) + rest
        depth += (character == "{") - (character == "}")
        if character == quote:
            characters[i] = "'" if quote == '"' else '"'
    return found[0]


# The guard `if __name__ == "__main__":`.


def is_main_guard(node: ast.stmt) -> bool:
    """Return whether a statement is only executed in a script, not when it is imported."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def unguarded(tree: ast.Module) -> list[ast.stmt]:
    """Return a module's statements, with those below the main guard in its place.

    After a function that defines classes come its statements, as if they were the module's.
    """
    found: list[ast.stmt] = []
    for node in tree.body:
        for each in node.body if isinstance(node, ast.If) and is_main_guard(node) else [node]:
            found.append(each)
            if isinstance(each, ast.FunctionDef):
                defines = any(isinstance(inner, ast.ClassDef) for inner in each.body)
                found += _inlined(each) if defines else []
    return found


def _inlined(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return a function's parameters as globals, and its statements that return nothing.

    Parameters without a default are None.
    """
    arguments = (*function.args.posonlyargs, *function.args.args)
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + function.args.defaults
    pairs = (*zip(arguments, defaults, strict=True),
             *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True))  # fmt: skip
    globals_ = "\n".join(f"{arg.arg} = {ast.unparse(d) if d else None}" for arg, d in pairs)
    found: list[ast.stmt] = []
    for node in (*ast.parse(globals_).body, *function.body):
        with contextlib.suppress(SyntaxError):  # 'return' outside function
            compile(ast.Module(body=[node], type_ignores=[]), "<statement>", "exec")
            found.append(node)
    return found


def needs_main(tree: ast.Module) -> bool:
    """Return whether a class reads a global, such as `device`, that only a script assigns."""
    statements = [(is_main_guard(node), _statement(node, "", 0)) for node in tree.body]
    bound = set[str]().union(*(s.binds for guarded, s in statements if not guarded))
    by_script = set[str]().union(*(s.binds for guarded, s in statements if guarded))
    classes = (s for _, s in statements if isinstance(s.node, ast.ClassDef))
    return any(s.reads & (by_script - bound) for s in classes)


# What a name needs.


def _needed(statements: list[Statement], name: str) -> set[int]:
    """Return the indices of the statements that a name needs.

    These are all that bind or change it, and up to its last definition those that bind or change
    the names which they read, in turn. For names that are bound only after it, these later
    statements are used. An import needs what changes `sys.path`. A definition of a class that is
    never called after it does not replace one that is.
    """
    binding = [i for i, statement in enumerate(statements) if name in statement.binds]
    calls = [i for i, statement in enumerate(statements) if name in statement.calls]
    called = [i for i in binding if i < max(calls, default=0)]
    last = max(called or binding)
    if unused := [i for i in binding if i > last]:
        statements = [*statements]
        for i in unused:
            statements[i] = replace(statements[i], binds=statements[i].binds - {name}, reads=set())
    earlier = set[str]().union(*(statement.binds for statement in statements[: last + 1]))
    bound = earlier.union(dir(builtins), *(statement.binds for statement in statements))
    names, found = {name}, set[int]()
    while True:
        touched = [(s.binds | s.changes) & names for s in statements]
        fresh = {i for i, t in enumerate(touched) if t and (i <= last or name in t or t - earlier)}
        if fresh == found:
            return found
        found = fresh
        names = names.union(*(statements[i].reads for i in found))
        if any(isinstance(statements[i].node, (ast.Import, ast.ImportFrom)) for i in found):
            names |= {"sys"} & bound
        if not names <= bound:
            names.add("*")


def _separate(node: ast.stmt) -> list[ast.stmt]:
    """Return `a = x` and `b = y` for `a, b = x, y`, so that one is known if the other is not."""
    match node:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            read = [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
            if len(names) == len(targets) and not {*names} & {*read}:
                pairs = zip(targets, values, strict=True)
                return [ast.copy_location(ast.Assign([t], value), node) for t, value in pairs]
    return [node]


def _statement(node: ast.stmt, filename: str, offset: int) -> Statement:
    """Determine which names a statement binds, changes and reads."""
    node = _without_data(node)
    table = symtable.symtable(ast.unparse(node), "statement", "exec")
    symbols = table.get_symbols()
    binds = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        binds = {"*"}
    if _sets_globals(node):
        binds.add("*")
    reads = {s.get_name() for s in symbols if s.is_referenced()}.union(*_inner_globals(table))
    return Statement(node, filename, offset, binds, set(_changed(node)), reads, _called(node))


def _sets_globals(node: ast.stmt) -> bool:
    """Return whether a statement assigns variables by name, as `globals().update(config)` does."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return False
    for each in ast.walk(node):
        match each:
            case ast.Subscript(ast.Call(ast.Name(function)), ctx=ast.Store()) | ast.Attribute(
                ast.Call(ast.Name(function)), "update"
            ) if function in ("globals", "locals", "vars"):
                return True
    return False


def _called(node: ast.stmt) -> set[str]:
    """Return the names that a statement calls, unless it defines a function or class."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return set()
    functions = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
    return {function.id for function in functions if isinstance(function, ast.Name)}


def _inner_globals(table: symtable.SymbolTable) -> Iterator[set[str]]:
    """Yield the global names that the classes and functions of a scope read."""
    for scope in table.get_children():
        yield {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
        yield from _inner_globals(scope)


def _without_data(node: ast.stmt) -> ast.stmt:
    """`vocab_size = len(chars)` as a constant: the checkpoint's value replaces it anyway.

    `vocab = sorted(set(text))` is left unchanged, because such a name may hold something other than
    a number.
    """
    match node:
        case ast.Assign([ast.Name(id=name)], value) if role_of(name) == "vocab_size":
            computed = any(isinstance(n, (ast.Call, ast.Attribute)) for n in ast.walk(value))
            callee = value.func if isinstance(value, ast.Call) else value
            names = (name, ast.unparse(callee).rpartition(".")[2])
            if computed and any(_COUNT.search(plain(each)) for each in names):
                number = ast.copy_location(ast.Constant(50257), value)
                return ast.copy_location(ast.Assign(node.targets, number), node)
    return node


def _changed(node: ast.stmt) -> Iterator[str]:
    """Yield the names whose values a statement changes in place."""
    changed: list[ast.expr] = []
    match node:
        case ast.Assign(targets=targets):
            changed = [target for target in targets if not isinstance(target, ast.Name)]
        case ast.AugAssign(target=ast.Attribute() | ast.Subscript() as updated):
            changed = [updated]
        case ast.FunctionDef(decorator_list=decorators):  # @add_to_class(Model)
            calls = [decorator for decorator in decorators if isinstance(decorator, ast.Call)]
            changed = [argument for call in calls for argument in call.args]
        case ast.Expr(ast.Call(func=ast.Attribute(value=owner, attr=name))) if name in MUTATORS:
            changed = [owner]
    for target in changed:
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id
