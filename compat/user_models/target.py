"""From `FILE.py:make_model`, `FILE.ipynb:Class` or `package.module:Class` to the user's object."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.abc
import importlib.machinery
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from compat.errors import AdaptError, listed
from compat.user_code import (
    MAKE_MODEL,
    SIBLINGS,
    is_users,
    names_in,
    project_folders,
    translated,
    users_frames,
)
from compat.user_models.missing import Unknown, despite_missing_libraries, is_missing
from compat.user_models.notebook import (
    LazyModule,
    is_main_guard,
    needs_main,
    python_tree,
    read_source,
    syntax_error,
    unguarded,
)
from compat.user_models.synonyms import AMBIGUOUS, CLASSES, CONFIG_NAMES, plain, takes_sizes
from compat.user_models.time_limit import limited_time
from compat.user_models.usage import is_users_class, user_modules, users_folders

Forward = Callable[[nn.Module, Tensor], Tensor]
Model = Callable[..., nn.Module]  # a class, or a function that returns a model
Found = TypeVar("Found")

_numbers = itertools.count(1)
_SLOW: set[str] = set()  # files that did not end in time, and are not executed as a whole again
# Words in the code of a language model.
FEATURES = (r"(?i)embedding\(|vocab", r"(?i)softmax|attention|nn\.Transformer|block\(")
# Words that distinguish the last of several models in a lesson from those before it.
PARTS = (
    "(?i)pos",
    "(?i)norm",
    "(?i)mlp|feed_?forward|ffn?wd",
    "(?i)block|layer(?!_?norm)",
    "(?i)head",
)
ENCODER = re.compile("(?i)encoder(?!.*decoder)|bert|bidirectional")  # in the name of a model
RECURRENT = re.compile(r"nn\.(LSTM|GRU|RNN)(Cell)?\(")
OTHER_MODELS = re.compile(
    "Classif|Pooled|Regress|Reward|Scalar|Critic|ValueHead|Discriminat|Fine_?[Tt]un|Similarity|Entail"
    "|Choice|Tagg|Question|Sentiment|Cls(?![a-z])"
)
# Names of an argument that is a model.
MODEL = re.compile(r"(.*(model|gpt|transformer|decoder)|net(work)?|lm|llm|backbone|module)")
INIT = "__init__"
MODULE = "__import__('torch').nn.Module"  # in a class that does not derive from it itself
PYTHON = (".py", "/*.py")  # after the name of a module or a package
# Names of registries of classes and of their decorators, and lines with such a decorator.
REGISTERS = re.compile("(?i)regist")
REGISTERED = re.compile(r"(?im)^@[\w.]*regist\w*")
DOWNLOADS = re.compile(rb"\.from_pretrained\(|\bload_dataset\(|\b(hf_hub|snapshot)_download\(")


def load_target(target: str, notes: list[str] | None = None) -> Callable[..., nn.Module]:
    """Import the function or the class that `target` names.

    Of a notebook, and of a file that trains at module level, only the statements that it needs are
    executed. If the target has no `:NAME`, it means the function `make_model`, or else the
    `nn.Module` class that no other class of the file uses. Of several such classes, those that
    look most like a language model are preferred, and of these the last is meant.

    Args:
        target: the file and the name.
        notes: receives a note where one of several classes was chosen.

    Raises:
        AdaptError: The target does not exist, cannot be imported, or is neither a function nor an
            `nn.Module` class.
    """
    place, name = _parsed(target)
    choose = partial(_chosen, place=place, name=name, notes=[] if notes is None else notes)
    _forget_siblings()  # another target's `config.py` is not this one's; a file may be edited
    path = Path(place).expanduser().absolute()
    if path.suffix in (".py", ".ipynb"):
        _check_file(path, place)
        with translated(f"{place} cannot be imported"):
            found = _from_file(path, choose)
        _import_registered(found)
        if path.suffix == ".py" and notes is not None and (error := syntax_error(path)):
            notes.append(
                f"{place} is not Python at line {error.lineno} ({type(error).__name__}: "
                f"{error.msg}), so only the statements before were executed"
            )
        return found
    if not re.fullmatch(r"\w+(\.\w+)*", place):
        raise AdaptError(
            f"{target!r} does not name a model. Pass FILE.py:make_model (a function that "
            "returns the model), FILE.py:Class, FILE.ipynb:Class or package.module:Class"
        )
    module = _package_module(place)
    path = Path(getattr(module, "__file__", None) or "")
    body = ast.parse(read_source(path)).body if path.suffix == ".py" else []
    return choose(module, body)


def _import_registered(target: Model) -> None:
    """Import the files that add their classes to a registry which the target's modules have.

    An author's training script imports them, and not the file of the model. An example is
    `@register("norm", "rmsnorm")`.
    """
    registries = [m for m in user_modules(target) if any(map(REGISTERS.search, vars(m)))]
    imported = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    with finding_modules(users_folders(target)):
        for module in registries if isinstance(target, type) else []:
            for file in sorted(Path(str(module.__file__)).parent.glob("*.py")):
                if str(file) not in imported and REGISTERED.search(read_source(file)):
                    with contextlib.suppress(Exception):
                        importlib.import_module(f"{module.__package__}.{file.stem}".lstrip("."))


def other_targets(target: str, chosen: str) -> list[str]:
    """Return the other language models in a file of which the target names none, the last first.

    Those that the chosen class uses, or derives from, come after the others.

    Args:
        target: the file.
        chosen: the name of the class that `load_target` chose.
    """
    place, name = _parsed(target)
    path = Path(place).expanduser().absolute()
    if name is not None or path.suffix not in (".py", ".ipynb"):
        return []

    def others(module: ModuleType, body: Sequence[ast.stmt]) -> list[str]:
        every, classes = _unused(_model_classes(module, body), body)
        parts = _used_by(classes[chosen], classes) - {chosen} if chosen in classes else set()
        used = [name for name in reversed(classes) if name in parts]
        return _whole(dict.fromkeys([*reversed(every), *used]), classes)

    with contextlib.suppress(AdaptError):
        return [f"{place}:{name}" for name in _from_file(path, others) if name != chosen]
    return []


def part_classes(model: type) -> list[type[nn.Module]]:
    """Return the user's module classes of which a model consists, before those that these use.

    They are found by the names in their code, so that the model need not be built.
    """
    queue = [model]
    for cls in queue:  # grows
        for base in (base for base in cls.__mro__ if is_users_class(base)):
            in_module = vars(sys.modules[base.__module__])
            # As in `layers.Block(...)`, where `layers` is a module of the user's.
            imported = [v for v in in_module.values() if isinstance(v, ModuleType)]
            files = {module: getattr(module, "__file__", None) for module in imported}
            users = [module for module, file in files.items() if file and is_users(file)]
            places = [in_module, vars(base), *map(vars, users)]  # base may contain a class
            methods = [value for value in vars(base).values() if isinstance(value, FunctionType)]
            names = dict.fromkeys(name for each in methods for name in names_in(each.__code__))
            values = [place[name] for name in names for place in places if name in place]
            modules = [v for v in values if isinstance(v, type) and issubclass(v, nn.Module)]
            new = [each for each in modules if is_users_class(each) and each not in queue]
            queue += dict.fromkeys(new)
    return queue[1:]


def load_forward(text: str) -> Forward:
    """Load how a model is called: `FILE.py:function`, or an expression such as `model(ids)[0]`.

    The function is called with the model and ids (B, T); the expression reads `model`, `ids` and
    `torch`, and may itself be a function, such as `lambda model, ids: model(ids)[0]`.

    Raises:
        AdaptError: the function cannot be loaded, or the expression is not Python.
    """
    if re.search(r"\.py:\w+$", text.strip()):
        return cast(Forward, load_target(text))
    try:
        code = compile(text.strip(), "<forward>", "eval")
    except SyntaxError as error:
        raise AdaptError(
            f"{text!r} is neither FILE.py:function nor a Python expression ({error.msg}). Pass "
            'one that returns the logits, for example "model(ids)[0]"'
        ) from None

    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        found: object = eval(code, {"model": model, "ids": ids, "torch": torch})
        if isinstance(found, FunctionType):
            found = found(model, ids)
        if not isinstance(found, Tensor):
            raise AdaptError(
                f"the expression {text.strip()!r} has the type {type(found).__name__}, but a "
                'tensor of logits was expected. Select it, for example "model(ids)[0]"'
            )
        return found

    return forward


def downloads(target: str) -> bool:
    """Return whether the target's file, or a Python file beside it, may download from the hub."""
    path = Path(_parsed(target)[0]).expanduser()
    files = [path, *path.parent.glob("*.py")] if path.is_file() else []
    return any(DOWNLOADS.search(file.read_bytes()) for file in files)


