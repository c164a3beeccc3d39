"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import Tensor

from compat import HubError, generate, load_pretrained, load_tokenizer
from compat.cli import main
from compat.dialects import linear
from compat.taps import tap_names
from tests.conftest import noisy_reference

ROOT = Path(__file__).parents[1]
each_dialect = pytest.mark.parametrize("dialect", ["linear", "conv1d"])


class Outcome(NamedTuple):
    """What a run of the command line leaves."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command in this process: `cli("load", "--model", folder)`."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*argv: object) -> Outcome:
        with pytest.raises(SystemExit) as exited:
            main([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        return Outcome(int(exited.value.code or 0), out, err)

    return run


@pytest.fixture
def tarot(shared: Path) -> Path:
    return shared / "data/checkpoints/tarot"


def script(name: str, *argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run scripts/NAME.py in a process of its own."""
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "OMP_NUM_THREADS": "1"}
    env.pop("FORCE_COLOR", None)
    return subprocess.run(
        [sys.executable, ROOT / f"scripts/{name}.py", *map(str, argv)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=env,
        timeout=120,
        check=False,
        **options,
    )


# load


def hf_shapes() -> dict[str, list[int]]:
    """transformers' tensors of the `tiny` checkpoint, without the prefix."""
    state = noisy_reference().state_dict()
    return {name.removeprefix("transformer."): list(value.shape) for name, value in state.items()}


@each_dialect
def test_load_says_of_every_tensor_where_it_went(cli: Cli, tiny: Path, dialect: str) -> None:
    done = cli("load", "--model", tiny, "--dialect", dialect, "--json")
    found = done.json()
    assert done.code == 0
    assert {entry["tensor"]: entry["shape"] for entry in found["tensors"]} == hf_shapes()
    made = [p for entry in found["tensors"] for p in entry["parameters"]]
    model = load_pretrained(tiny, dialect)
    expected = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert {p["name"]: p["shape"] for p in made} == expected
    assert len(made) == len(expected)
    assert found["parameters"] == noisy_reference().num_parameters()
    assert (found["dialect"], found["dtype"]) == (dialect, "float32")
    assert found["model"] == str(tiny)
    assert found["weights"] == str(tiny / "model.safetensors")


def test_load_names_the_operation(cli: Cli, tiny: Path) -> None:
    """Only the square c_proj does not show it in its shape."""
    entries = cli("load", "--model", tiny, "--json").json()["tensors"]
    operation = {entry["tensor"]: entry["operation"] for entry in entries}
    assert operation["h.2.attn.c_attn.weight"] == "split in 3, transpose"
    assert operation["h.2.attn.c_attn.bias"] == "split in 3"
    assert operation["h.2.attn.c_proj.weight"] == "transpose"
    assert operation["h.2.attn.c_proj.bias"] == "same"
    entries = cli("load", "--model", tiny, "--dialect", "conv1d", "--json").json()["tensors"]
    assert {entry["operation"] for entry in entries} == {"same"}


@each_dialect
def test_load_shows_a_table_with_a_line_per_kind_of_tensor(
    cli: Cli, tiny: Path, dialect: str
) -> None:
    done = cli("load", "--model", tiny, "--dialect", dialect)
    assert done.code == 0
    for name, shape in hf_shapes().items():
        kind = name.replace("h.0.", "h.{i}.")
        if not name.startswith(("h.1.", "h.2.")):
            (line,) = (line for line in done.out.splitlines() if f" {kind} " in line[:30])
            assert str(shape) in line
            assert ("0 … 2" in line) == ("{i}" in kind)
    for name in load_pretrained(tiny, dialect).state_dict():
        assert name.replace(".0.", ".{i}.", 1) in done.out or ".1." in name or ".2." in name
    assert f"{noisy_reference().num_parameters():,}" in done.out
    assert "tied" in done.out


def test_load_notes_go_to_stderr(cli: Cli, tarot: Path) -> None:
    """Tarot's file has causal masks beside its weights."""
    done = cli("load", "--model", tarot)
    assert done.code == 0
    assert "929,536" in done.out
    assert "causal-mask" in done.err
    assert "causal-mask" not in done.out
    assert "causal-mask" in " ".join(cli("load", "--model", tarot, "--json").json()["notes"])


# parity


@each_dialect
def test_parity_shows_every_layer_and_the_verdict(cli: Cli, tiny: Path, dialect: str) -> None:
    done = cli("parity", "--model", tiny, "--dialect", dialect)
    assert (done.code, done.err) == (0, "")
    for layer in ("embed", "h.0", "h.1", "h.2", "ln_f", "logits"):
        (line,) = (line for line in done.out.splitlines() if f" {layer} " in line[:12])
        assert "✓" in line
    verdict = done.out.splitlines()[-1]
    assert verdict.startswith(f"✓ {dialect} computes what transformers computes")


@each_dialect
def test_parity_as_json_has_every_number(cli: Cli, tiny: Path, dialect: str) -> None:
    done = cli("parity", "--model", tiny, "--dialect", dialect, "--json")
    found = done.json()
    assert (done.code, found["passed"], found["first_divergence"]) == (0, True, None)
    assert (found["model"], found["dialect"], found["dtype"]) == (str(tiny), dialect, "float32")
    assert found["input_shape"] == [2, 32]
    assert [tap["tap"] for tap in found["taps"]] == tap_names(3)
    assert found["max_abs_diff"] == found["taps"][-1]["accumulated"]["max_abs"]
    for tap in found["taps"]:
        assert tap["passed"] is True
        for kind in ("accumulated", "local"):
            measured = tap[kind]
            assert measured["bit_identical"] == (measured["max_abs"] == 0)
            assert 0 <= measured["rel_rms"] < 1e-5
    assert any(not tap["local"]["bit_identical"] for tap in found["taps"]) == (dialect == "linear")
    assert found["versions"]["torch"] == torch.__version__
    assert {"compat", "transformers", "python"} <= found["versions"].keys()


def test_parity_of_both_dialects(cli: Cli, tiny: Path) -> None:
    done = cli("parity", "--model", tiny, "--all", "--json")
    assert done.code == 0
    assert [report["dialect"] for report in done.json()] == ["linear", "conv1d"]
    assert len(cli("parity", "--model", tiny, "--all", "--quiet").out.splitlines()) == 2


def test_parity_quiet_is_one_line(cli: Cli, tiny: Path) -> None:
    done = cli("parity", "--model", tiny, "--quiet")
    (line,) = done.out.splitlines()
    assert (done.code, line[:8]) == (0, "✓ linear")


def test_parity_takes_its_input_from_the_options(cli: Cli, tiny: Path, tarot: Path) -> None:
    def report(model: Path, *options: object) -> Any:
        return cli("parity", "--model", model, "--json", *options).json()

    assert report(tiny, "--batch", 3, "--length", 5)["input_shape"] == [3, 5]
    assert report(tiny, "--dtype", "bfloat16")["dtype"] == "bfloat16"
    assert report(tiny, "--seed", 1)["taps"] != report(tiny)["taps"]
    ids = load_tokenizer(tarot).encode("The more you")
    assert report(tarot, "--text", "The more you")["input_shape"] == [1, len(ids)]


@pytest.fixture
def unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    """A classic mistake in the linear dialect: variance over C − 1."""

    def forward(self: linear.LayerNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.var(-1, keepdim=True) + self.eps).sqrt() * self.scale + self.shift

    monkeypatch.setattr(linear.LayerNorm, "forward", forward)


@pytest.mark.usefixtures("unbiased")
def test_no_parity_is_exit_code_1_and_names_the_culprit(cli: Cli, tiny: Path) -> None:
    done = cli("parity", "--model", tiny, "--json")
    found = done.json()
    assert (done.code, found["passed"], found["first_divergence"]) == (1, False, "h.0.ln_1")
    wrong = {tap["tap"] for tap in found["taps"] if tap["local"]["rel_rms"] > 1e-3}
    assert wrong == {"ln_f", *(f"h.{i}.{norm}" for i in range(3) for norm in ("ln_1", "ln_2"))}
    shown = cli("parity", "--model", tiny)
    assert shown.code == 1
    assert "✗ from ln_1" in shown.out
    assert shown.out.splitlines()[-1].startswith("✗ linear diverges from transformers at h.0.ln_1")


@pytest.mark.usefixtures("unbiased")
def test_one_dialect_without_parity_is_enough_for_exit_code_1(cli: Cli, tiny: Path) -> None:
    done = cli("parity", "--model", tiny, "--all", "--json")
    assert done.code == 1
    assert [report["passed"] for report in done.json()] == [False, True]
    assert cli("parity", "--model", tiny, "--dialect", "conv1d", "--quiet").code == 0


# generate


@each_dialect
def test_generate_prints_the_text_and_nothing_else(cli: Cli, tarot: Path, dialect: str) -> None:
    greedy = ("--temperature", 0, "--max-new-tokens", 14, "--dialect", dialect)
    done = cli("generate", "The", "--model", tarot, *greedy)
    ids = torch.tensor([load_tokenizer(tarot).encode("The")])
    whole = generate(load_pretrained(tarot), ids, max_new_tokens=14, temperature=0)
    assert done.code == 0
    assert done.out == load_tokenizer(tarot).decode(whole[0].tolist()) + "\n"
    assert done.out.startswith("The more you make things happen")
    assert done.err.startswith("14 tokens, ")
    assert "tokens/s" in done.err


def test_generate_as_json(cli: Cli, tarot: Path) -> None:
    tokenizer = load_tokenizer(tarot)
    done = cli("generate", "Héllo", "--model", tarot, "--seed", 1, "--json", "--max-new-tokens", 9)
    found = done.json()
    assert (done.code, found["prompt"]) == (0, "Héllo")
    assert found["prompt_ids"] == tokenizer.encode("Héllo")
    assert len(found["new_ids"]) == 9
    assert found["text"] == tokenizer.decode(found["prompt_ids"] + found["new_ids"])
    assert found["tokens_per_second"] > 0


def test_generate_fills_the_context_if_no_length_is_given(cli: Cli, tarot: Path) -> None:
    found = cli("generate", "The", "--model", tarot, "--temperature", 0, "--json").json()
    assert len(found["prompt_ids"]) + len(found["new_ids"]) == 64


def test_a_seed_makes_the_text_repeatable(cli: Cli, tarot: Path) -> None:
    def text(seed: int, *options: object) -> str:
        return cli("generate", "The", "--model", tarot, "--seed", seed, *options).out

    assert text(1) == text(1) != text(2)
    assert text(1, "--top-k", 3) != text(1) != text(1, "--top-p", 0.5)
    assert text(1, "--top-k", 1) == text(2, "--top-k", 1) == text(1, "--temperature", 0)


def test_text_ends_before_the_stop_id(cli: Cli, tarot: Path, tmp_path: Path) -> None:
    """Tarot, told that a line's end ends a text."""
    folder = shutil.copytree(tarot, tmp_path / "tarot")
    (line_end,) = load_tokenizer(tarot).encode("\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": line_end}))
    sentence = "The more you make things happen the more you will make money too."
    done = cli("generate", "The", "--model", folder, "--temperature", 0)
    assert done.out == sentence + "\n"
    found = cli("generate", "The", "--model", folder, "--temperature", 0, "--json").json()
    assert (found["text"], found["new_ids"][-1]) == (sentence, line_end)


