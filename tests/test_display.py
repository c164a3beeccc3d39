"""Results in a notebook: short texts, HTML pages in frames, and atomically written files."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from compat import CompatError, adapt, check_parity, inspect_checkpoint, load_pretrained
from compat.html_report import page_of
from tests.own_gpt2 import MyGPT2


@pytest.fixture(scope="module")
def results(tiny: Path) -> dict[str, Any]:
    broken = load_pretrained(tiny)
    broken.final_norm.eps = 0.1
    return {
        "passed": check_parity("linear", tiny, gradients=True),
        "failed": check_parity(broken, tiny),
        "adapted": adapt(MyGPT2(), tiny),
        "inspected": inspect_checkpoint(tiny),
        "nothing": inspect_checkpoint(tiny / "none"),
    }


WORDS = {
    "passed": "<ParityReport ✓ linear computes what transformers computes",
    "failed": "<ParityReport ✗ linear diverges from transformers at ln_f",
    "adapted": "<Adaptation ✓ MyGPT2 on ",
    "inspected": "parameters, ✓ would load>",
    "nothing": "nothing known, ✗ would not load: ",
}


@pytest.mark.parametrize("kind", WORDS)
def test_a_result_is_printed_in_a_few_lines(results: dict[str, Any], kind: str) -> None:
    for text in (repr(results[kind]), str(results[kind])):
        assert WORDS[kind] in text and len(text) < 800


@pytest.mark.parametrize("kind", WORDS)
def test_a_notebook_shows_the_page_in_a_frame(results: dict[str, Any], kind: str) -> None:
    shown = results[kind]._repr_html_()
    assert shown.startswith("<iframe sandbox srcdoc=") and shown.count("<iframe") == 1
    found = re.search(r'srcdoc="([^"]*)"', shown)
    assert found is not None and html.unescape(found[1]) == page_of(results[kind])
    assert "<script" not in shown and "http" not in page_of(results[kind]).replace("http-equiv", "")


def test_the_page_has_gradients_if_they_were_compared(results: dict[str, Any]) -> None:
    assert "Gradients, from the logits to the embedding" in page_of(results["passed"])
    assert "Gradients, from" not in page_of(results["failed"])


@pytest.mark.parametrize("kind", WORDS)
def test_a_page_is_written_atomically(results: dict[str, Any], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    results[kind].to_html(path)
    assert path.read_text(encoding="utf-8") == page_of(results[kind])
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_a_page_that_cannot_be_written_raises_an_error(
    results: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CompatError, match="Pass a path in a folder that exists"):
        results["passed"].to_html(tmp_path / "no" / "page.html")
    with pytest.raises(CompatError, match="path is 3"):
        results["passed"].to_html(3)
    (tmp_path / "page.html").mkdir()
    with pytest.raises(CompatError, match="cannot write"):
        results["passed"].to_html(tmp_path / "page.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_json_is_compact_by_default_and_complete_on_request(results: dict[str, Any]) -> None:
    for kind in ("passed", "adapted"):
        compact, full = results[kind].to_json(), results[kind].to_json(full=True)
        assert compact.keys() == full.keys()
        short, long = (json.dumps(found, allow_nan=False) for found in (compact, full))
        assert len(short) < 8_000 < len(long)
    failed = results["failed"].to_json()
    assert failed["first_divergence"] == failed["taps"][0]["tap"] == "ln_f"
    assert not any(tap["passed"] for tap in failed["taps"])
