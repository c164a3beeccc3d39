"""`generate --prompt-file`: its input and output, and how a run is resumed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compat import Engine, GenerationError
from compat.cli.prompt_file import read_prompts
from compat.generation import Sampling, generate_text
from tests.command_line import ROOT, Cli, Outcome
from tests.conftest import MakeCheckpoint
from tests.text_common import TOKENIZER, interrupt_at, with_tokenizer

PROMPTS = ["ROMEO:", "O ", "Ünd — \N{SNOWMAN}", "The king", "x"]


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return with_tokenizer(make_checkpoint, n_positions=64)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


def run(cli: Cli, folder: Path, file: object, *options: object) -> Outcome:
    how = ("--model", folder, "--seed", 1, "--max-new-tokens", 8, "--batch-size", 3)
    return cli("generate", "--prompt-file", file, *how, *options)


def expected(folder: Path, n: int = 1, **how: Any) -> list[dict[str, Any]]:
    how = {"seed": 1, "max_new_tokens": 8, "batch_size": 3, "sampling": Sampling(0.8), **how}
    engine = Engine.from_pretrained(folder, max_batch=how["batch_size"])
    completions = generate_text(engine, TOKENIZER, PROMPTS, n=n, **how)
    return [
        {"index": i // n, "sample": i % n, **completion.to_json()}
        for i, completion in enumerate(completions)
    ]


def lines(text: str | Path) -> list[dict[str, Any]]:
    text = text.read_text(encoding="utf-8") if isinstance(text, Path) else text
    assert text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("n", [1, 2])
def test_the_results_of_all_prompts_are_printed_in_order(
    cli: Cli, folder: Path, file: Path, n: int
) -> None:
    done = run(cli, folder, file, "--n", n, "--logprobs")
    assert done.code == 0
    assert lines(done.out) == expected(folder, n, logprobs=True)
    assert done.err.startswith(
        f"{5 * 8 * n} tokens, "
    )  # and no progress bar, because this is not a terminal


def test_prompts_are_read_from_stdin_and_results_written_to_a_file(
    cli: Cli, folder: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    done = run(cli, folder, "-", "--out", tmp_path / "out")
    assert (done.code, done.out) == (0, "")
    assert lines(tmp_path / "out") == expected(folder)


READ = {
    "plain": ("ROMEO:\nO \n", ["ROMEO:", "O "]),
    "windows": ("\ufeffa\r\nb\r\n", ["a", "b"]),
    "blank lines": ("\na\n  \n\nb", ["a", "b"]),
    "other separators": ("a\u2028b\x0cc\n", ["a\u2028b\x0cc"]),
    "strings": ('"a\\nb"\n"c"\n""\n', ["a\nb", "c", ""]),
    "objects": ('{"prompt": "a", "id": 3}\n\n"b"\n{"prompt": "c"}', ["a", "b", "c"]),
    "numbers are text": ("1\n2\n", ["1", "2"]),
    "a quotation later on": ('He said:\n"Yes."\n{no', ["He said:", '"Yes."', "{no"]),
    "a quotation": ('"Yes," he said.\nb', ['"Yes," he said.', "b"]),
}


@pytest.mark.parametrize("case", READ)
def test_prompts_are_lines_of_text_or_json(tmp_path: Path, case: str) -> None:
    written, prompts = READ[case]
    (tmp_path / "prompts").write_bytes(written.encode())
    assert read_prompts(str(tmp_path / "prompts")) == prompts


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (b"", "has no prompts"),
        (b" \n\n", "has no prompts"),
        (b"a\nb\xff\n", "line 2: byte 3 is not UTF-8"),
        (b'"a"\n\n{"prompt": "b"\n', 'line 3 is .*"prompt": "b"'),
        (b'"a"\nb\n', "line 2 is 'b', but the first line is JSON"),
        (b'{"text": "a"}\n', "line 1 is"),
        (b'{"prompt": 3}\n', "line 1 is"),
        (b'{"prompt": "a"}\n["b"]\n', "line 2 is"),
        (b'"a"\n' + b"[" * 100_000, "line 2 is"),
    ],
    ids=str,
)
def test_a_file_without_valid_prompts_is_an_error(
    tmp_path: Path, written: bytes, named: str
) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(written)
    with pytest.raises(GenerationError, match=named) as caught:
        read_prompts(str(path))
    assert str(caught.value).startswith(str(path))


def test_a_prompt_that_does_not_fit_is_an_error_before_anything_is_written(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "prompts", tmp_path / "out"
    file.write_text("O\n" + "\x01" * 60 + "\n")
    done = run(cli, folder, file, "--out", out)
    assert (done.code, done.out, out.exists()) == (2, "", False)
    assert "prompt 2 of 2, '\\x01" in done.err and "60 prompt tokens" in done.err


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are a POSIX feature")
def test_the_progress_bar_on_a_terminal_is_not_part_of_the_results(
    folder: Path, file: Path, tmp_path: Path
) -> None:
    ours, theirs = os.openpty()
    argv = ("--model", folder, "--seed", 1, "--max-new-tokens", 8, "--batch-size", 3)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/generate.py", "--prompt-file", file, *map(str, argv)],
        stdout=subprocess.PIPE, stderr=theirs, check=False, timeout=120,
        env={**os.environ, "PYTHONUTF8": "1", "TERM": "xterm", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "texts" in shown and "100%" in shown and "40 tokens" in shown
    assert [line["index"] for line in lines(done.stdout.decode())] == [0, 1, 2, 3, 4]


# --resume


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_that_was_interrupted_anywhere_can_be_resumed(
    cli: Cli, folder: Path, file: Path, tmp_path: Path, n: int
) -> None:
    """Complete results are kept and not generated again."""
    out = tmp_path / "out"
    assert run(cli, folder, file, "--n", n, "--out", out).code == 0
    complete = out.read_bytes()
    ends = [i + 1 for i, byte in enumerate(complete) if byte == ord("\n")]
    for size in (0, 1, ends[0] - 1, ends[0], ends[1] + 50, ends[2], ends[-2], len(complete)):
        out.write_bytes(complete[:size])
        done = run(cli, folder, file, "--n", n, "--out", out, "--resume")
        assert (done.code, done.out) == (0, "")
        assert out.read_bytes() == complete
        finished = sum(end <= size for end in ends) // n
        assert done.err.startswith(f"{(5 - finished) * n * 8} tokens")


def test_resume_may_create_the_file_and_without_it_no_file_is_overwritten(
    cli: Cli, folder: Path, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(cli, folder, file, "--out", out, "--resume").code == 0
    complete = out.read_bytes()
    assert lines(out) == expected(folder)
    done = run(cli, folder, file, "--out", out)
    assert (done.code, out.read_bytes()) == (2, complete)
    assert "--resume" in done.err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda data: data.replace(b'"ROMEO:"', b'"JULIET:"'),
            "line 1 is the result of prompt 0, text 0",
        ),
        (lambda data: data[data.index(b"\n") + 1 :], "line 1 is the result of prompt 1"),
        (lambda data: data + data, "line 6 is the result of prompt 0"),
        (lambda data: b"notes\n" + data, "line 1 is not the result of a prompt"),
        (lambda data: b"[1]\n" + data, "line 1 is not the result of a prompt"),
        (lambda data: data.replace(b'"sample": 0', b'"sample": 1'), "the same --n"),
    ],
)
def test_a_file_with_other_content_is_not_changed(
    cli: Cli, folder: Path, file: Path, tmp_path: Path, change: Any, named: str
) -> None:
    out = tmp_path / "out"
    run(cli, folder, file, "--out", out)
    changed = change(out.read_bytes())
    out.write_bytes(changed + b"half a li")
    done = run(cli, folder, file, "--out", out, "--resume")
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert out.read_bytes() == changed + b"half a li"


@pytest.mark.parametrize(("finished", "written"), [(3, [0, 1, 2, 3]), (4, [0, 1, 2])])
def test_an_interrupted_run_writes_the_finished_texts_of_its_last_batch_up_to_a_gap(
    cli: Cli,
    folder: Path,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: int,
    written: list[int],
) -> None:
    """The second batch is interrupted at its fourth token, when one of two texts is finished."""
    complete = expected(folder, sampling=Sampling(0))
    others = {i for line in complete if line["index"] != finished for i in line["new_ids"]}
    stop = next(i for i in complete[finished]["new_ids"][:3] if i not in others)
    interrupt_at(monkeypatch, "scores", 8 + 4)
    options = ("--temperature", 0, "--stop-id", stop, "--out", tmp_path / "out")
    done = run(cli, folder, file, *options)
    assert done.code == 130
    found = lines(tmp_path / "out")
    assert [line["index"] for line in found] == written
    assert [line["prompt"] for line in found] == PROMPTS[: len(written)]
    assert all(line["finish_reason"] != "interrupted" for line in found)


def test_an_out_file_that_cannot_be_written_exits_with_2(
    cli: Cli, folder: Path, file: Path
) -> None:
    done = run(cli, folder, file, "--out", file.parent / "no" / "out")
    assert (done.code, done.out) == (2, "")
    assert "cannot write" in done.err
