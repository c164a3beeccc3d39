"""`adapt --summary` prints one row for each file, even if a file fails or never ends."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path

import pytest

from compat.cli import adapt_summary
from tests.command_line import Cli


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(text)))


def test_several_files_are_summarized_in_a_table(cli: Cli, tiny: Path, project: Path) -> None:
    page = project / "table.html"
    files = ("erf.py:MyGPT", "missing.py")
    done = cli("adapt", *files, "--summary", "--model", tiny, "--html", page)
    assert done.code == 1
    wrong, missing = rows_of(done.out)
    assert list(wrong) == list(adapt_summary.COLUMNS)
    assert (wrong["verdict"], wrong["codes"]) == ("not compatible", "erf_gelu")
    assert wrong["first divergence"].startswith("h.0.") and int(wrong["line"]) > 0
    assert wrong["mapped"] == "40 of 40"
    assert missing["verdict"].startswith("error: ") and "missing.py" in missing["verdict"]
    shown = page.read_text(encoding="utf-8")
    assert all(file in shown for file in files) and "erf_gelu" in shown


def test_a_file_that_never_ends_is_reported(project: Path) -> None:
    (project / "endless.py").write_text("import time\ntime.sleep(600)\n")
    [row] = adapt_summary.summarize(["endless.py"], ["--model", "demo"], 3)
    assert row[:2] == ["endless.py", "not finished in 3 s"] and float(row[-1]) < 60


def test_a_compatible_model_has_no_codes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings of severity `info` are omitted."""
    findings = [{"code": "train_mode", "severity": "info", "line": 3}]
    found = {"findings": findings, "parity": {"first_divergence": None}, "mapped": 4, "tensors": 4}
    limits: list[float] = []

    def run(argv: object, limit: float) -> tuple[int, str, str]:
        limits.append(limit)
        return 0, json.dumps(found), ""

    monkeypatch.setattr(adapt_summary, "_run", run)
    done = cli("adapt", "right.py", "also.py", "--summary", "--time-limit", "7")
    rows = rows_of(done.out)
    assert done.code == 0 and [row["verdict"] for row in rows] == ["compatible"] * 2
    assert {row["codes"] + row["line"] for row in rows} == {""}
    assert limits == [7, 7]


@pytest.mark.parametrize(
    ("code", "out", "err", "expected"),
    [
        (3, "", "note\nerror: no model: x\n", "error: no model: x"),
        (-11, "", "", "error: the process ended with exit code -11"),
        (0, "not json", "", "error: the process ended with exit code 0"),
        (2, "", "Usage: …\n╭─ Error ─╮\n│ No such option │\n╰──╯\n", "error: No such option"),
    ],
)
def test_a_process_without_a_result_is_reported_as_an_error(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str, expected: str
) -> None:
    monkeypatch.setattr(adapt_summary, "_run", lambda argv, limit: (code, out, err))
    [row] = adapt_summary.summarize(["file.py"], [], 5)
    assert row[:2] == ["file.py", expected] and row[2:6] == [""] * 4


def test_a_csv_cell_is_never_a_formula(capsys: pytest.CaptureFixture[str]) -> None:
    adapt_summary.print_csv([["=cmd()", "compatible"]])
    assert capsys.readouterr().out.splitlines()[1] == "'=cmd(),compatible"


def test_wrong_usage_exits_with_2(cli: Cli, tiny: Path, project: Path) -> None:
    assert cli("adapt", "a.py", "b.py", "c.py").code == 2
    for option in ("--fix", "--diff", "--json", "--emit-map"):
        assert cli("adapt", "a.py", "b.py", "--summary", option).code == 2
