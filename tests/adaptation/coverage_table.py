"""Writes the tables of tests/adaptation/README.md: `python -m tests.adaptation.coverage_table`."""

from __future__ import annotations

import ast
from pathlib import Path

from compat.adaptation import CODES
from tests.adaptation.catalogue import FOREIGN, MODELS, MUTATIONS, ZOO, Model

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- made by tests/adaptation/coverage_table.py -->\n", "<!-- end -->\n"


def about(model: Model) -> str:
    """Return the first line of the docstring of the model's file."""
    text = ast.get_docstring(ast.parse((ZOO / model.file).read_text())) or ""
    return text.splitlines()[0].rstrip(".")


def tables() -> str:
    written = {style: [m.code for m in MUTATIONS if m.style == style] for style in MODELS}
    lines = ["| style | how it is written | deviations written into it |", "|---|---|---|"]
    for style, model in MODELS.items():
        codes = ", ".join(sorted(set(written[style]))) or "none"
        lines.append(f"| `{style}` | {about(model)} | {codes} |")
    lines += ["", "| code | severity | styles |", "|---|---|---|"]
    for code, entry in CODES.items():
        styles = list(dict.fromkeys(m.style for m in MUTATIONS if m.code == code))
        lines.append(f"| `{code}` | {entry.severity} | {len(styles)}: {', '.join(styles) or '–'} |")
    lines += ["", "| refused | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {about(model)} |" for name, model in FOREIGN.items()]
    total = f"{len(MODELS)} models, {len(MUTATIONS)} deviations of {len(CODES)} codes"
    return "\n".join([f"{total}.", "", *lines]) + "\n"


def with_tables(text: str) -> str:
    """Return the README with up-to-date tables."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