def test_an_empty_prompt_starts_from_end_of_text(cli: Cli, tarot: Path) -> None:
    found = cli("generate", "", "--model", tarot, "--max-new-tokens", 3, "--json").json()
    assert (found["prompt"], found["prompt_ids"], len(found["new_ids"])) == ("", [0], 3)


def test_no_new_tokens_print_the_prompt(cli: Cli, tarot: Path) -> None:
    done = cli("generate", "The", "--model", tarot, "--max-new-tokens", 0)
    assert (done.code, done.out) == (0, "The\n")


def test_a_padded_vocabulary_generates_only_ids_with_text(
    cli: Cli, make_checkpoint: Callable[..., Path], tarot: Path
) -> None:
    """Half of these ids are none of the tokenizer's, and a noisy model likes them as well."""
    folder = make_checkpoint(vocab_size=2000)
    shutil.copy(tarot / "tokenizer.json", folder)
    done = cli("generate", "The", "--model", folder, "--seed", 0, "--max-new-tokens", 20, "--json")
    assert done.code == 0
    assert max(done.json()["new_ids"]) < 1000


# exit codes

COMMANDS = {"load": [], "parity": [], "generate": ["The"]}
each_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["nonsense"], "nonsense"),
        (["load", "--nonsense"], "--nonsense"),
        (["load", "--dialect", "torch"], "torch"),
        (["parity", "--dtype", "int8"], "int8"),
        (["parity", "--batch", "0"], "--batch"),
        (["parity", "--length", "0"], "--length"),
        (["generate"], "prompt"),
        (["generate", "The", "--temperature", "warm"], "--temperature"),
    ],
)
def test_wrong_usage_is_2(cli: Cli, argv: list[str], named: str) -> None:
    done = cli(*argv)
    assert (done.code, done.out) == (2, "")
    assert named in re.sub(r"\x1b\[[\d;]*m", "", done.err)  # colours, where they are forced


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-new-tokens", 200], ["1 prompt", "200", "201", "64"]),
        (["--max-new-tokens", -1], ["-1"]),
        (["--temperature", -1], ["temperature", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-k", 0], ["top_k", "0"]),
        (["--top-p", 1.5], ["top_p", "1.5"]),
        (["--seed", 2**80], ["seed"]),
    ],
)
def test_a_request_that_cannot_be_met_is_2(
    cli: Cli, tarot: Path, options: list[object], named: list[str], as_json: list[str]
) -> None:
    done = cli("generate", "The", "--model", tarot, *options, *as_json)
    assert (done.code, done.out) == (2, "")
    assert all(word in done.err for word in named)


