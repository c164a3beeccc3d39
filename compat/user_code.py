"""Exceptions of the user's code, with the line that raised them."""

from __future__ import annotations

import contextlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from compat.errors import AdaptError, CompatError

# The names of the modules that a target's file imported from its project.
SIBLINGS: set[str] = set()
# Modules of libraries that have the name of a module of the user's.
_LIBRARIES: dict[str, ModuleType] = {}
# Import names of packages that have another name on PyPI.
PACKAGES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "pytorch_lightning": "pytorch-lightning",
}


@contextlib.contextmanager
def library_modules() -> Iterator[None]:
    """Hide modules of the user's project, such as a `tokenizers.py`, from imports in the body.

    Libraries of the same name are imported once, because some cannot be imported again.
    """
    hidden = {name: sys.modules.pop(name) for name in sorted(SIBLINGS) if name in sys.modules}
    sys.modules.update(_LIBRARIES)
    try:
        yield
    finally:
        _LIBRARIES.update({name: sys.modules[name] for name in hidden if name in sys.modules})
        sys.modules.update(hidden)


def _folders_of(package: str) -> list[str]:
    """Return the folder of a package, found without importing it."""
    spec = find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []


COMPAT = f"{Path(__file__).parent}/"
FOREIGN = tuple(
    f"{Path(folder)}/"
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        *_folders_of("torch"),
        COMPAT,
    )
)


# Files that mark the top folder of a project.
PROJECT_FILES = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")

LIVE = "<ipython-input-"  # names of the code that is typed into IPython

MAKE_MODEL = (
    "Write a function that returns the model, `def make_model(config): return GPT(...)`, and pass "
    "FILE.py:make_model"
)


def exception_report(error: BaseException, owns: Callable[[str], bool] | None = None) -> str:
    """Describe an exception: type and text, the innermost line of its owner's code, a next step.

    Args:
        error: any exception.
        owns: returns whether a file is the owner's; by default whether it is the user's.
    """
    if isinstance(error, SyntaxError):
        source = f": {error.text.strip()}" if error.text else ""
        return f"{type(error).__name__}: {error.msg}\n  at {error.filename}:{error.lineno}{source}"
    frames = traceback.extract_tb(error.__traceback__)
    owned = [frame for frame in frames if (owns or is_users)(frame.filename)]
    places = [f"  at {frame.filename}:{frame.lineno}: {frame.line}" for frame in owned[-1:]]
    text = "\n".join([f"{type(error).__name__}: {error}".removesuffix(": "), *places])
    missing = (error.name or "").split(".")[0] if isinstance(error, ImportError) else ""
    if missing == "compat":
        text += (
            "\n  `compat` is this tool's own package. A module or package of that name in your "
            "project cannot be imported beside it, so rename yours"
        )
    elif missing and isinstance(error, ModuleNotFoundError):
        text += (
            f"\n  If it is a library, install it with: pip install {PACKAGES.get(missing, missing)}"
            "\n  If it belongs to your project, run this command in the folder that contains it"
        )
    if isinstance(error, SystemExit):
        text += "\n  Move the call that ends the program under `if __name__ == '__main__':`"
    return text


def exception_summary(error: BaseException, raised_by: str = "the model") -> str:
    """Return the type and the first line of an exception, and the user's line, in one line."""
    frames = users_frames(error)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # of the user's own exception
        lines = []
    headline = f": {lines[0]}" if lines else ""
    return f"{raised_by} raised {type(error).__name__}{where}{headline}"


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code in an exception's traceback, the outermost first."""
    return [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]


@contextlib.contextmanager
def translated(headline: str, advice: str = "") -> Iterator[None]:
    """Turn any exception but compat's own, `exit()` included, into an AdaptError.

    Args:
        headline: What failed; the description of the exception follows it.
        advice: The next step, on a separate line.
    """
    try:
        yield
    except CompatError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{headline}: {exception_report(error)}" + (f"\n  {advice}" if advice else "")
        raise AdaptError(text) from error


@contextlib.contextmanager
def handle_errors(target: Callable[..., Any]) -> Iterator[None]:
    """Turn what the user's own code raises while it runs into an AdaptError with its line.

    Exceptions of compat, and of libraries that compat calls, are raised unchanged.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, CompatError) or not _from_users(error):
            raise
        headline = f"{target.__name__} raises an exception when it runs"
        raise AdaptError(f"{headline}: {exception_report(error)}") from error


def _from_users(error: BaseException) -> bool:
    """Return whether the user's code, and not compat, made the call that failed."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [file for file in files if is_users(file) or file.startswith(COMPAT)]
    return bool(own) and not own[-1].startswith(COMPAT)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function and the functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@cache
def is_users(filename: str) -> bool:
    """Return whether a file is the user's: not of Python, of an installed package or of compat."""
    if filename.startswith(LIVE):
        return True
    parts = Path(filename).parts
    if filename.startswith(("<", *FOREIGN)) or {"site-packages", "dist-packages"} & {*parts}:
        return False
    folders = [folder for folder in sys.path if folder and filename.startswith(f"{folder}/")]
    return not any(Path(filename).relative_to(f).parts[0] in _installed(f) for f in folders)


@cache
def _installed(folder: str) -> frozenset[str]:
    """Return the top-level names that `pip install --target` has installed into a folder."""
    records = (each.read_text(errors="replace") for each in Path(folder).glob("*.dist-info/RECORD"))
    lines = (line for record in records for line in record.splitlines())
    return frozenset(re.split("[/,]", line)[0] for line in lines)


def project_folders(folder: Path) -> list[Path]:
    """Return a folder and those above it, up to the top of its project.

    The top is the nearest one with one of `PROJECT_FILES`, or else the third above. It is never the
    home folder, or the root of the file system.
    """
    above = [folder, *(each for each in folder.parents if each not in (Path.home(), Path("/")))]
    tops = (i for i, each in enumerate(above) if is_project_top(each))
    return above[: next(tops, 3) + 1]


def is_project_top(folder: Path) -> bool:
    """Return whether a folder has one of `PROJECT_FILES`."""
    return any((folder / name).exists() for name in PROJECT_FILES)


def live_cell(filename: str) -> str | None:
    """Return `In[5]` if this is the code of a cell in the running notebook or shell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"In[{numbers[filename]}]" if filename in numbers else None


def place(file: str, line: int | None) -> str:
    """Return `file:line`, relative to the working directory, or `In[5]:line` of a cell."""
    file = live_cell(file) or file
    with contextlib.suppress(ValueError):
        file = str(Path(file).relative_to(Path.cwd()))
    return file if line is None else f"{file}:{line}"
