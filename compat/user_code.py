"""What the user's own code raised, and on which of its lines."""

from __future__ import annotations

import sysconfig
import traceback
from functools import cache
from pathlib import Path

import torch

# Packages whose name on PyPI is not the name they are imported by.
PACKAGES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "pytorch_lightning": "pytorch-lightning",
}
FOREIGN = tuple(
    f"{Path(folder)}/"
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        Path(torch.__file__).parent,
        Path(__file__).parent,
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


def _where(error: BaseException) -> list[str]:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return [f"  at {f.filename}:{f.lineno}: {f.line}" for f in frames[-1:]]


@cache
def is_users(filename: str) -> bool:
    """Whether a file is neither Python's nor torch's nor any other library's, nor ours."""
    return not filename.startswith(("<", *FOREIGN)) and "site-packages" not in filename
