"""Performance targets of the engine, as ratios within one run at one precision."""

from __future__ import annotations

from typing import Any, NamedTuple

Rows = list[dict[str, Any]]
XL_MEMORY = 2.5e9  # bytes


class Target(NamedTuple):
    """A ratio or a number, its bound and its name."""

    words: str
    found: float
    bound: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.found <= self.bound if self.at_most else self.found >= self.bound

    def line(self) -> str:
        """A line of text that states by how much a missed target is missed."""
        relation = "≤" if self.at_most else "≥"
        missed = "" if self.met else f", missed by {abs(self.found / self.bound - 1):.0%}"
        mark = "✓" if self.met else "✗"
        return f"{mark} {self.words}: {self.found:.2f}, target {relation} {self.bound}{missed}"

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "met": self.met}


def targets_of(model: str, rows: Rows) -> list[Target]:
    """All targets of which both sides were measured."""
    measured = [row for row in rows if "decode" in row]
    found = []
    for precision in dict.fromkeys(row["precision"] for row in measured):
        found += of_precision(precision, [r for r in measured if r["precision"] == precision])
    for row in measured:
        if row["name"] == "engine int8" and model == "gpt2-xl":
            peak = row["peak"]["median"]
            found.append(Target("gpt2-xl in int8: GB", peak / 1e9, XL_MEMORY / 1e9, at_most=True))
    return found


def of_precision(precision: str, rows: Rows) -> list[Target]:
    engines = [row for row in rows if row["family"] == "engine"]
    if not engines:
        return []
    without_speculation = [row for row in engines if "+" not in row["name"]] or engines
    targets = []

    def against(family: str, key: str, bound: float, ours: Rows, at_most: bool = False) -> None:
        pick = min if at_most else max  # of several rows of a family, the best counts
        sides = [ours, [row for row in rows if row["family"] == family]]
        best = [
            pick((row for row in side if key in row), key=lambda r: r[key]["median"], default=None)
            for side in sides
        ]
        if best[0] and best[1]:
            ratio = best[0][key]["median"] / best[1][key]["median"]
            words = f"{precision}: {key}, {best[0]['name']} / {best[1]['name']}"
            targets.append(Target(words, ratio, bound, at_most))

    against("transformers", "decode", 2.5, engines)
    against("llama.cpp", "decode", 1.0, engines)
    against("ctranslate2", "decode", 1.0, engines)
    against("llama.cpp", "prompt", 1.0, without_speculation)
    against("transformers", "first", 0.5, without_speculation, at_most=True)
    against("transformers", "batch 32", 2.0, without_speculation)
    growth = without_speculation[0]["growth"]["median"]
    words = f"{precision}: cost of a token late / early, {without_speculation[0]['name']}"
    return [*targets, Target(words, growth, 1.3, at_most=True)]
