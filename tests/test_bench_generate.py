"""bench.py generate and quality on the embedded checkpoint: what they print, apart from timings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.command_line import ROOT, run_forked, script

PEERS = "transformers float32,engine float32,engine float32+lookup"
SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = {"decode", "prompt", "first", "early", "late", "growth", "peak"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The JSON and the drawing of one quick run."""
    drawing = tmp_path_factory.mktemp("bench") / "bars.svg"
    arguments = ("--shapes", "demo", "--quick", "--json", "--peers", PEERS, "--plot", drawing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.run", run_forked)
        done = script("bench", "generate", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), drawing


def test_every_row_has_every_number_with_its_spread(measured: tuple[Any, Path]) -> None:
    [result] = measured[0]
    assert [row["name"] for row in result["rows"]] == PEERS.split(",")
    for row in result["rows"]:
        batches = set() if "+" in row["name"] else {"batch 8"}
        assert {key for key, found in row.items() if isinstance(found, dict)} == NUMBERS | batches
        for key in NUMBERS | batches:
            assert 0 < row[key]["low"] <= row[key]["median"] <= row[key]["high"]
    assert result["threads"] == 1


def test_float32_tokens_are_those_of_transformers(measured: tuple[Any, Path]) -> None:
    [result] = measured[0]
    same = {row["name"]: row["same_tokens"] for row in result["rows"]}
    assert {*same.values()} == {result["new"]}


def test_the_limit_is_the_bandwidth_over_the_bytes_read(measured: tuple[Any, Path]) -> None:
    [result] = measured[0]
    # All 957,184 parameters except the position embeddings (256 × 128) and the final norm (2 ×
    # 128).
    assert result["weights"] == 957_184 - 256 * 128 - 2 * 128
    for precision, size in {"float32": 4, "bfloat16": 2, "int8": 1}.items():
        limit = result["bandwidth"] / (size * result["weights"])
        assert result["limits"][precision] == pytest.approx(limit)


def test_targets_are_evaluated_if_both_sides_were_measured(measured: tuple[Any, Path]) -> None:
    [result] = measured[0]
    words = [target["words"] for target in result["targets"]]
    assert len([word for word in words if word.startswith("float32: decode")]) == 1
    assert not any("llama" in word or "ctranslate2" in word for word in words)
    for target in result["targets"]:
        below = target["found"] <= target["bound"]
        assert target["met"] == (below if target["at_most"] else not below)


def test_the_drawing_has_a_bar_for_every_row(measured: tuple[Any, Path]) -> None:
    [result], drawing = measured
    root = ElementTree.parse(drawing).getroot()
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert all(row["name"] in labels for row in result["rows"])
    assert len([*root.iter(f"{SVG}rect")]) == 1 + len(result["rows"])  # one is the background
    rights = [float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect")
              if "x" in bar.attrib]  # fmt: skip
    assert max(rights) < float(root.attrib["width"])


def test_a_missing_library_is_named_and_a_failing_one_reports_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks import measurements
    from benchmarks.peers import Peer

    absent = Peer("other", "float32", "float32", "other", "no_such_package_at_all")
    fails = Peer("engine", "float16", "float32", "engine", "compat")
    fallback = Peer("engine", "float16 again", "float32", "engine", "compat", True, fails.name)
    needless = Peer("engine", "never", "float32", "engine", "compat", True, absent.name)
    source = ROOT / "compat" / "demo"
    found = measurements.Measurements(source, tmp_path, 1, True)
    monkeypatch.setattr(found, "bandwidth", lambda: 1e9)
    rows = found.measure([absent, fails, fallback, needless])["rows"]
    assert [row["name"] for row in rows] == [absent.name, fails.name, fallback.name]
    assert "pip install" in rows[0]["absent"]
    assert "dtype is 'float16'" in rows[1]["error"]


def test_an_unknown_peer_is_refused_with_the_known_ones() -> None:
    done = script("bench", "generate", "--peers", "nobody")
    assert done.returncode == 2
    assert re.search(r"nobody.*llama\.cpp.*engine int8", done.stderr, re.DOTALL)


def test_int8_quality_is_close_to_float32_on_held_out_text() -> None:
    done = script("bench", "quality", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    for name in ("engine int8", "engine int8, outliers"):
        assert rows[name]["rise"] <= 0.005
        assert rows[name]["agreement"] >= 0.98
    assert rows["engine float32"]["perplexity"] == pytest.approx(
        rows["transformers float32"]["perplexity"], rel=1e-5
    )
    assert rows["engine bfloat16"]["agreement"] < 1  # otherwise the comparison could not fail
