"""Hand-built reports, an HTML parser and a browser for the tests of HTML reports."""

from __future__ import annotations

import html
import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from compat import NameMap, ParityReport, Row, Same, check_parity, load_pretrained
from compat.adaptation import Adaptation, Finding
from compat.dialects import linear
from compat.html_report import adapt_page
from compat.parity import Difference, InputResult, LogitsProof, TapResult
from compat.tap import tap_names
from tests.parity.mistakes import MISTAKES

EVIL = "\">'></title></style></pre><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;"
GOOD = Difference(1e-6, 2e-7, False, 1.0, 2e-7, 4e-7, True)
EXACT = Difference(0.0, 0.0, True, 1.0, 2e-7, 4e-7, True)
BAD = Difference(0.3, 8e-4, False, 2000.0, 8e-4, 4e-7, False)
UNCALIBRATED = Difference(0.3, 8e-4, False, None, 8e-4, None, True)
GOOD_LOGITS = LogitsProof([InputResult("a batch", (2, 8), GOOD)])
VOID = {"meta"}


def report_of(*found: Difference, n_layer: int = 3, **changes: Any) -> ParityReport:
    """Return a report whose last taps are `found` and whose other taps are within bounds."""
    names = tap_names(n_layer)
    every = [GOOD] * (len(names) - len(found)) + list(found)
    taps = [TapResult(name, d, d) for name, d in zip(names, every, strict=True)]
    fields = {"source": "m", "model_name": "linear", "dtype": "float32", "input_shape": (2, 8)}
    fields |= {"calibrated": True, "training": False, "taps": taps, "versions": {"torch": "2"}}
    return ParityReport(**{**fields, "logits": GOOD_LOGITS, **changes})


def failing_report(checkpoint: Path) -> ParityReport:
    """Return the report of a model whose second block uses the exact GELU."""
    model = load_pretrained(checkpoint)
    MISTAKES["erf_gelu"][1](model)
    return check_parity(model.eval(), checkpoint)


def finding(text: str = "x", line: int | None = 7, **changes: Any) -> Finding:
    return replace(Finding(text, "breaks", text, text, line, text, text, text, text), **changes)


def adaptation(report: ParityReport | None, *found: Finding, **changes: Any) -> Adaptation:
    made = Adaptation("MyGPT", "demo", 3, 28, [], linear.NAME_MAP, report, list(found))
    return replace(made, **changes)


def evil_page() -> str:
    """Return a page with hostile text in every field that can contain text."""
    report = report_of(BAD, source=EVIL, model_name=EVIL, dtype=EVIL, versions={EVIL: EVIL})
    taps = [TapResult(f"h.0.{EVIL}", BAD, BAD), TapResult(EVIL, BAD, BAD), *report.taps]
    rows = NameMap((Row(f"h.{{i}}.{EVIL}", (EVIL, EVIL), Same()),))
    texts = {"model": EVIL, "source": EVIL, "unmatched": [EVIL], "seconds": {EVIL: 1.0}}
    report = replace(report, taps=taps)
    return adapt_page(adaptation(report, finding(EVIL, severity=EVIL), name_map=rows, **texts))


class Document(HTMLParser):
    """The elements of a page; every element must be closed, in the right order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", [""]
        self.feed(page)
        assert self._open == [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str, **attributes: str) -> int:
        wanted = attributes.items()
        return sum(name == tag and wanted <= found.items() for name, found in self.tags)


class Browser:
    """Headless Chromium, with a new profile for every run."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder, self._runs = program, folder, 0

    def write(self, name: str, page: str) -> str:
        (self._folder / name).write_text(page, encoding="utf-8")
        return name

    def _run(self, name: str, *options: str) -> str:
        self._runs += 1
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
        switches += ["--no-first-run", "--disable-background-networking", "--disable-sync"]
        switches += ["--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"]
        switches += [f"--user-data-dir={self._folder / f'profile-{self._runs}'}"]
        switches += ["--allow-file-access-from-files", *options, str(self._folder / name)]
        done = subprocess.run([self._program, *switches], capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout.decode()

    def evaluate(self, page: str, script: str, width: int = 1200) -> Any:
        """Return the value that a script computes on a page in a frame of this width."""
        answer = f"JSON.stringify((document => {{{script}}})(it.contentDocument))"
        frame = f'<iframe id="it" width="{width}" height="900" src="{page}"></iframe>'
        load = f"onload = () => {{ found.textContent = {answer} }}"
        name = self.write("evaluate.html", f'{frame}<pre id="found"></pre><script>{load}</script>')
        found = re.search(r'<pre id="found">(.*?)</pre>', self._run(name, "--dump-dom"), re.S)
        assert found is not None
        return json.loads(html.unescape(found[1]))

    def screenshot(self, page: str, dark: bool, width: int) -> bytes:
        """Return a PNG of the top of a page, in a frame because windows have a minimum width."""
        look = "<style>body { margin: 0 } iframe { border: 0 }</style>"
        look += '<meta name="color-scheme" content="light dark">'
        frame = f'{look}<iframe width="{width}" height="900" src="{page}"></iframe>'
        picture = self._folder / "picture.png"
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        options = (f"--screenshot={picture}", f"--window-size={max(width, 500)},900", scheme)
        self._run(self.write("frame.html", frame), *options)
        return picture.read_bytes()
