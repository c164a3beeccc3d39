"""How results are shown in notebooks and saved as pages.

The pages are drawn by `compat.html_report`, a layer above the results, which is loaded on demand.
"""

from __future__ import annotations

import os
from contextlib import suppress
from html import escape
from importlib import import_module
from pathlib import Path

from compat.errors import CompatError, described


def page(result: object) -> str:
    """Return a result as one HTML document without scripts, which loads nothing."""
    return str(import_module("compat.html_report").page_of(result))


class HtmlPage:
    """A result that notebooks show as a page, and that can be saved as one."""

    _height = 640  # pixels of the frame in a notebook

    def _repr_html_(self) -> str:
        """Return the page in a frame, so that its style does not change the notebook's."""
        style = f"width: 100%; height: {self._height}px; border: 0"
        return f'<iframe sandbox srcdoc="{escape(page(self))}" style="{style}"></iframe>'

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page, without scripts and without links to other files.

        Raises:
            CompatError: the file cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise CompatError(f"path is {described(path)}, but must be the path of an HTML file.")
        try:
            write_text(Path(path), page(self))
        except OSError as error:
            raise CompatError(
                f"cannot write {path}: {error.strerror}. Pass a path in a folder that exists."
            ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole: after an error, its previous contents remain.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
