"""From `FILE.py:Class`, `FILE.ipynb:Class` or `package.module:Class` to the class itself."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import itertools
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from torch import nn

from compat.errors import AdaptError, listed
from compat.user_code import described, is_users
from compat.user_models import notebook

_numbers = itertools.count(1)
_siblings: set[str] = set()  # modules that a target imported from its own folder


def load_class(target: str) -> type[nn.Module]:
    """Import the class that `target` names; of a notebook, run only what the class needs.

    Without `:Class`, the one model in the target that is no part of another.

    Raises:
        AdaptError: nothing is there, it cannot be imported, or it is no `nn.Module` class.
    """
    place, name = _parse(target)
    _forget_siblings()
    path = Path(place).expanduser().absolute()
    if path.suffix == ".ipynb":
        _check_file(path, place)
        return _from_cells(notebook.read(path), place, name)
    if path.suffix == ".py":
        _check_file(path, place)
        return _from_file(path, place, name)
    if not re.fullmatch(r"\w+(\.\w+)*", place):
        raise AdaptError(
            f"{target!r} names no model; expected FILE.py:Class, FILE.ipynb:Class or "
            "package.module:Class"
        )
    return _from_package(place, name)


def _parse(target: str) -> tuple[str, str | None]:
    """The place and the class; a colon inside a path, as in `C:\\gpt.py`, is no separator."""
    place, colon, name = target.strip().rpartition(":")
    if not colon or re.search(r"[\\/]|\.(py|ipynb)$", name):
        return target.strip(), None
    return place, name.strip() or None


def _check_file(path: Path, place: str) -> None:
    if path.is_file():
        return
    near = [p.name for p in path.parent.glob("*") if p.suffix in (".py", ".ipynb")]
    close = difflib.get_close_matches(path.name, sorted(near), 1)
    hint = f"did you mean {close[0]!r}?" if close else "check the path"
    raise AdaptError(f"no file {place!r} ({path}); {hint}")


# Importing.


def _from_file(path: Path, place: str, name: str | None) -> type[nn.Module]:
    """Import a file whole, or, where it trains as it is imported, only what the class needs."""
    source = notebook.text(path)
    with _explained(place):
        tree = ast.parse(source, str(path))
    if _trains(tree):
        return _from_cells(notebook.whole_file(path, source, tree), place, name)
    linecache.checkcache(str(path))
    levels = [n.level for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    depth = min(max(levels, default=0), len(path.parents) - 1)
    package = [folder.name for folder in reversed(path.parents[:depth])]
    unique = ".".join([*package, f"{notebook.identifier(path.stem)}_{next(_numbers)}"])
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    folders = [path.parent, path.parents[depth]]

    def run() -> None:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))

    _execute(module, run, folders, place)
    return _choose(module, tree, place, name)


def _from_cells(cells: notebook.Cells, place: str, name: str | None) -> type[nn.Module]:
    """Execute the statements that the class needs, and no others."""
    known = cells.models()
    if name is None:
        name = _only_root(known, place)
    module = ModuleType(f"{notebook.identifier(cells.path.stem)}_{next(_numbers)}")
    notebook.register(module, cells)
    with _explained(place):
        found = cells.has(name)
    if not found:
        raise AdaptError(_no_such(place, name, list(known)))
    _execute(module, lambda: cells.define(module, name), [cells.path.parent], place)
    return _checked(module, place, name, list(known))


def _from_package(place: str, name: str | None) -> type[nn.Module]:
    """Import `package.module`, from the working directory or from what is installed."""
    with _import_path([]), _explained(place):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise AdaptError(
                f"no module {place!r}: Python finds no {error.name!r}, neither here "
                f"({Path.cwd()}) nor installed; a file is named with its suffix, FILE.py:Class"
            ) from None
    path = Path(getattr(module, "__file__", None) or "")
    source = notebook.text(path) if path.suffix == ".py" else ""
    return _choose(module, ast.parse(source), place, name)


def _execute(module: ModuleType, run: Callable[[], None], folders: list[Path], place: str) -> None:
    """Run a module's code with its folders on the import path."""
    sys.modules[module.__name__] = module
    before = set(sys.modules)
    try:
        with _import_path(folders), _explained(place):
            run()
    except BaseException:
        del sys.modules[module.__name__]
        raise
    finally:
        _siblings.update(
            name
            for name in set(sys.modules) - before - {module.__name__}
            if any(folder in _place_of(name).parents for folder in folders)
        )


