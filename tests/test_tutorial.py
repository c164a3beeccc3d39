"""The tutorial notebook runs completely and prints its committed outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.test_readme import comparable
from tests.tutorial import read, run


def test_the_notebook_prints_its_committed_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    committed = read()
    executed = copy.deepcopy(committed)
    run(executed)
    assert outline(executed) == outline(committed), "to update them: python -m tests.tutorial"
    text = " ".join(word for kind, *words in outline(committed) for word in words)
    assert "erf_gelu" in text and text.count("<Adaptation ✗") == text.count("<Adaptation ✓") == 1
    pictures = [kind for kind, *_ in outline(committed) if kind == "picture"]
    assert len(pictures) == 2


def outline(notebook: dict[str, Any]) -> list[list[str]]:
    """Return the kind of each output and its printed words, without numbers."""
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text", ()))
            kind = "picture" if "image/png" in output.get("data", {}) else "text"
            found.append([kind, *comparable(text)])
    return found
