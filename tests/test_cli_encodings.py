"""Output in encodings that lack ✓: all commands, as text and as JSON, in separate processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compat.checkpoint.find import DEMO
from compat.cli import main
from tests.adapt_project import ERF_LINE, GPT, TANH
from tests.command_line import ROOT
from tests.forked import Forked

STREAMS = ("ascii", "cp1252")  # values of PYTHONIOENCODING
LOCALES = {
    "C locale": {"LC_ALL": "C"},
    "C locale in ASCII": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}
COMPLETE = ("ascii",)  # encodings with which slow commands are tested, too
CODECS = {"cp1252": "cp1252", "C locale": "utf-8"}
START = (
    "import json, sys; from tests.test_cli_encodings import run_in_turn; "
    "run_in_turn(*json.load(sys.stdin))"
)


def run_in_turn(commands: list[list[str]], folder: str, encoding: str | None = None) -> None:
    """Run the commands, and print the exit code of each after its output."""
    os.chdir(folder)
    if encoding is not None:
        sys.stdout = open(1, "w", encoding=encoding, errors="strict", closefd=False)
        sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False)
    for argv in commands:
        with pytest.raises(SystemExit) as exited:
            main(argv)
        for stream in (sys.stdout, sys.stderr):
            print(f"\n=== {exited.value.code or 0}", file=stream, flush=True)


def run_all(commands: list[list[str]], folder: Path, encoding: str) -> list[tuple[int, str, str]]:
    """Return the exit code, stdout and stderr of each command."""
    codec = CODECS.get(encoding, "ascii")
    if encoding in STREAMS:
        forked = Forked(run_in_turn, commands, str(folder), encoding, of_tests=True)
        code, out, err = forked.wait(300, codec)
    else:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO"))}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **LOCALES[encoding]}
        done = subprocess.run(
            [sys.executable, "-c", START], input=json.dumps([commands, str(folder)]).encode(),
            capture_output=True, env=env, timeout=300, check=False,
        )  # fmt: skip
        code, out, err = done.returncode, done.stdout.decode(codec), done.stderr.decode(codec)
    assert code == 0, err
    outs, errs = (
        [part.partition("\n")[::2] for part in ("\n" + text).split("\n=== ")] for text in (out, err)
    )
    texts = zip(outs[1:], outs, errs, strict=False)
    return [(int(code), out.strip(), err.strip()) for (code, _), (_, out), (_, err) in texts]


def test_commands_run_in_a_locale_with_ascii_file_names(tmp_path: Path) -> None:
    commands = [["load"], ["parity"], ["inspect", "demo"], ["generate", "The", "--json"]]
    for code, out, err in run_all(commands, tmp_path, "C locale in ASCII"):
        assert (code, "Traceback" in err) == (0, False)
        assert out


@pytest.mark.parametrize("encoding", [*STREAMS, "C locale"])
def test_no_command_fails_to_encode_its_output(tmp_path: Path, encoding: str) -> None:
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
    expected = [
        (0, ["--help"]),
        (0, ["parity", "--help"]),
        (0, ["load", "--model", str(named)]),
        (3, ["load", "--model", f"{unnamed}/nothing"]),
        (0, ["parity", "--html", "page.html", "--model", str(named)]),
        (0, ["inspect", str(named)]),
        (3, ["inspect", "empty ✓"]),
        (3, ["inspect", f"{unnamed}/nothing"]),
        (0, ["export", str(named), "exported ✓"]),
        (1, ["adapt", "modèle.py:MyGPT"]),
        (1, ["adapt", "modèle.py:MyGPT", "--emit-map"]),
        (3, ["adapt", "modèle.py:Größer"]),
        (0, [*generate, "--n", "2"]),
        (0, generate),
        (3, ["load", "--model", "./✓"]),
        (2, ["✓"]),
        (0, ["load", "--model", str(named), "--json"]),
        (3, ["inspect", f"{unnamed}/nothing", "--json"]),
        (0, ["parity", "--model", str(named), "--json"]),
        (0, ["inspect", str(named), "--json"]),
        (0, ["export", str(named), "exported ✓", "--json"]),
        (1, ["adapt", "modèle.py:MyGPT", "--json"]),
        (0, [*generate, "--json"]),
        (0, ["generate", "--prompt-file", "prompts", *few]),
    ]
    if encoding not in COMPLETE:
        expected = [(code, argv) for code, argv in expected if argv[0] not in ("parity", "adapt")]
    commands = [argv for _, argv in expected]
    found = dict(zip(map(" ".join, commands), run_all(commands, tmp_path, encoding), strict=True))
    assert {line: code for line, (code, _, _) in found.items()} == {
        " ".join(argv): code for code, argv in expected
    }
    for line, (_, _, err) in found.items():
        assert "Traceback" not in err and "bug in compat" not in err, line
    values: dict[str, Any] = {
        line: json.loads(out) for line, (_, out, _) in found.items() if line.endswith("--json")
    }
    for command, key in (("load --model", "model"), ("inspect", "source")):
        assert values[f"{command} {named} --json"][key] == str(named)
    assert values[f"inspect {unnamed}/nothing --json"]["source"] == f"{unnamed}/nothing"
    assert values[" ".join([*generate, "--json"])]["prompt"] == generate[1]
    from_file = json.loads(found[" ".join(["generate", "--prompt-file", "prompts", *few])][1])
    assert from_file["prompt"] == "Héllo ✓"
    unicode = encoding == "C locale"
    assert f"{'✓' if unicode else '+'} would load" in found[f"inspect {named}"][1]
    if encoding in COMPLETE:
        assert values[f"parity --model {named} --json"]["source"] == str(named)
        rows = values["adapt modèle.py:MyGPT --json"]["name_map"]
        assert any("größe" in name for row in rows for name in row["parameters"])
        shown = found["adapt modèle.py:MyGPT"][1]
        assert f":{ERF_LINE}" in shown
        assert f"{'✗' if unicode else 'x'} erf_gelu" in shown
