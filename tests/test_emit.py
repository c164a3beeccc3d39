"""A name map can be written as Python source."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from compat import Fused, NameMap, Part, Rearrange, Row, Rows, Same, Split, Transpose
from compat.adaptation.emit import to_python
from compat.dialects import DIALECTS
from compat.ops import Op

LONG = "a_module_with_a_long_name.{i}.and_a_submodule_with_a_long_name.weight"
OPS: dict[str, Op] = {
    "same": Same(),
    "transpose": Transpose(),
    "split": Split(3),
    "split and transpose": Split(3, transpose=True),
    "rearrange": Rearrange("a b -> b 1 a"),
    "rearrange with sizes": Rearrange("(h d) c -> h d c", (("h", 12), ("d", 64))),
    "fused": Fused(12, (Part("qkv", "(h q d) c"),)),
    "fused per head": Fused(
        4, tuple(Part(one, "d c", heads=(head,)) for head in range(4) for one in "qkv")
    ),
    "first rows": Rows(1024, 256),
    "more rows": Rows(50257, 50304, "r c -> c r"),
}


def execute(source: str) -> Any:
    """Execute the source with no names but its own imports, and return the name map."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "pasted.py", "exec"), namespace)
    return namespace["name_map"]


def is_formatted(source: str) -> bool:
    """Return whether ruff accepts the format and the imports of the source."""
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        ["format", "--check", "--line-length", "100", "--isolated"],
        ["check", "--select", "E,F,I", "--line-length", "100", "--isolated"],
    ):
        argv = [*ruff, *command, "--stdin-filename", "pasted.py", "-"]
        done = subprocess.run(argv, input=source.encode(), capture_output=True, check=False)
        if done.returncode:
            return False
    return True


def maps() -> dict[str, NameMap]:
    """Return a short and a long map for each op, the dialects' maps, and unusual ones."""
    short = {name: NameMap((Row("wte.weight", ("w",), op),)) for name, op in OPS.items()}
    long = {
        f"{name}, long": NameMap((Row("h.{i}.attn.c_attn.weight", (LONG, f"{LONG}.2"), op),))
        for name, op in OPS.items()
    }
    everything = NameMap(tuple(Row(f"h.{{i}}.{n}", (f"{n}.{{i}}",), OPS[n]) for n in OPS))
    unusual = {
        "all ops": everything,
        "zeros": NameMap(everything.rows, zeros=("head.bias",)),
        "long zeros": NameMap(everything.rows, zeros=(f"{LONG}.bias", f"{LONG}.bias.2")),
        "quotes": NameMap((Row("wte.weight", ('it\'s "w"', "it's", '"w"', "\\", "é\n"), Same()),)),
        "too long for any line": NameMap((Row("wte.weight", (2 * LONG,), Same()),)),
        "empty": NameMap(()),
    }
    return {**short, **long, **{n: d.name_map for n, d in DIALECTS.items()}, **unusual}


@pytest.mark.parametrize("name_map", maps().values(), ids=maps().keys())
def test_the_emitted_source_defines_an_equal_map(name_map: NameMap) -> None:
    assert execute(to_python(name_map)) == name_map


@pytest.mark.parametrize("name", ["all ops", "long zeros", "fused per head, long", "linear"])
def test_the_emitted_source_is_formatted_as_by_ruff(name: str) -> None:
    assert is_formatted(to_python(maps()[name]))


def test_rows_that_fit_are_written_on_one_line_each() -> None:
    rows = [Row(f"h.{{i}}.{name}", (f"blocks.{{i}}.{name}",), Same()) for name in ("a", "b", "c")]
    assert to_python(NameMap(tuple(rows), zeros=("head.bias",))) == (
        "from compat import NameMap, Row, Same\n"
        "\n"
        "name_map = NameMap(\n"
        "    (\n"
        '        Row("h.{i}.a", ("blocks.{i}.a",), Same()),\n'
        '        Row("h.{i}.b", ("blocks.{i}.b",), Same()),\n'
        '        Row("h.{i}.c", ("blocks.{i}.c",), Same()),\n'
        "    ),\n"
        '    zeros=("head.bias",),\n'
        ")\n"
    )


def test_no_line_is_longer_than_100_columns() -> None:
    """The lengths of the rows vary around 100 columns, on one line, two lines or more."""
    names = ["w" * n for n in range(30, 80)]
    shapes = [(name,) for name in names] + [(name, "v") for name in names]
    rows = tuple(Row("wte.weight", ours, op) for ours in shapes for op in OPS.values())
    source = to_python(NameMap(rows, zeros=tuple(names)))
    assert max(map(len, source.splitlines())) == 100
    assert is_formatted(source)
    assert execute(source) == NameMap(rows, zeros=tuple(names))
