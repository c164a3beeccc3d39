"""Runs scripts/tutorial.ipynb without Jupyter; `python -m tests.tutorial` writes its outputs."""

from __future__ import annotations

import base64
import io
import json
import linecache
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "scripts/tutorial.ipynb"
DPI = 60  # resolution of the committed pictures


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return found


def run(notebook: dict[str, Any]) -> None:
    """Execute the cells in order in one namespace, and replace their outputs."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    os.environ["HF_HUB_OFFLINE"] = "1"  # the notebook falls back to the demo checkpoint
    names: dict[str, Any] = {"__name__": "__main__"}
    files: dict[str, int] = {}  # from which compat reads the number of a cell
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map=files))
    jupyter: Any = SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sys.modules["IPython"] = jupyter
    try:
        for number, cell in enumerate(cells, start=1):
            cell["execution_count"] = number
            cell["outputs"] = _outputs("".join(cell["source"]), number, names, files)
    finally:
        del sys.modules["IPython"]


def _outputs(
    source: str, number: int, names: dict[str, Any], cells: dict[str, int]
) -> list[dict[str, Any]]:
    """Execute a cell, and return what it printed, followed by its pictures."""
    from matplotlib import pyplot

    file = f"<ipython-input-{number}-tutorial>"  # the format of IPython
    cells[file] = number
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(source, file, "exec"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=DPI, metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode() + "\n"}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return outputs


if __name__ == "__main__":
    tutorial = read()
    run(tutorial)
    text = json.dumps(tutorial, indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(f"{text}\n", encoding="utf-8")
