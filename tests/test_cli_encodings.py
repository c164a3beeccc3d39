"""Output in encodings that lack ✓: every command, as text and as JSON, in its own process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compat
from tests.adapt_project import ERF_LINE, GPT, TANH
from tests.command_line import ROOT

DEMO = Path(compat.__file__).parent / "demo"
RUNNER = """
import json, sys
from compat.cli import main
for argv in json.loads(sys.argv[1]):
    try:
        main(argv)
    except SystemExit as exited:
        code = exited.code
    sys.stdout.flush(), sys.stderr.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"\\n=== {code or 0}\\n")
"""
ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "C locale": {"LC_ALL": "C"},
    "C locale in ASCII": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "Latin-1, strict": {"PYTHONIOENCODING": "latin-1:strict"},
    "UTF-8": {"PYTHONIOENCODING": "utf-8:strict"},
}
CODECS = {"cp1252": "cp1252", "Latin-1, strict": "latin-1", "UTF-8": "utf-8", "C locale": "utf-8"}


def run_all(commands: list[list[str]], folder: Path, encoding: str) -> list[tuple[int, str, str]]:
    """The exit code, stdout and stderr of each command."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **ENCODINGS[encoding]}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(commands)],
        capture_output=True, env=env, cwd=folder, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codec = CODECS.get(encoding, "ascii")
    outs, errs = (
        [part.partition("\n")[::2] for part in ("\n" + text.decode(codec)).split("\n=== ")]
        for text in (done.stdout, done.stderr)
    )
    texts = zip(outs[1:], outs, errs, strict=False)
    return [(int(code), out.strip(), err.strip()) for (code, _), (_, out), (_, err) in texts]


def test_a_locale_whose_file_names_are_ascii(tmp_path: Path) -> None:
    commands = [["load"], ["parity"], ["inspect", "demo"], ["generate", "The", "--json"]]
    for code, out, err in run_all(commands, tmp_path, "C locale in ASCII"):
        assert (code, "Traceback" in err) == (0, False)
        assert out


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if "in ASCII" not in name])
def test_no_command_crashes(tmp_path: Path, encoding: str) -> None:
    named = shutil.copytree(DEMO, tmp_path / "Prüfung ✓")
    unnamed = shutil.copytree(DEMO, tmp_path / "of bytes \udcff")
    text = GPT.replace(f"{TANH})", "F.gelu(self.up(self.norm_2(x))))  # ✓ größer").replace(
        "self.qkv", "self.größe"
    )
    (tmp_path / "modèle.py").write_text(text, encoding="utf-8")
    (tmp_path / "prompts").write_text('"Héllo ✓"\n', encoding="utf-8")
    (tmp_path / "empty ✓").mkdir()
    few = ["--max-new-tokens", "3", "--temperature", "0"]
    generate = ["generate", "Héllo ✓ 日本", *few]
    commands = [
        ["--help"],
        ["parity", "--help"],
        ["load", "--model", str(named)],
        ["load", "--model", f"{unnamed}/nothing"],
        ["parity", "--all", "--html", "page.html", "--model", str(named)],
        ["inspect", str(named)],
        ["inspect", "empty ✓"],
        ["inspect", f"{unnamed}/nothing"],
        ["export", str(named), "exported ✓"],
        ["adapt", "modèle.py:MyGPT"],
        ["adapt", "modèle.py:MyGPT", "--emit-map"],
        ["adapt", "modèle.py:Größer"],
        [*generate, "--n", "2"],
        generate,
        ["load", "--model", "./✓"],
        ["✓"],
    ]
    as_json = [
        ["load", "--model", str(named), "--json"],
        ["inspect", f"{unnamed}/nothing", "--json"],
        ["parity", "--model", str(named), "--json"],
        ["inspect", str(named), "--json"],
        ["export", str(named), "exported ✓", "--json"],
        ["adapt", "modèle.py:MyGPT", "--json"],
        [*generate, "--json"],
        ["generate", "--prompt-file", "prompts", *few],
    ]
    found = run_all(commands + as_json, tmp_path, encoding)
    assert [code for code, _, _ in found] == [
        *[0, 0, 0, 3, 0, 0, 3, 3, 0, 1, 1, 3, 0, 0, 3, 2], *[0, 3, 0, 0, 0, 1, 0, 0],
    ]  # fmt: skip
    for (_, _, err), argv in zip(found, commands + as_json, strict=True):
        assert "Traceback" not in err and "bug in compat" not in err, argv
    values: list[Any] = [json.loads(out) for _, out, _ in found[len(commands) :]]
    assert values[0]["model"] == values[2]["source"] == values[3]["source"] == str(named)
    assert values[1]["source"] == f"{unnamed}/nothing"
    assert any("größe" in name for row in values[5]["name_map"] for name in row["parameters"])
    assert values[6]["prompt"] == generate[1]
    assert values[7]["prompt"] == "Héllo ✓"
    shown = found[9][1]
    assert f":{ERF_LINE}" in shown
    unicode = encoding in ("UTF-8", "C locale")
    assert f"{'✗' if unicode else 'x'} erf_gelu" in shown
    assert f"{'✓' if unicode else '+'} would load" in found[5][1]
