"""What the user's own code raised, and on which of its lines."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from compat.errors import AdaptError, CompatError

# Packages whose name on PyPI is not the name they are imported by.
PACKAGES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "pytorch_lightning": "pytorch-lightning",
}
COMPAT = f"{Path(__file__).parent}/"
FOREIGN = tuple(
    f"{Path(folder)}/"
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        Path(torch.__file__).parent,
        COMPAT,
    )
)


def described(error: BaseException) -> str:
    """An exception's type and text, the user's own line that led to it, and what to do."""
    text = "\n".join([f"{type(error).__name__}: {error}".removesuffix(": "), *_where(error)])
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.split(".")[0]
        package = PACKAGES.get(missing, missing)
        text += f"\n  to install it: pip install {package}"
    return text


def raised(error: BaseException) -> str:
    """What a model raised and the user's line, in one line, after which nothing follows."""
    frames = users_frames(error)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # of the user's own exception
        lines = []
    headline = f": {lines[0]}" if lines else ""
    return f"the model raised {type(error).__name__}{where}{headline}"


def _where(error: BaseException) -> list[str]:
    return [f"  at {f.filename}:{f.lineno}: {f.line}" for f in users_frames(error)[-1:]]


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's code that an exception came through, the outermost first."""
    return [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]


@contextlib.contextmanager
def explained(cls: type) -> Iterator[None]:
    """Turn what the user's own code raises, `exit()` included, into an AdaptError with its line.

    What compat raises itself is passed on as it is.
    """
    try:
        yield
    except CompatError:
        raise
    except (Exception, SystemExit) as error:
        if not _from_users(error):
            raise
        raise AdaptError(f"{cls.__name__} raises when it is run: {described(error)}") from error


def _from_users(error: BaseException) -> bool:
    """Whether the innermost frame that is not a library's is the user's, and not compat's."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [file for file in files if is_users(file) or file.startswith(COMPAT)]
    return bool(own) and not own[-1].startswith(COMPAT)


@cache
def is_users(filename: str) -> bool:
    """Whether a file is neither Python's nor torch's nor any other library's, nor ours."""
    return not filename.startswith(("<", *FOREIGN)) and "site-packages" not in filename