def _parsed(target: str) -> tuple[str, str | None]:
    """Split into place and name, but not at a colon inside a path, as in `C:\\gpt.py`."""
    place, colon, name = target.strip().rpartition(":")
    if not colon or re.search(r"[\\/]|\.(py|ipynb)$", name):
        return target.strip(), None
    return place, name.strip() or None


def _check_file(path: Path, place: str) -> None:
    if path.is_file():
        return
    near = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".py", ".ipynb"))
    close = difflib.get_close_matches(path.name, near, 1)
    hint = f"Did you mean {close[0]!r}?" if close else "Check the path"
    raise AdaptError(f"no file {place!r} ({path}). {hint}")


# Importing.


def _from_file(path: Path, choose: Callable[[ModuleType, Sequence[ast.stmt]], Found]) -> Found:
    """Import a file as a new module, and return what `choose` finds in it, such as a class."""
    stem = re.sub(r"\W", "_", f"_{path.stem}" if path.stem[:1].isdigit() else path.stem)
    unique = f"{stem}_{next(_numbers)}"
    tree = python_tree(path) if path.suffix == ".py" else ast.Module(body=[], type_ignores=[])
    _derive_from_module(tree)
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    root, parts = path.parent, list[str]()
    while (
        len(parts) < max(levels, default=0)
        or (root / "__init__.py").is_file()
        or (parts and _is_library(parts[0], root))  # models/torch/gpt.py
    ):
        parts.insert(0, root.name)
        root = root.parent
    folders = [path.parent, root]
    deferred = _DeferredFinder()

    def execute(lazily: bool, folders: list[Path] = folders) -> Found:
        """Execute the file, and once more for each module of its project that fails.

        Modules that methods import are imported before, so that those that fail are known.
        """

        def despite_failing_modules(inner: Sequence[str]) -> Found:
            while True:
                try:
                    return execute_once(lazily, folders, inner)
                except (Exception, SystemExit) as error:
                    if not deferred.defers(error, path):
                        raise

        inner = _imported_in_methods(tree, folders)
        if inner:
            with contextlib.suppress(Exception, SystemExit):  # of one that the model may not need
                return despite_missing_libraries(partial(despite_failing_modules, inner))
        return despite_missing_libraries(partial(despite_failing_modules, ()))

    def execute_once(lazily: bool, folders: list[Path], inner: Sequence[str]) -> Found:
        name = ".".join([*parts, unique])
        lazy = LazyModule(name, path, tree) if lazily else None
        module = lazy.module if lazy else ModuleType(name)
        module.__file__, module.__package__ = str(path), ".".join(parts)
        with _importing(module, folders, deferred):
            if lazy is None:
                with limited_time():
                    exec(compile(tree, str(path), "exec", dont_inherit=True), vars(module))
            found = choose(module, [s.node for s in lazy.statements] if lazy else tree.body)
            with limited_time():
                for imported_name in inner:
                    importlib.import_module(imported_name, module.__package__)
            return found

    def in_package() -> Found:
        """Import the file as other modules would: under its own name, after its package.

        These modules may form an import cycle, or a subpackage may have the name of a library.
        """
        _forget_siblings()
        holder = ModuleType(unique)
        holder.__file__ = str(path)
        try:
            with _importing(holder, [root], deferred):
                with limited_time():
                    module = importlib.import_module(".".join([*parts, path.stem]))
                return choose(module, tree.body)
        except BaseException:
            _forget_siblings()
            raise

    runs_long = str(path) in _SLOW or _trains(tree)
    if path.suffix == ".ipynb" or runs_long or needs_main(tree) or _hides_model(tree):
        return execute(lazily=True)
    try:
        try:
            return execute(lazily=False)
        except ModuleNotFoundError as error:
            # A file model/model.py hides the package `model` that it belongs to.
            package = str(error.name).partition(".")[0]
            outer = next((f for f in path.parent.parents if (f / package).is_dir()), None)
            if "is not a package" not in str(error) or outer is None:
                raise
            sys.modules.pop(package, None)
            return execute(False, [outer])
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError):
            _SLOW.add(str(path))
        if not isinstance(error, AdaptError):  # of a statement that the target may not need
            with contextlib.suppress(Exception):
                return execute(lazily=True)
        with contextlib.suppress(Exception):
            return despite_missing_libraries(in_package)
        raise error


