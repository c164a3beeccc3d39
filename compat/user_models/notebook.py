"""The cells of a notebook, and a module made of only those statements that a class needs."""

from __future__ import annotations
import __future__

import ast
import importlib.util
import json
import linecache
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from compat.errors import AdaptError
from compat.user_models.needed import Statement, analysed, needed

# Cell magics that run the cell's code in the notebook's own namespace.
TRANSPARENT = {"time", "capture", "prun", "memit", "mprun", "wandb"}
MAGIC = re.compile(
    r"""\s*[%!?]              # %matplotlib inline, !pip install, ?help
    |[^#'"]*\?\s*$            # help?
    |[\w\s,.]+=\s*[%!]\s*\w   # files = !ls
    """,
    re.VERBOSE,
)
_cells_of: dict[str, Cells] = {}  # by the name of the module


@dataclass(frozen=True)
class Cell:
    """One code cell: its pseudo file name, its source without magics, its syntax error if any."""

    filename: str
    source: str
    error: SyntaxError | None = None


@dataclass
class Cells:
    """Code cells in order, and which of their statements have run.

    A Python file that trains as it is imported is treated alike, as one cell.
    """

    path: Path
    cells: list[Cell]
    statements: list[Statement]
    done: set[int] = field(default_factory=set)

    def models(self) -> dict[str, ast.ClassDef]:
        """The classes that look like modules by their bases; of several definitions the last."""
        found: dict[str, ast.ClassDef] = {}
        for statement in self.statements:
            node = statement.node
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                if any(base.endswith("Module") or base in found for base in bases):
                    found[node.name] = node
        return found

    def has(self, name: str) -> bool:
        """Whether a statement binds the name.

        Raises:
            SyntaxError: none does, but a cell that cannot be parsed seems to.
        """
        if any(name in statement.binds for statement in self.statements):
            return True
        definition = re.compile(rf"^(class|def)\s+{name}\b|^{name}\s*=", re.MULTILINE)
        for cell in self.cells:
            if cell.error is not None and definition.search(cell.source):
                raise cell.error
        return False

    def define(self, module: ModuleType, name: str) -> None:
        """Execute in `module` what `name` needs and has not run, in the notebook's order."""
        fresh = sorted(needed(self.statements, name) - self.done)
        self.done.update(fresh)
        flags = _future_flags(self.statements)
        for index in fresh:
            statement = self.statements[index]
            cell = self.cells[statement.cell]
            body = ast.Module(body=[statement.node], type_ignores=[])
            code = compile(body, cell.filename, "exec", flags=flags, dont_inherit=True)
            exec(code, vars(module))
            self._place(module, statement)

    def _place(self, module: ModuleType, statement: Statement) -> None:
        """From Python 3.13 on, `inspect.getsource` of a class goes by a line in `__file__`."""
        node = statement.node
        if isinstance(node, ast.ClassDef) and len(self.cells) > 1:
            made = vars(module)[node.name]
            if hasattr(made, "__firstlineno__"):
                before = self.cells[: statement.cell]
                made.__firstlineno__ += sum(len(_lines(cell)) for cell in before)


def text(path: Path) -> str:
    """A Python file's text, in the encoding that it declares."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise AdaptError(f"cannot read {path}: {error}") from error


def identifier(stem: str) -> str:
    """A file's name as a name in Python."""
    return re.sub(r"\W", "_", f"_{stem}" if stem[:1].isdigit() else stem)


def read(path: Path) -> Cells:
    """Parse a notebook's code cells; one that is broken matters only if it is needed.

    Raises:
        AdaptError: not a notebook.
    """
    sources = _code_cells(path)
    cells, statements = [], []
    for number, source in enumerate(sources, 1):
        filename = f"{path}#cell-{number}"
        cleaned, tree, error = _parse(source, filename)
        if error is not None:
            error.filename, error.text = filename, error.text or ""
        cell = Cell(filename, cleaned, error)
        cells.append(cell)
        statements += [analysed(number - 1, node) for node in tree.body]
        linecache.cache[filename] = (len(cleaned), None, _lines(cell), filename)
    # `inspect.getsource` of a class reads the lines of its module's __file__.
    lines = [line for cell in cells for line in _lines(cell)]
    linecache.cache[str(path)] = (sum(map(len, lines)), None, lines, str(path))
    return Cells(path, cells, statements)


