"""On narrow terminals, neither numbers nor names are truncated."""

from __future__ import annotations

import re
import shutil
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from compat.dialects import linear
from compat.errors import collapse_layers
from tests.adapt_project import ERF_SOURCE, GPT, TANH
from tests.command_line import Cli
from tests.conftest import State, Write
from tests.foreign_files import masks
from tests.test_cli_errors import unbiased_norm

WIDTHS = [0, 20, 40, 60, 80, 120, 200]
each_width = pytest.mark.parametrize("width", WIDTHS)
LONG = "a_name_of_which_no_character_may_be_lost_" * 2 + "whatever"  # 90 characters
assert len(LONG) == 90


@pytest.fixture
def narrow(cli: Cli, width: int, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A function that runs a command on a terminal of this width."""
    monkeypatch.setenv("COLUMNS", str(width))
    return cli


@pytest.fixture
def long_path(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint in a folder with a long name."""
    return shutil.copytree(tiny, tmp_path / LONG)


def cache_first_result(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Cache the first result of a function, and return it for all later calls."""
    module, _, name = function.rpartition(".")
    original, results = getattr(sys.modules[module], name), list[Any]()

    def first(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(original(*args, **kwargs))
        return results[0]

    monkeypatch.setattr(function, first)


def words(value: Any) -> set[str]:
    """Return all strings in a JSON value, split at spaces."""
    if isinstance(value, dict):
        return words(list(value.values()))
    if isinstance(value, list):
        return set().union(*map(words, value))
    return set(value.split()) if isinstance(value, str) else set()


@each_width
@pytest.mark.parametrize("dialect", ["linear", "conv1d"])
def test_load_truncates_nothing(narrow: Cli, long_path: Path, dialect: str) -> None:
    argv = ("load", "--model", long_path, "--dialect", dialect)
    found, shown = narrow(*argv, "--json").json(), narrow(*argv).out
    for entry in found["tensors"]:
        assert f"{entry['tensor']} ".replace("h.0.", "h.{i}.") in shown or ".0." not in entry
        assert str(entry["shape"]) in shown
        assert entry["operation"] in shown
        for made in entry["parameters"]:
            assert re.sub(r"\.\d+\.", ".{i}.", made["name"], count=1) in shown
            assert str(made["shape"]) in shown
    assert "{i} = 0 … 2" in shown
    assert found["weights"] in shown
    assert f"{found['parameters']:,}" in shown


def table_of(taps: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the numbers that the table shows for every layer."""
    found = {}
    for layer, group in groupby(taps, key=lambda tap: tap["tap"].rpartition(".")[0] or tap["tap"]):
        results, numbers = list(group), []
        for kind in ("accumulated", "local"):
            measured = [tap[kind] for tap in results]
            for name in ("max_abs", "rel_rms"):
                worst = max(one[name] for one in measured)
                numbers.append(f"{worst:.1e}" if worst else "0")
            numbers.append(f"{max(one['ratio'] for one in measured):.2f}")
            identical = sum(one["bit_identical"] for one in measured)
            numbers.append(f"{identical}/{len(results)}")
        found[layer] = numbers
    return found


@pytest.mark.parametrize("broken", [False, True])
def test_parity_truncates_nothing(
    cli: Cli, long_path: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        monkeypatch.setattr(linear.LayerNorm, "forward", unbiased_norm)
    cache_first_result(monkeypatch, "compat.check_parity")
    argv = ("parity", "--model", long_path)
    found = cli(*argv, "--json").json()
    assert found["passed"] is not broken
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        check_parity_table(found, cli(*argv).out)


def check_parity_table(found: dict[str, Any], shown: str) -> None:
    assert found["source"] in shown
    pieces = re.split(r"[\s│┃|]+|, ", shown)
    for layer, numbers in table_of(found["taps"]).items():
        assert layer in pieces
        for number in numbers:
            if re.match(r"(\d+)/\1$", number) is None:
                assert number in pieces
    assert ("✗ from ln_1" in shown) is not found["passed"]


@each_width
def test_inspect_truncates_nothing(narrow: Cli, long_path: Path) -> None:
    found, shown = narrow("inspect", long_path, "--json").json(), narrow("inspect", long_path).out
    assert all(word in shown for word in words({**found, "files": found["files"].keys()}))
    assert found["weights"] in shown
    assert f"{found['parameters']:,} in {found['tensors']} tensors" in " ".join(shown.split())


@each_width
def test_inspect_truncates_no_error(narrow: Cli, write: Write, state: State) -> None:
    folder = write({**state, f"{LONG}.weight": torch.ones(2), **masks()})
    found, shown = narrow("inspect", folder, "--json").json(), narrow("inspect", folder).out
    assert LONG in found["error"]
    assert all(word in shown for word in words([found["error"], found["notes"], found["weights"]]))


@pytest.mark.parametrize("as_terminal", [False, True])
def test_adapt_truncates_nothing(
    cli: Cli, long_path: Path, tmp_path: Path, as_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, a module and a parameter have long names."""
    if as_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")
    cache_first_result(monkeypatch, "compat.adapt")
    text = GPT.replace(TANH, ERF_SOURCE.removeprefix("return x + self.down(")[:-1])
    text = text.replace("self.qkv", f"self.{LONG}").replace("3 * width)", "3 * width, bias=False)")
    text = text.replace("self.heads = heads", f"self.heads = heads; self.spare_{LONG} = "
                        "nn.Parameter(torch.zeros(width))")  # fmt: skip
    (tmp_path / f"{LONG}.py").write_text(text)
    argv = ("adapt", f"{tmp_path}/{LONG}.py:MyGPT", "--model", long_path)
    found = cli(*argv, "--json").json()
    codes = {finding["code"] for finding in found["findings"]}
    assert codes >= {"erf_gelu", "no_qkv_bias", "unused_parameters"}
    emitted = cli(*argv, "--emit-map").out
    assert all(name.replace(".0.", ".{i}.") in emitted or ".0." not in name
               for row in found["name_map"] for name in row["parameters"])  # fmt: skip
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        check_adapt(found, cli(*argv).out)


def check_adapt(found: dict[str, Any], shown: str) -> None:
    for finding in found["findings"]:
        for name in ("code", "tap", "fix", "source_line"):
            if finding["severity"] != "info":
                assert (finding[name] or "") in shown
        assert f"{LONG}.py:{finding['line']}" in shown
        assert all(word in shown for word in f"{finding['message']} {finding['fix']}".split())
        if finding["severity"] != "info":
            assert all(word in shown for word in finding["evidence"].split())
    assert all(name in shown for name in collapse_layers(found["unmatched"]))


@each_width
def test_export_truncates_nothing(narrow: Cli, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / LONG
    argv = ("export", tiny, folder, "--max-shard-size", "40kB")
    found, shown = narrow(*argv, "--json").json(), narrow(*argv).out
    assert len(found["files"]) > 3
    for name, size in found["files"].items():
        assert name in shown
        assert f"{size:,}" in shown
    assert str(folder) in shown