def _imported_in_methods(tree: ast.Module, folders: list[Path]) -> list[str]:
    """Return the modules in the folders that methods of classes import, with dots if relative."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = [node for cls in classes for node in _functions(cls.body)]
    nodes = [node for method in methods for node in ast.walk(method)]
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += ["." * n.level + (n.module or "") for n in nodes if isinstance(n, ast.ImportFrom)]
    return [name for name in dict.fromkeys(names) if _is_in(folders, name)]


def _is_in(folders: list[Path], name: str) -> bool:
    """Return whether the folders have a module, which may be relative, with dots before it."""
    top = name.partition(".")[0]
    found = (any(folder.glob(f"{top}{end}")) for folder in folders for end in PYTHON)
    return bool(name.strip(".")) and (not top or any(found))


def _is_library(name: str, folder: Path) -> bool:
    """Return whether a module of this name was imported from elsewhere."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and folder not in Path(file).parents


def _forget_siblings() -> None:
    """Remove the modules that were imported with a file, so that they are imported again."""
    for sibling in SIBLINGS:
        sys.modules.pop(sibling, None)
    SIBLINGS.clear()


def imported_siblings() -> dict[str, ModuleType]:
    """Return the modules that were imported with a file."""
    return {name: sys.modules[name] for name in SIBLINGS if name in sys.modules}


def restore_siblings(siblings: Mapping[str, ModuleType]) -> None:
    """Replace the modules that were imported with a file by those that were before it."""
    _forget_siblings()
    sys.modules.update(siblings)
    SIBLINGS.update(siblings)


