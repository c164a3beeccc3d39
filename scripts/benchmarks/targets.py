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
        """Return a line of text that states by how much a missed target is missed."""
        relation = "≤" if self.at_most else "≥"
        missed = "" if self.met else f", missed by {abs(self.found / self.bound - 1):.0%}"
        mark = "✓" if self.met else "✗"
        return f"{mark} {self.words}: {self.found:.2f}, target {relation} {self.bound}{missed}"

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "met": self.met}


def targets_of(model: str, rows: Rows) -> list[Target]:
    """Return all targets of which both sides were measured."""
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
    ours = next((row for row in rows if row["name"] == f"engine {precision}"), None)
    if ours is None:
        return []
    targets = []

    def against(others: Rows, key: str, bound: float, at_most: bool = False) -> None:
        pick = min if at_most else max  # of several rows, the best counts
        measured = [row for row in others if key in row]
        best = pick(measured, key=lambda row: row[key]["median"], default=None)
        if best and key in ours:
            ratio = ours[key]["median"] / best[key]["median"]
            words = f"{precision}: {key}, {ours['name']} / {best['name']}"
            targets.append(Target(words, ratio, bound, at_most))

    others = [row for row in rows if not row["ours"]]
    transformers = [row for row in rows if row["family"] == "transformers"]
    for key in ("decode", "batch 8", "batch 32"):
        against(others, key, 1.2)
    against(others, "prompt", 1.0)
    against(transformers, "first", 0.5, at_most=True)
    return targets
