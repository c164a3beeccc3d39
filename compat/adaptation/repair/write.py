"""Writing edited files: each in its own encoding, with its own line ends, and as a whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from compat.adaptation.repair.repair import Repair, present_text
from compat.errors import AdaptError
from compat.user_models.notebook import encoding


def write(repair: Repair) -> list[Path]:
    """Write the edits of a repair.

    Returns:
        The files that were changed.

    Raises:
        AdaptError: a file was changed after it was read, or cannot be written. Nothing is written
            then.
    """
    for name, old in repair.old.items():
        if present_text(name) != old:
            raise AdaptError(f"{name} was changed while it was repaired. Run the command again")
    contents: dict[Path, bytes] = {}
    notebooks: dict[Path, dict[str, str]] = {}
    for name, text in repair.texts.items():
        file, _, cell = name.partition("#cell-")
        path = Path(file)
        if cell:
            notebooks.setdefault(path, {})[cell] = text
        else:
            text = "".join(repair.lines(name)[1])
            contents[path] = text.encode(encoding(path), "surrogateescape")
    contents |= {path: _notebook(path, texts) for path, texts in notebooks.items()}
    ready: list[tuple[Path, Path]] = []
    try:
        for path, content in contents.items():
            written = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
            ready.append((written, path))
            written.write_bytes(content)
            shutil.copymode(path, written)
        for written, path in ready:
            os.replace(written, path)
    except OSError as error:
        raise AdaptError(f"cannot write the edits: {error}. Check the permissions") from error
    finally:
        for written, _ in ready:
            written.unlink(missing_ok=True)
    return list(contents)


def _notebook(path: Path, texts: Mapping[str, str]) -> bytes:
    """Return the notebook with these sources of cells, by their numbers among the code cells."""
    stored = path.read_bytes()
    coding = json.detect_encoding(stored)
    raw = stored.decode(coding)
    document = json.loads(raw)
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    for number, text in texts.items():
        cell = code[int(number) - 1]
        whole = isinstance(cell["source"], str)
        cell["source"] = text if whole else text.splitlines(keepends=True)
    indented = raw.partition("\n")[2]
    indent = len(indented) - len(indented.lstrip(" "))
    end = "\n" if raw.endswith("\n") else ""
    return (json.dumps(document, indent=indent or None, ensure_ascii=False) + end).encode(coding)