def _place_of(name: str) -> Path:
    """Where a module was imported from; the root, for one that is built in or a library's."""
    place = str(getattr(sys.modules[name], "__file__", None) or "/")
    return Path(place if is_users(place) else "/")


def _forget_siblings() -> None:
    """Another target's `config.py` is not this one's, and an edited one is to be read again."""
    for name in _siblings:
        sys.modules.pop(name, None)
    _siblings.clear()


@contextlib.contextmanager
def _import_path(folders: list[Path]) -> Iterator[None]:
    """The folders and then the working directory first in sys.path, for as long as it takes."""
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in (*folders, Path.cwd())]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _trains(tree: ast.Module) -> bool:
    """Whether importing the file would train: `.backward()` outside functions and main guards."""
    for statement in tree.body:
        guard = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        if guard or isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        if any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(statement)):
            return True
    return False


# Choosing the class.


def _choose(module: ModuleType, tree: ast.Module, place: str, name: str | None) -> type[nn.Module]:
    nodes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    own = {
        key: nodes[key]
        for key, value in vars(module).items()
        if key in nodes and isinstance(value, type) and issubclass(value, nn.Module)
    }
    return _checked(module, place, _only_root(own, place) if name is None else name, list(own))


def _only_root(classes: Mapping[str, ast.ClassDef], place: str) -> str:
    """The class that no other class mentions."""
    mentioned = {
        node.id
        for name, definition in classes.items()
        for node in ast.walk(definition)
        if isinstance(node, ast.Name) and node.id != name
    }
    roots = [name for name in classes if name not in mentioned]
    if len(roots) == 1:
        return roots[0]
    if not classes:
        raise AdaptError(f"{place} defines no nn.Module class")
    raise AdaptError(
        f"{place} has {len(roots)} nn.Module classes that are no other's part: {listed(roots)}; "
        f"say which: {place}:{(roots or list(classes))[-1]}"
    )


def _checked(module: ModuleType, place: str, name: str, known: list[str]) -> type[nn.Module]:
    """The class of that name, if it is there and a PyTorch module's."""
    if not hasattr(module, name):
        raise AdaptError(_no_such(place, name, known))
    found = getattr(module, name)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    if isinstance(found, nn.Module):
        what = f"a model already built; name its class, {place}:{type(found).__name__}"
    else:
        kind = "class" if isinstance(found, type) else type(found).__name__
        what = f"a {kind}, not an nn.Module class" + _there_are(known)
    raise AdaptError(f"{name!r} in {place} is {what}")


def _no_such(place: str, name: str, known: Iterable[str]) -> str:
    folded = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), list(folded), 1)
    hint = f"; did you mean {folded[close[0]]!r}?" if close else ""
    return f"no class {name!r} in {place}{hint}{_there_are(list(known))}"


def _there_are(known: list[str]) -> str:
    return f"; its nn.Module classes: {listed(known)}" if known else "; it has no nn.Module class"


@contextlib.contextmanager
def _explained(place: str) -> Iterator[None]:
    """Turn whatever importing raises into an AdaptError that says what and where."""
    try:
        yield
    except AdaptError:
        raise
    except SyntaxError as error:
        text = f": {error.text.strip()}" if error.text else ""
        raise AdaptError(
            f"{place} cannot be imported: {type(error).__name__}: {error.msg}, "
            f"at {error.filename}:{error.lineno}{text}"
        ) from error
    except (Exception, SystemExit) as error:
        advice = "\n  put what ends the program under `if __name__ == '__main__':`"
        raise AdaptError(
            f"{place} cannot be imported: {described(error)}"
            + (advice if isinstance(error, SystemExit) else "")
        ) from error
