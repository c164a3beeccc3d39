"""Rules of the architecture, checked in the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import compat
from tests.command_line import python

ROOT = Path(compat.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From the bottom up; a file may import from its own layer's package and from the layers below.
LAYERS = [
    {"errors"},
    {"collector", "config", "display", "layers", "name_map", "ops", "tap", "threads", "user_code"}
    | {"vocabulary"},
    {"checkpoint", "dialects"},
    {"validation", "tokenizer"},
    {"sharding"},
    {"export_view", "inspection"},
    {"loading"},
    {"decoding", "saving"},
    {"int8_cache", "lora", "packing", "parity"},
    {"generation"},
    {"engine"},
    {"user_models"},
    {"adaptation"},
    {"golden_files"},
    {"summary"},
    {"evaluation", "html_report", "testing"},
    {"cli", "pytest_plugin"},
    {"__main__"},
]
LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}
OWNERS = {
    "transformers": "parity/transformers_gpt2.py",
    "tiktoken": "tokenizer.py",
    "huggingface_hub": "checkpoint/hub.py",
    "lm_eval": "evaluation.py",
}


def part_of(path: Path) -> str:
    """Return the part of compat, such as `parity` for parity/trace.py or `config` for config.py."""
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_import_lower_layers_only(path: Path) -> None:
    own = part_of(path)
    if own in ("__init__", "demo"):
        return
    for name in imported(path):
        if name.startswith("compat."):
            other = name.split(".")[1]
            assert other == own or LEVEL[other] < LEVEL[own] or {own, other} <= LAYERS[1], name


# The packages and files of adaptation, from the bottom up.
ADAPT_LAYERS = ["tracing", "anatomy", "mapping", "diagnosis", "emit", "inputs", "stages"]
ADAPT_LAYERS += ["other_ways", "adapt"]


@pytest.mark.parametrize("layer", ADAPT_LAYERS)
def test_layers_of_adapt_import_lower_layers_only(layer: str) -> None:
    path = ROOT / "adaptation" / layer
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert files
    above = set(ADAPT_LAYERS[ADAPT_LAYERS.index(layer) + 1 :])
    for path in files:
        used = {
            name.split(".")[2] for name in imported(path) if name.startswith("compat.adaptation.")
        }
        assert not used & above, path


@pytest.mark.parametrize("library", OWNERS)
def test_each_heavy_library_is_imported_in_one_file(library: str) -> None:
    users = [path for path in FILES if any(n.split(".")[0] == library for n in imported(path))]
    assert [str(path.relative_to(ROOT)) for path in users] == [OWNERS[library]]


def test_importing_compat_imports_no_heavy_library() -> None:
    heavy = {"torch", *OWNERS}
    code = f"import compat, sys; print({heavy!r} & set(sys.modules))"
    done = python(code)
    assert done.stdout == "set()\n"


def test_public_names_are_sorted_and_resolve() -> None:
    assert compat.__all__ == sorted(compat.__all__)
    assert all(getattr(compat, name).__doc__ for name in compat.__all__)


def test_command_scripts_are_short() -> None:
    for name in ("load", "inspect", "parity", "generate", "adapt", "explain", "export", "pack"):
        assert len((ROOT.parent / "scripts" / f"{name}.py").read_text().splitlines()) <= 15
