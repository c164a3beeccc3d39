"""The HTML report as Chromium renders it."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat import ParityReport
from compat.html_report import adapt_page, parity_page
from tests.pages import (
    BAD,
    EVIL,
    EXACT,
    Browser,
    Document,
    adaptation,
    evil_page,
    failing_report,
    finding,
    report_of,
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on this machine; on Debian: apt-get install chromium")
    folder = tmp_path_factory.mktemp("browser")
    yield Browser(program, folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def failing(tiny: Path) -> ParityReport:
    return failing_report(tiny)


def test_the_browser_parses_the_page_as_written(browser: Browser, failing: ParityReport) -> None:
    """The browser neither adds nor drops elements, and all drawings have a size."""
    page = parity_page(failing)
    found = browser.evaluate(
        browser.write("parity.html", page),
        """const all = query => [...document.querySelectorAll(query)];
        return {
            elements: all("*").length,
            headline: document.querySelector(".verdict p").textContent,
            cells: all("svg.heat rect").length,
            headings: all("h1, h2, h3, h4").map(found => +found.tagName[1]),
            flat: all("svg").filter(svg => svg.getBoundingClientRect().height < 10).length,
        }""",
    )
    assert found["elements"] == len(Document(page).tags)
    assert found["headline"] == failing.headline
    assert found["cells"] == 2 * len(failing.taps)
    assert found["flat"] == 0
    steps = zip([0, *found["headings"]], found["headings"], strict=False)
    assert all(after <= before + 1 for before, after in steps)


def test_the_browser_does_not_run_text_as_code(browser: Browser) -> None:
    """This is true even without the content security policy, which forbids scripts."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", evil_page())
    assert "Security-Policy" not in page
    found = browser.evaluate(
        browser.write("evil.html", page.replace("alert(", "parent.document.title += (")),
        """const count = query => document.querySelectorAll(query).length;
        return [count("script"), count("img"), parent.document.title,
            document.querySelector("pre code").textContent, document.title]""",
    )
    text = EVIL.replace("alert(", "parent.document.title += (")
    assert found == [0, 0, "", text, f"{text} on {text}"]


@pytest.mark.parametrize("n_layer", [1, 3, 12, 48])
@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_overflows_and_labels_neither_overlap_nor_are_clipped(
    browser: Browser, n_layer: int, width: int
) -> None:
    long = "/home/somebody/" + "a-long-name-without-a-break" * 5
    report = report_of(EXACT, BAD, EXACT, n_layer=n_layer, source=long, model_name=long)
    found = finding(long, message=long * 3)
    page = adapt_page(adaptation(report, found, model=long, unmatched=[long], seconds={long: 1.0}))
    wide, overlaps, clipped = browser.evaluate(
        browser.write("wide.html", page),
        """const overlaps = [], clipped = [];
        for (const svg of document.querySelectorAll("svg[role]")) {
            const texts = [...svg.querySelectorAll("text:not(.first)")];
            const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
            const frame = svg.getBoundingClientRect();
            for (const [a, p] of boxes)
                if (p.left < frame.left - 1 || p.right > frame.right + 1) clipped.push(a);
            for (const [a, p] of boxes) for (const [b, q] of boxes)
                if (a < b && p.left < q.right + 4 && q.left < p.right + 4
                    && p.top + 3 < q.bottom && q.top + 3 < p.bottom) overlaps.push([a, b]);
        }
        return [document.documentElement.scrollWidth, overlaps, clipped]""",
        width,
    )
    assert wide == width
    assert overlaps == []
    assert clipped == []


def test_the_background_fits_light_and_dark_mode_on_wide_and_narrow_pages(
    browser: Browser, failing: ParityReport
) -> None:
    """The screenshots also show enough content."""
    page = adapt_page(adaptation(failing, finding(severity="drifts"), finding(severity="info")))
    name = browser.write("look.html", page)
    looks = [(dark, width) for dark in (False, True) for width in (1200, 390)]
    shots = [base64.b64encode(browser.screenshot(name, *look)).decode() for look in looks]
    images = "".join(f'<img src="data:image/png;base64,{shot}">' for shot in shots)
    found = browser.evaluate(
        browser.write("shots.html", images),
        """return [...document.images].map(image => {
            const canvas = document.createElement("canvas");
            [canvas.width, canvas.height] = [image.width, image.height];
            const drawing = canvas.getContext("2d");
            drawing.drawImage(image, 0, 0);
            const pixels = new Uint32Array(
                drawing.getImageData(0, 0, image.width, image.height).data.buffer);
            const ground = pixels[3 * image.width + 3];
            const red = ground & 255;  // little endian: red comes first
            const drawn = pixels.filter(pixel => pixel != ground).length / pixels.length;
            return {width: image.width, red, drawn, colours: new Set(pixels).size};
        })""",
    )
    for (dark, width), shot in zip(looks, found, strict=True):
        assert shot["width"] == max(width, 500)
        assert shot["red"] < 60 if dark else shot["red"] > 200
        assert shot["drawn"] > 0.2 and shot["colours"] > 100