def _add_siblings(before: set[str], top: Path) -> None:
    """Remember the modules below a project's top folder that were imported since `before`."""
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        places = getattr(module, "__path__", ())  # of a package without __init__.py
        file = getattr(module, "__file__", None) or next(iter(places), "<built-in>")
        if is_users(file) and top in (Path(file), *Path(file).parents):
            SIBLINGS.add(name)


def _forget_incomplete() -> None:
    """Remove modules that hold a package whose import failed, so that the next import sets it.

    Others remain, so that a file finds the modules beside it if their package cannot be imported.
    """

    def failed(value: object) -> bool:
        if not isinstance(value, ModuleType) or sys.modules.get(value.__name__) is value:
            return False
        return is_users(str(getattr(value, "__file__", None) or "<built-in>"))

    incomplete = [""]
    while incomplete:
        loaded = {name: sys.modules[name] for name in SIBLINGS if name in sys.modules}
        incomplete = [n for n, m in loaded.items() if any(map(failed, list(vars(m).values())))]
        for name in incomplete:
            del sys.modules[name]


def _package_module(place: str) -> ModuleType:
    """Import `package.module` from the working directory or from what is installed."""
    with _import_path([]), translated(f"{place} cannot be imported"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise AdaptError(
                f"no module {place!r}: Python finds no {error.name!r} in {Path.cwd()} or among the "
                "installed packages. Name a file with its suffix, FILE.py:make_model"
            ) from None


@contextlib.contextmanager
def finding_modules(folders: list[Path]) -> Iterator[None]:
    """Let code in functions import modules in the folders of its project, after all others."""
    before, path = set(sys.modules), list(sys.path)
    sys.path += [str(folder) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = path
        if folders:
            _add_siblings(before, folders[-1])


def imported(module: str, name: str, folders: list[Path]) -> Any:
    """Import a name from a module of the user's project, whose folders are given."""
    before = set(sys.modules)
    with _import_path(folders):
        found = getattr(importlib.import_module(module), name)
    _add_siblings(before, folders[-1])
    return found


@contextlib.contextmanager
def _importing(
    module: ModuleType, folders: list[Path], deferred: _DeferredFinder
) -> Iterator[None]:
    """Execute a module's code in the body, with its folders on the import path.

    Modules that are not found elsewhere are searched by `_AboveFinder`.
    `sys.argv` contains only the file's name.
    """
    sys.modules[module.__name__] = module
    before, argv, folder = set(sys.modules), sys.argv, Path.cwd()
    sys.argv = [str(module.__file__)]
    above = _AboveFinder(folders, Path(str(module.__file__)))
    sys.meta_path.append(above)
    sys.meta_path.insert(0, deferred)
    failed = True
    try:
        with _import_path(folders):
            yield
        failed = False
    finally:
        sys.argv = argv
        os.chdir(folder)  # the code may have called os.chdir
        sys.meta_path.remove(above)
        sys.meta_path.remove(deferred)
        _add_siblings(before, above.top)
        if failed:
            del sys.modules[module.__name__]
            _forget_incomplete()


class _AboveFinder:
    """Finds modules in the folders above a file, up to the top folder of its project.

    A package with another name than its folder is found too: that of `from package.part import …`
    in a file beside or below `part.py` or a folder `part`. So are modules in the folders that the
    file adds to sys.path, as in `sys.path.append("../part")`, which is meant for scripts that are
    run in the file's folder, the only module of its name in a folder below the file's, and
    `part.py` in a folder `part` without `__init__.py`.

    Attributes:
        top: the top folder of the project.
    """

    def __init__(self, folders: list[Path], file: Path) -> None:
        folder = folders[0]
        self._folders = project_folders(folder)
        self.top = self._folders[-1]
        self._path = {*sys.path, *map(str, (*folders, Path.cwd()))}
        self._source = source = read_source(file) if file.suffix == ".py" else ""
        pattern = r"^from (\w+)\.(\w+)([\w.]*) import \(?([\w, ]*)"
        imports = re.findall(pattern, source, re.MULTILINE)
        self._renamed = {
            package: above
            for package, part, inner, names in reversed(imports)
            for above in reversed(self._folders)
            if (above / part).is_dir()
            or _may_be(
                above / f"{part}.py",
                f"{package}.{part}",
                [] if inner else re.findall(r"\w+", names),
            )
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or "." in name:
            return None
        added = (self._folders[0] / os.path.relpath(p) for p in sys.path if p not in self._path)
        above = (place for folder in self._folders for place in (folder, folder / "src"))
        for place in map(Path.resolve, (*added, *above)):
            code = (f"{name}.py", f"{name}/*.py", f"{name}/*/*.py")  # not a folder of data
            if any(any(place.glob(pattern)) for pattern in code):
                place = place / name if self._is_module_in_folder(name, place) else place
                return importlib.machinery.PathFinder.find_spec(name, [str(place)])
        inner = [*self._folders[0].glob(f"*/{name}.py"), *self._folders[0].glob(f"*/*/{name}.py")]
        if len(inner) == 1:  # in a folder that the author's machine has on its path
            return importlib.machinery.PathFinder.find_spec(name, [str(inner[0].parent)])
        if name not in self._renamed:
            return None
        package = importlib.machinery.ModuleSpec(name, None, is_package=True)
        package.submodule_search_locations = [str(self._renamed[name])]
        return package

    def _is_module_in_folder(self, name: str, place: Path) -> bool:
        """Return whether a folder without `__init__.py` contains a module of the same name."""
        as_package = rf"\b(from|import) {name}\.|\bfrom {name} import {name}\b"
        alone = (
            not (place / f"{name}.py").is_file() and not (place / name / "__init__.py").is_file()
        )
        inside = (place / name / f"{name}.py").is_file()
        return alone and inside and not re.search(as_package, self._source)


def _may_be(file: Path, module: str, names: list[str]) -> bool:
    """Return whether a Python file may be a module that one of the names is imported from.

    It does not import the module itself, as a file config.py does that imports `yacs.config`.
    """
    text = read_source(file) if file.is_file() else f"from {module} import"
    defined = not names or any(re.search(rf"\b{name}\b", text) for name in names)
    return defined and f"from {module} import" not in text


class _DeferredFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the project that raise an exception when they are imported.

    A module that opens a missing data file, asks for the version of a project that is not
    installed, or ends the program without a variable of the environment, is imported as a module
    that executes only the statements for the names that are read from it.
    """

    def __init__(self) -> None:
        self._files: set[str] = set()

    def defers(self, error: BaseException, path: Path) -> bool:
        """Add the file that raised an error while it was imported, unless it is the target's."""
        cause = error.__cause__ or error if isinstance(error, AdaptError) else error
        importing = [f.filename for f in users_frames(cause) if f.name == "<module>"]
        if isinstance(cause, SyntaxError) and is_users(str(cause.filename)):
            importing.append(str(cause.filename))  # in the syntax of Python 3.12
        # Its subclasses are raised where a version is asked for, or a missing library used.
        if not importing or type(cause) is ModuleNotFoundError:
            return False
        done = {str(path), *self._files}  # a module that fails again makes its importer fail
        fresh = [file for file in importing if file.endswith(".py") and file not in done]
        self._files |= {*fresh[-1:]}
        return bool(fresh)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path if self._files else ():
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.origin in self._files:
                spec.loader = self
                return spec
            if spec is not None:
                break
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return LazyModule(spec.name, Path(str(spec.origin))).module

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def _import_path(folders: list[Path]) -> Iterator[None]:
    """Put the folders and then the working directory first in sys.path."""
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in (*folders, Path.cwd())]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _trains(tree: ast.Module) -> bool:
    """Return whether importing a file calls `.backward()`, `.fit(…)` or a function that does.

    What stands below the main guard does not count.
    """
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    called = {node.name: _called(node) for node in functions}
    training, before = {"backward", "fit"}, 0
    while len(training) > before:
        before = len(training)
        training |= {name for name, callees in called.items() if callees & training}
    script = (node for node in tree.body if node not in functions and not is_main_guard(node))
    return any(_called(node) & training for node in script)


def _hides_model(tree: ast.Module) -> bool:
    """Return whether a file defines language models only in functions or below the main guard."""
    nothing = ModuleType("nothing")
    seen, every = _model_classes(nothing, tree.body), _model_classes(nothing, unguarded(tree))
    return len(every) > len(seen) and not _whole(seen, seen)


def _derive_from_module(tree: ast.Module) -> None:
    """Let the model of a file that is a plain class with parts in `nn` derive from nn.Module."""
    plain_names, plain_classes = {"object"}, dict[str, ast.ClassDef]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and plain_names.issuperset(map(ast.unparse, node.bases)):
            plain_names.add(node.name)
            if _functions(node.body, "forward") and _functions(node.body, INIT):
                plain_classes[node.name] = node
    if not plain_classes:
        return
    modules = _model_classes(ModuleType("nothing"), tree.body)
    every = modules | plain_classes
    if _whole(modules, modules) or not _whole(plain_classes, every):
        return
    for node in plain_classes.values():
        constructor = _functions(node.body, INIT)[0]
        if _used_by(node, every) or re.search(r"\bnn\.", ast.unparse(constructor)):
            base = ast.parse(MODULE, mode="eval").body
            start = ast.parse(f"{MODULE}.__init__({constructor.args.args[0].arg})").body
            node.bases = [b for b in node.bases if ast.unparse(b) != "object"] + [base]
            constructor.body[:0] = start
            for new in (base, *start):
                for each in ast.walk(new):
                    ast.copy_location(each, node)


def _called(tree: ast.AST) -> set[str]:
    """Return the names of the functions, classes and methods that code calls."""
    callees = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {getattr(callee, "attr", getattr(callee, "id", "")) for callee in callees}


# Choosing the function or class.


def _chosen(
    module: ModuleType, body: Sequence[ast.stmt], place: str, name: str | None, notes: list[str]
) -> Model:
    """Return the function or class of that name, or the likeliest one."""
    classes = _model_classes(module, body)
    known = list(classes)
    if name is None and not classes and not _functions(body, "make_model"):
        imported_model = _imported_model(module, body, place, notes)
        if imported_model is not None:
            return imported_model
    if name is None:
        name = "make_model" if _functions(body, "make_model") else _sequential(classes, body)
        name = name or _root(classes, body, place, notes)
        name = _enclosing(name, body) or name
    there_are = f"Its nn.Module classes: {listed(known)}" if known else "It has no nn.Module class"
    try:
        found = getattr(module, name)
    except AttributeError:
        folded = {other.lower(): other for other in known}
        close = difflib.get_close_matches(name.lower(), list(folded), 1)
        hint = f" Did you mean {folded[close[0]]!r}?" if close else ""
        raise AdaptError(f"no class or function {name!r} in {place}.{hint} {there_are}") from None
    if isinstance(found, Unknown) or is_missing(found):
        with translated(f"{place} cannot be executed"):
            raise found.error()
    if isinstance(found, nn.Module):
        raise AdaptError(
            f"{name!r} in {place} is an instance of a model. Pass its class, "
            f"{place}:{type(found).__name__}, or a function that returns a model"
        )
    if callable(found) and (not isinstance(found, type) or issubclass(found, nn.Module)):
        if name in classes and MODULE in map(ast.unparse, classes[name].bases):
            notes.append(
                f"{name} is a plain class, which compat derived from nn.Module. Write class "
                f"{name}(nn.Module), and call super().__init__() first in its constructor"
            )
        builder = _builder(name, classes, body, module)
        return getattr(module, builder) if builder else found
    kind = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
    raise AdaptError(
        f"{name!r} in {place} is {kind}, but must be a function that returns the model or an "
        f"nn.Module class. {there_are}"
    )


def _model_classes(module: ModuleType, body: Sequence[ast.stmt]) -> dict[str, ast.ClassDef]:
    """Return the module's own nn.Module classes, by their bases if they are not executed yet."""
    found: dict[str, ast.ClassDef] = {}
    for node in _with_blocks(body):
        if isinstance(node, ast.ClassDef):
            value = vars(module).get(node.name)
            bases = [ast.unparse(base) for base in node.bases]
            module_bases = ("Module", "PreTrainedModel")
            named = any(base.endswith(module_bases) or base in found for base in bases)
            if issubclass(value, nn.Module) if isinstance(value, type) else named:
                found[node.name] = node
    return found


def _imported_model(
    module: ModuleType, body: Sequence[ast.stmt], place: str, notes: list[str]
) -> Model | None:
    """Return the language model that a file imports from another one of the user's, if it does."""
    imports = [node for node in _with_blocks(body) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    values = [getattr(module, name, None) for name in sorted(names)]
    folders = [Path(str(module.__file__)).parent]
    for node in (inner for function in _functions(body) for inner in ast.walk(function)):
        if isinstance(node, ast.ImportFrom):  # as in a function that trains the model
            name = "." * node.level + (node.module or "")
            if _is_in(folders, name):
                names |= {alias.name for alias in node.names}
                source = importlib.import_module(name, module.__package__)
                values += [getattr(source, alias.name, None) for alias in node.names]
    values += vars(module).values() if "*" in names else ()  # of a star import, now executed
    models = [v for v in values if isinstance(v, type) and issubclass(v, nn.Module)]
    imported_names = {model.__name__ for model in models}
    for source in dict.fromkeys(sys.modules[model.__module__] for model in models):
        file = getattr(source, "__file__", None) or "<built-in>"
        if is_users(file):
            tree = python_tree(Path(file))
            own = _model_classes(source, tree.body)
            if whole := [name for name in _whole(own, own) if name in imported_names]:
                chosen = _root({name: own[name] for name in whole}, tree.body, place, notes)
                notes.append(f"{place} defines no model. {chosen}, which it imports, was selected")
                return cast(Model, getattr(source, chosen))
    return None


def _with_blocks(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and those in `if`, `try` and `with` blocks, without the main guard."""
    for node in body:
        yield node
        guarded = isinstance(node, ast.If) and is_main_guard(node)
        if not guarded and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for block in ("body", "handlers", "orelse", "finalbody"):
                yield from _with_blocks(getattr(node, block, []))


def _builder(
    name: str, classes: dict[str, ast.ClassDef], body: Sequence[ast.stmt], module: ModuleType
) -> str | None:
    """Return the function with sizes that builds a class, if the constructor takes only its parts.

    Examples are `def make_model(vocab, N, d_model)` for `GPT(decoder, embedding, generator)`, or
    for `class GPT(nn.Sequential)` without a constructor.
    """
    if name not in classes:
        return None
    definition = classes[name]
    inits = _functions(definition.body, INIT)
    parameters = [arg for init in inits for arg in init.args.args[1:]]
    bases = [ast.unparse(base) for base in definition.bases]
    contains = not inits and any(base.endswith(("Sequential", "ModuleList")) for base in bases)
    if not (parameters or contains) or any(plain(a.arg) in CONFIG_NAMES for a in parameters):
        return None
    if not all(_is_module(a.annotation, classes, module) for a in parameters if a.annotation):
        return None
    if takes_sizes({arg.arg for arg in parameters if not arg.annotation} - AMBIGUOUS):
        return None
    for function in _functions_with_sizes(body):
        calls = (n.func for n in ast.walk(function) if isinstance(n, ast.Call))
        if name in {n.id for n in calls if isinstance(n, ast.Name)}:
            return function.name
    return None


def _sequential(classes: dict[str, ast.ClassDef], body: Sequence[ast.stmt]) -> str | None:
    """Return the function with sizes that builds an nn.Sequential of all models in the file.

    They are its parts, such as a block with rotary embeddings; a file may have none.
    """
    models = {*_whole(classes, classes)}
    built = r"return (torch\.)?(nn\.)?Sequential\(|Sequential\(\s*(nn\.)?Embedding\("
    for function in _functions_with_sizes(body):
        if re.search(built, ast.unparse(function)):
            if models <= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}:
                return function.name
    return None


def _enclosing(name: str, body: Iterable[ast.stmt]) -> str | None:
    """Return the function with sizes that defines a class and returns an instance of it."""
    for function in _functions_with_sizes(body):
        made = _called_by(_returned(function))
        defined = [node.name for node in function.body if isinstance(node, ast.ClassDef)]
        if name in defined and name in made:
            return function.name
    return None


def _returned(function: ast.FunctionDef) -> list[ast.expr | None]:
    """Return the values of a function's return statements."""
    return [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]


def _called_by(values: Iterable[ast.expr | None]) -> list[str]:
    """Return what is called where a value is a call."""
    return [ast.unparse(value.func) for value in values if isinstance(value, ast.Call)]


def _functions(body: Iterable[ast.stmt], name: str | None = None) -> list[ast.FunctionDef]:
    """Return the functions that a module or a class defines, or only those of this name."""
    functions = (node for node in body if isinstance(node, ast.FunctionDef))
    return [node for node in functions if name in (None, node.name)]


def _functions_with_sizes(body: Iterable[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield the functions whose arguments are the sizes of a model."""
    for function in _functions(body):
        if takes_sizes([a.arg for a in (*function.args.args, *function.args.kwonlyargs)]):
            yield function


def _is_module(annotation: ast.expr, classes: dict[str, ast.ClassDef], module: ModuleType) -> bool:
    """Return whether an annotation names an nn.Module class of the file or of its imports."""
    name, value = ast.unparse(annotation), None
    with contextlib.suppress(AttributeError):
        value = reduce(getattr, name.split("."), cast(object, module))
    return name in classes or (isinstance(value, type) and issubclass(value, nn.Module))


def _features(name: str, classes: dict[str, ast.ClassDef], patterns: Sequence[str]) -> int:
    """Count the features of a language model that a class and the classes that it uses have.

    Those that the file imports are not known, so the name of a block counts as attention.
    """
    reached, stack = set[str](), [name]
    while stack:
        current = stack.pop()
        if current not in reached:
            reached.add(current)
            stack += _used_by(classes[current], classes)
    text = " ".join(ast.unparse(classes[each]) for each in reached)
    return sum(re.search(pattern, text) is not None for pattern in patterns)


def _used_by(definition: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the classes that a class names, and those of which its constructor takes an instance.

    The parameter for the latter has the name of the class, as in `GPTLMHead(gpt)`. An annotation
    such as `config: GPT.Config` does not name the model.
    """
    types = [n.annotation for n in ast.walk(definition) if isinstance(n, ast.arg)]
    inside = {id(part.value) for part in types if isinstance(part, ast.Attribute)}
    names = (n for n in ast.walk(definition) if isinstance(n, ast.Name) and id(n) not in inside)
    named = {node.id for node in names}
    taken = {plain(name) for name in _constructor_arguments(definition)}
    return {name for name in classes if name in named or plain(name) in taken}


def _constructor_arguments(definition: ast.ClassDef) -> list[str]:
    """Return the names of the positional arguments of a class's constructor."""
    return [arg.arg for f in _functions(definition.body, INIT) for arg in f.args.args]


def _whole(names: Iterable[str], classes: dict[str, ast.ClassDef]) -> list[str]:
    """Return the classes that have all features of a language model."""
    return [name for name in names if _features(name, classes, FEATURES) == len(FEATURES)]


def _most(names: list[str], classes: dict[str, ast.ClassDef], patterns: Sequence[str]) -> list[str]:
    """Return the classes with the most features."""
    features = {name: _features(name, classes, patterns) for name in names}
    return [name for name in names if features[name] == max(features.values())]


def _takes_two_sequences(definition: ast.ClassDef) -> bool:
    """Return whether a model's `forward` requires a source and a target, as encoder-decoders do."""
    required: list[ast.arg] = []
    for forward in _functions(definition.body, "forward")[:1]:
        required = forward.args.args[1 : len(forward.args.args) - len(forward.args.defaults)]
    names = [arg.arg.lower() for arg in required if "mask" not in arg.arg.lower()]
    return all(
        any(re.search(rf"(^|_)({side})", name) for name in names)
        for side in ("src|source|enc", "tgt|target|trg|dec")
    )


def _takes_classes(definition: ast.ClassDef) -> bool:
    """Return whether the constructor takes a number of classes, as that of a classifier does."""
    return any(CLASSES.fullmatch(plain(name)) for name in _constructor_arguments(definition))


def _trains_or_extends(definition: ast.ClassDef) -> bool:
    """Return whether a class trains or extends a model, and is none itself.

    Two of these are true of such a class: it is passed a model, it has Lightning's methods for
    training, and it has no `forward`.
    """
    names = {getattr(node, "name", "") for node in definition.body}
    is_passed_model = "model" in _constructor_arguments(definition)
    trains = bool(names & {"training_step", "configure_optimizers"})
    return [is_passed_model, trains, "forward" not in names].count(True) >= 2


def _only_calls(definition: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Return whether a class is passed a model and calls it, without parameters of its own."""
    functions = (ast.unparse(n.func) for n in ast.walk(definition) if isinstance(n, ast.Call))
    builds = any(f in classes or re.search(r"\bnn\.", f) for f in functions)
    arguments = _constructor_arguments(definition)[1:]
    return not builds and len(arguments) == 1 and MODEL.fullmatch(plain(arguments[0])) is not None


def _unused(
    classes: dict[str, ast.ClassDef], body: Sequence[ast.stmt]
) -> tuple[list[str], dict[str, ast.ClassDef]]:
    """Return the classes that no other class uses, and all, without classifiers and trainers.

    A function that builds a model of its parts uses the parts.
    """
    classes = {name: c for name, c in classes.items() if not OTHER_MODELS.search(name)} or classes
    classes = {name: c for name, c in classes.items() if not _trains_or_extends(c)} or classes
    classes = {name: c for name, c in classes.items() if not _only_calls(c, classes)} or classes
    used = {n for name, c in classes.items() for n in _used_by(c, classes) if n != name}
    for function in _functions(body):
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        calls.sort(key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))
        called = [n for call in calls if (n := ast.unparse(call.func)) in classes]
        returned = _returned(function)
        several = any(isinstance(value, (ast.Tuple, ast.Dict)) for value in returned)
        if called and returned and not several:
            used |= {*called} - {called[-1], *_called_by(returned)}
    return [name for name in classes if name not in used], classes


def _root(
    classes: dict[str, ast.ClassDef], body: Sequence[ast.stmt], place: str, notes: list[str]
) -> str:
    """Return the class that no other class uses, without classifiers built on the model.

    Of several the last is chosen, which in a lesson is the complete one, and a note says so.
    """
    every, classes = _unused(classes, body)
    single = [name for name in every if not _takes_two_sequences(classes[name])]
    roots = single or every
    roots = [n for n in roots if not RECURRENT.search(ast.unparse(classes[n]))] or roots
    roots = [n for n in roots if not ENCODER.search(n)] or roots
    roots = [n for n in roots if not _takes_classes(classes[n])] or roots
    roots = _most(roots, classes, FEATURES)  # without helpers that are left over
    if len(roots) > 1:
        roots = [name for name in roots if "gpt" in name.lower()] or roots
    roots = _most(roots, classes, PARTS)
    variants = roots
    roots = [name for name in roots if all(name in other for other in roots)] or roots
    if not classes:
        plain_classes = (node for node in body if isinstance(node, ast.ClassDef))
        models = [cls.name for cls in plain_classes if _functions(cls.body, "forward")]
        if models:
            raise AdaptError(
                f"{place} defines no nn.Module class, although {models[-1]} has a method forward. "
                f"Write class {models[-1]}(nn.Module), call super().__init__() in its "
                "constructor, and keep the weights in nn.Parameter, so that compat finds them"
            )
        raise AdaptError(f"{place} defines no nn.Module class. {MAKE_MODEL}")
    *others, chosen = roots or list(classes)
    if others:
        names = listed([f"{place}:{name}" for name in others])
        notes[:] = [f"{chosen} is the last model in the file, which has others too: {names}"]
    elif named := [name for name in variants if name != chosen]:
        names = listed([f"{place}:{name}" for name in named])
        notes[:] = [f"{chosen} was selected of the models in the file, which has variants: {names}"]
    if other := [name for name in every if name not in (*single, chosen)]:
        names = listed([f"{place}:{name}" for name in other])
        notes.append(f"{chosen} was selected, because it takes one sequence, unlike {names}")
    return chosen