def whole_file(path: Path, source: str, tree: ast.Module) -> Cells:
    """A Python file as a notebook of one cell."""
    linecache.checkcache(str(path))
    return Cells(path, [Cell(str(path), source)], [analysed(0, node) for node in tree.body])


def register(module: ModuleType, cells: Cells) -> None:
    """Make `module` the one that `cells` is executed in."""
    module.__file__ = str(cells.path)
    _cells_of[module.__name__] = cells


def lookup(module: ModuleType, name: str) -> Any:
    """A global of a module, executing what it needs where the module is made of cells.

    Raises:
        AttributeError: there is none of that name.
    """
    cells = _cells_of.get(module.__name__)
    if cells is not None and name not in vars(module) and cells.has(name):
        cells.define(module, name)
    return getattr(module, name)


def _code_cells(path: Path) -> list[str]:
    """The sources of the code cells."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        code = [cell["source"] for cell in document["cells"] if cell["cell_type"] == "code"]
        return [source if isinstance(source, str) else "".join(source) for source in code]
    except json.JSONDecodeError as error:
        raise AdaptError(f"{path} is no notebook: not JSON: {error}") from None
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise AdaptError(
            f"{path} is no notebook of format 4, with a list of cells "
            f"({type(error).__name__}: {error}); open and save it in Jupyter"
        ) from None
    except OSError as error:
        raise AdaptError(f"cannot read {path}: {error}") from error


def _lines(cell: Cell) -> list[str]:
    return [line + "\n" for line in cell.source.split("\n")]


def _parse(source: str, filename: str) -> tuple[str, ast.Module, SyntaxError | None]:
    """A cell without its magics, every line where it was; with no statements where it is broken.

    A line that only looks like a magic, such as `% 3)` in an expression over two lines, parses,
    so only lines that Python refuses are taken for magics.
    """
    nothing = ast.Module(body=[], type_ignores=[])
    lines = source.replace("\r\n", "\n").split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    magic = re.match(r"\s*%%(\w+)", lines[first])
    if magic and magic[1] not in TRANSPARENT:
        return "\n" * (len(lines) - 1), nothing, None
    if magic:
        lines[first] = ""
    while True:
        text = "\n".join(lines)
        try:
            return text, ast.parse(text, filename), None
        except (SyntaxError, ValueError) as error:
            fault = error if isinstance(error, SyntaxError) else SyntaxError(str(error))
            if not _without_magic(lines, (fault.lineno or 0) - 1):
                return text, nothing, fault


def _without_magic(lines: list[str], at: int) -> bool:
    """Replace the magic in line `at`, or else the first in the cell, by `pass`; False: no magic."""
    order = [at, *range(len(lines))] if 0 <= at < len(lines) else range(len(lines))
    found = next((i for i in order if MAGIC.match(lines[i])), None)
    if found is None:
        return False
    indent = re.match(r"\s*", lines[found])
    goes_on = True
    while goes_on and found < len(lines):
        goes_on = lines[found].endswith("\\")
        lines[found] = f"{indent[0] if indent else ''}pass"
        found += 1
    return True


def _future_flags(statements: list[Statement]) -> int:
    """A notebook's `from __future__` imports hold for all of its cells."""
    names = [
        alias.name
        for statement in statements
        if isinstance(statement.node, ast.ImportFrom) and statement.node.module == "__future__"
        for alias in statement.node.names
    ]
    return sum({getattr(__future__, name).compiler_flag for name in names})
