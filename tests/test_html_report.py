"""The HTML report: its content, and the escaping of hostile text."""

from __future__ import annotations

import html
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from compat import ParityReport, check_parity
from compat.dialects import linear
from compat.html_report import adapt_page, parity_page
from compat.parity import Difference, Limit, TapResult
from compat.tap import tap_names
from tests.command_line import Cli
from tests.pages import (
    BAD,
    EVIL,
    EXACT,
    GOOD,
    GOOD_LOGITS,
    UNCALIBRATED,
    Document,
    adaptation,
    evil_page,
    failing_report,
    finding,
    report_of,
)


@pytest.fixture(scope="module")
def passing(tiny: Path) -> ParityReport:
    return check_parity("linear", tiny)


@pytest.fixture(scope="module")
def failing(tiny: Path) -> ParityReport:
    return failing_report(tiny)


def test_a_page_has_the_headline_the_verdict_and_the_drawings(
    passing: ParityReport, failing: ParityReport
) -> None:
    for report, verdict in ((passing, "✓Parity"), (failing, "✗No parity")):
        page = Document(parity_page(report))
        assert verdict + report.headline in page.text
        cells = [at for tag, at in page.tags if tag == "rect" and (at["class"] or "")[:2] == "c-"]
        in_drawings = [at for at in cells if at["x"] != "0"]  # not in the legend
        assert len(in_drawings) == 2 * len(report.taps)
        assert page.count("rect", **{"class": "hit"}) == 2 * len(report.taps)
        assert page.count("path", **{"class": "band"}) == 2
    out = [d for r in failing.taps for d in (r.accumulated, r.local) if not d.within]
    assert Document(parity_page(failing)).count("path", **{"class": "fail"}) == len(out) + 1
    assert "h.1.act, local: error" in parity_page(failing)


def test_reports_of_both_dialects_share_a_page(passing: ParityReport, tiny: Path) -> None:
    other = check_parity("conv1d", tiny)
    page = Document(parity_page(passing, other))
    assert passing.headline in page.text and other.headline in page.text
    assert page.count("h1") == 1 and page.count("svg", role="img") == 8


def test_without_float64_accumulated_errors_are_not_judged() -> None:
    taps = [TapResult(name, UNCALIBRATED, GOOD) for name in tap_names(2)]
    page = Document(parity_page(report_of(taps=taps, calibrated=False)))
    assert page.count("path", **{"class": "band"}) == 1
    assert "not judged" in page.text and "no float64 run" in page.text


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 5e-324, 1e300])
@pytest.mark.parametrize("bound", [math.nan, math.inf, 0.0, 1e300, None])
def test_extreme_numbers_do_not_break_the_drawings(value: float, bound: float | None) -> None:
    extreme = Difference(value, value, False, value, value, bound, bound is None)
    page = parity_page(
        report_of(extreme, EXACT, extreme), report_of(taps=[TapResult("logits", extreme, extreme)])
    )
    Document(page)
    numbers = re.findall(r'(?:[xy]|cx|cy|x1|y1|width|height|d)="([^"]*)"', page)
    assert not [text for text in numbers if "nan" in text or "inf" in text or "e" in text]


def test_findings_show_the_line_and_the_fix_as_code() -> None:
    line = "        self.act = nn.GELU()  # <3"
    found = finding(code="exact-gelu", file="gpt.py", line=41, source_line=line + "\n", tap=None)
    page = adapt_page(adaptation(report_of(BAD), found, finding(file=None, line=None)))
    assert "gpt.py:41" in page and f"<code>{html.escape(line.strip())}</code></pre>" in page
    assert Document(page).count("pre") == 1
    assert f"<dt>Fix</dt><dd><code>{found.fix}</code></dd>" in page
    assert "No deviation from GPT-2 was found" in adapt_page(adaptation(report_of()))


def test_findings_come_before_the_drawings_and_timings_at_the_end() -> None:
    page = adapt_page(adaptation(report_of(BAD), finding(), seconds={"trace": 1.25}))
    parts = ["Not compatible", "<article", "<svg", "<h2>Mapping", "trace 1.2 s", "torch 2"]
    positions = [page.index(part) for part in parts]
    assert positions == sorted(positions)
    assert page.rindex("<svg") < page.index("trace 1.2 s")


def test_files_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limit = Limit("`x > 3` was never true on any input", str(tmp_path / "deeper/gpt.py"), 7)
    logits = replace(GOOD_LOGITS, limits=[limit])
    adapted = adaptation(report_of(logits=logits), finding(file=str(tmp_path / "gpt.py")))
    page = adapt_page(adapted)
    assert "<code>gpt.py:7</code>" in page and "<li>deeper/gpt.py:7: `x &gt; 3`" in page
    assert str(tmp_path) not in page


def test_the_mapping_is_collapsed_by_layer() -> None:
    page = adapt_page(adaptation(report_of(), unmatched=["h.0.odd"], tensors=29))
    for row in linear.NAME_MAP.rows:
        assert all(f"<code>{name}</code>" in page for name in (row.hf, *row.ours))
    assert "0 … 2" in page and "28 of 29" in page and "<code>h.0.odd</code>" in page


def test_the_verdict_of_an_adaptation_states_the_reason() -> None:
    for adapted, word, why in (
        (adaptation(report_of()), "✓Compatible", "linear computes what transformers computes"),
        (adaptation(report_of(BAD)), "✗Not compatible", "diverges from transformers at logits"),
        (adaptation(report_of(), finding()), "✗Not compatible", "a finding breaks parity"),
        (adaptation(None), "✗Not compatible", "could not be run"),
        (adaptation(None, unmatched=["a"]), "✗Not compatible", "no parameter for 1 tensor of demo"),
    ):
        text = Document(adapt_page(adapted)).text
        assert word in text and why in text.partition(word)[2][:200]


def test_every_string_from_input_is_escaped() -> None:
    page = evil_page()
    found = Document(page)
    assert {"script", "img"}.isdisjoint(tag for tag, _ in found.tags)
    assert not [key for _, attributes in found.tags for key in attributes if key[:2] == "on"]
    assert found.text.count(EVIL) > 20
    parity = Document(parity_page(report_of(source=EVIL, model_name=EVIL)))
    assert {"script", "img"}.isdisjoint(tag for tag, _ in parity.tags)


def test_the_page_is_self_contained(failing: ParityReport) -> None:
    page = adapt_page(adaptation(failing, finding()))
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", page)
    assert page.startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">')
    assert "default-src 'none'" in html.unescape(page)


def test_a_file_name_that_is_not_unicode_can_be_written(tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    (tmp_path / "p.html").write_text(parity_page(report_of(source=name)), encoding="utf-8")
    assert "caf\\udce9" in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_the_parity_command_writes_the_page(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    done = cli("parity", "--model", tiny, "--all", "--html", path, "--json")
    assert (done.code, done.err) == (0, f"wrote {path}\n")
    assert [report["passed"] for report in done.json()] == [True, True]
    assert "linear and conv1d and transformers on" in path.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_exits_with_2(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    assert cli("parity", "--model", tiny, "--html", tmp_path / "no" / "page.html").code == 2
    assert cli("parity", "--model", tiny, "--html", tmp_path).code == 2
    full = Path("/dev/full")
    if full.exists():
        done = cli("parity", "--model", tiny, "--html", full)
        assert done.code == 2 and "No space left" in done.err