def test_a_prompt_that_fills_the_context_is_2(cli: Cli, tarot: Path) -> None:
    prompt = "The " * 40
    n = len(load_tokenizer(tarot).encode(prompt))
    done = cli("generate", prompt, "--model", tarot)
    assert (done.code, done.out) == (2, "")
    assert f"{n} prompt tokens" in done.err
    assert "64 positions" in done.err


@each_command
def test_a_bad_checkpoint_is_3(cli: Cli, tiny: Path, tmp_path: Path, command: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = shutil.copytree(tiny, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"<html>")
    config = shutil.copytree(tiny, tmp_path / "config")
    (config / "config.json").write_text('{"model_type": "gpt2", "n_head": 0}')
    for source in (tmp_path / "no/such/folder", empty, broken, config):
        done = cli(command, *COMMANDS[command], "--model", source)
        assert (done.code, done.out) == (3, "")
        assert done.err.startswith("error: ")
        assert str(source) in done.err or "n_head" in done.err


@pytest.mark.parametrize("argv", [["generate", "The"], ["parity", "--text", "The"]])
def test_a_checkpoint_without_tokenizer_is_3(cli: Cli, tiny: Path, argv: list[str]) -> None:
    done = cli(*argv, "--model", tiny)
    assert (done.code, done.out) == (3, "")
    assert "tokenizer.json" in done.err


def failing_with(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*args: object) -> NoReturn:
        raise error

    return fail


@each_command
def test_no_network_is_4(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("compat.checkpoint.source.fetch", failing_with(HubError("no route")))
    done = cli(command, *COMMANDS[command], "--model", "some/model")
    assert (done.code, done.out, done.err) == (4, "", "error: no route\n")


@each_command
def test_ctrl_c_is_130(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("compat.checkpoint.source.fetch", failing_with(KeyboardInterrupt()))
    done = cli(command, *COMMANDS[command], "--model", "some/model")
    assert (done.code, done.out) == (130, "")
    assert "interrupted" in done.err
    assert "Traceback" not in done.err


def test_ctrl_c_leaves_the_text_so_far(
    cli: Cli, tarot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> Iterator[Tensor]:
        yield from torch.tensor([[868], [706]])
        raise KeyboardInterrupt

    monkeypatch.setattr("compat.cli.generate.stream", interrupted)
    done = cli("generate", "The", "--model", tarot)
    assert (done.code, done.out.rstrip("\n")) == (130, "The only reason")


# The scripts, as programs


def test_the_scripts_are_the_commands(tiny: Path) -> None:
    load = script("load", "--model", tiny, "--json")
    assert (load.returncode, load.stderr) == (0, "")
    assert len(json.loads(load.stdout)["tensors"]) == len(hf_shapes())
    parity = script("parity", "--model", tiny, "--quiet")
    assert (parity.returncode, parity.stderr) == (0, "")
    assert parity.stdout.startswith("✓ linear")
    generate = script("generate", "The", "--model", tiny)
    assert (generate.returncode, generate.stdout) == (3, "")


def test_a_prompt_that_is_no_utf8_is_no_traceback(tarot: Path) -> None:
    done = script("generate", os.fsdecode(b"a\xff"), "--model", tarot, "--max-new-tokens", 3)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)


def test_a_reader_that_goes_away_is_no_error(tiny: Path) -> None:
    command = [sys.executable, ROOT / "scripts/load.py", "--model", tiny, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
