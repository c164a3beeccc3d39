"""The command line: what each command prints, and to which stream."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import Tokenizer, generate, load_pretrained, load_tokenizer
from compat.checkpoint.find import DEMO
from compat.dialects import DIALECTS
from compat.tap import tap_names
from tests.command_line import Cli
from tests.conftest import MakeCheckpoint, State, Write, noisy_reference
from tests.text_common import with_tokenizer

each_dialect = pytest.mark.parametrize("dialect", DIALECTS)


@pytest.fixture
def demo() -> Tokenizer:
    return load_tokenizer("demo")


def demo_with_stop_id(stop: int | None, folder: Path) -> Path:
    """Copy the embedded checkpoint with another end-of-text id, or with none."""
    shutil.copytree(DEMO, folder)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": stop}))
    return folder


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """The embedded checkpoint without an end-of-text id, so that no text ends early."""
    return demo_with_stop_id(None, tmp_path / "endless")


# load


def hf_shapes() -> dict[str, list[int]]:
    """Return the shapes of transformers' tensors of the `tiny` checkpoint, without the prefix."""
    state = noisy_reference().state_dict()
    return {name.removeprefix("transformer."): list(value.shape) for name, value in state.items()}


@each_dialect
def test_load_lists_every_tensor_with_its_parameters(cli: Cli, tiny: Path, dialect: str) -> None:
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
    """The operation cannot be derived from the shape of the square c_proj."""
    entries = cli("load", "--model", tiny, "--json").json()["tensors"]
    operation = {entry["tensor"]: entry["operation"] for entry in entries}
    assert operation["h.2.attn.c_attn.weight"] == "split in 3, transpose"
    assert operation["h.2.attn.c_attn.bias"] == "split in 3"
    assert operation["h.2.attn.c_proj.weight"] == "transpose"
    assert operation["h.2.attn.c_proj.bias"] == "same"
    entries = cli("load", "--model", tiny, "--dialect", "conv1d", "--json").json()["tensors"]
    assert {entry["operation"] for entry in entries} == {"same"}


@each_dialect
def test_load_shows_a_table_with_a_row_for_each_kind_of_tensor(
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


def test_load_notes_go_to_stderr(cli: Cli, state: State, write: Write) -> None:
    """For example, a note about causal masks among the weights."""
    folder = write({**state, "h.0.attn.bias": torch.ones(1, 1, 32, 32).tril()})
    done = cli("load", "--model", folder)
    assert done.code == 0
    assert f"{noisy_reference().num_parameters():,}" in done.out
    assert "causal-mask" in done.err
    assert "causal-mask" not in done.out
    assert "causal-mask" in " ".join(cli("load", "--model", folder, "--json").json()["notes"])


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
    assert (found["source"], found["model_name"], found["dtype"]) == (str(tiny), dialect, "float32")
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


def test_parity_all_compares_both_dialects(cli: Cli, tiny: Path) -> None:
    done = cli("parity", "--model", tiny, "--all", "--json")
    assert done.code == 0
    assert [report["model_name"] for report in done.json()] == ["linear", "conv1d"]
    assert len(cli("parity", "--model", tiny, "--all", "--quiet").out.splitlines()) == 2


def test_parity_quiet_is_one_line(cli: Cli, tiny: Path) -> None:
    done = cli("parity", "--model", tiny, "--quiet")
    (line,) = done.out.splitlines()
    assert (done.code, line[:8]) == (0, "✓ linear")


def test_parity_uses_the_input_of_the_options(cli: Cli, tiny: Path, demo: Tokenizer) -> None:
    def report(model: object, *options: object) -> Any:
        return cli("parity", "--model", model, "--json", *options).json()

    assert report(tiny, "--batch", 3, "--length", 5)["input_shape"] == [3, 5]
    assert report(tiny, "--dtype", "bfloat16")["dtype"] == "bfloat16"
    assert report(tiny, "--seed", 1)["taps"] != report(tiny)["taps"]
    ids = demo.encode("The more you")
    assert report("demo", "--text", "The more you")["input_shape"] == [1, len(ids)]


# generate


@each_dialect
def test_generate_prints_the_text_and_nothing_else(
    cli: Cli, demo: Tokenizer, endless: Path, dialect: str
) -> None:
    greedy = ("--temperature", 0, "--max-new-tokens", 14, "--dialect", dialect)
    done = cli("generate", "The", "--model", endless, *greedy)
    ids = torch.tensor([demo.encode("The")])
    expected = generate(load_pretrained(endless), ids, max_new_tokens=14, temperature=0)
    assert done.code == 0
    assert done.out == demo.decode(expected[0].tolist()) + "\n"
    assert done.err.startswith("14 tokens, ")
    assert "tokens/s" in done.err


def test_generate_as_json(cli: Cli, demo: Tokenizer, endless: Path) -> None:
    options = ("--seed", 1, "--json", "--max-new-tokens", 9)
    done = cli("generate", "Héllo", "--model", endless, *options)
    found = done.json()
    assert (done.code, found["prompt"]) == (0, "Héllo")
    assert found["prompt_ids"] == demo.encode("Héllo")
    assert len(found["new_ids"]) == 9
    assert found["text"] == demo.decode(found["prompt_ids"] + found["new_ids"])
    assert found["tokens_per_second"] > 0


def test_generate_adds_100_tokens_or_as_many_as_fit_into_the_context(
    cli: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """This is the default. No merge contains the control character of the prompt."""
    n_ids = load_pretrained("demo").config.vocab_size
    folder = with_tokenizer(make_checkpoint, vocab_size=n_ids, n_positions=128)
    for n_prompt, n_new in ((1, 100), (28, 100), (29, 99), (127, 1)):
        found = cli("generate", "\x01" * n_prompt, "--model", folder, "--json").json()
        assert (len(found["prompt_ids"]), len(found["new_ids"])) == (n_prompt, n_new)


def test_a_seed_makes_the_text_reproducible(cli: Cli, endless: Path) -> None:
    def text(seed: int, *options: object) -> str:
        length = ("--max-new-tokens", 30)
        return cli("generate", "The", "--model", endless, "--seed", seed, *length, *options).out

    assert text(1) == text(1) != text(2)
    assert text(1, "--top-k", 3) != text(1) != text(1, "--top-p", 0.5)
    assert text(1, "--top-k", 1) == text(2, "--top-k", 1) == text(1, "--temperature", 0)


def test_text_ends_before_the_stop_id(
    cli: Cli, demo: Tokenizer, endless: Path, tmp_path: Path
) -> None:
    """The end-of-text id is one that occurs in the text of the embedded checkpoint."""
    greedy = ("generate", "The", "--temperature", 0, "--max-new-tokens", 30)
    ids = cli(*greedy, "--model", endless, "--json").json()["new_ids"]
    n = next(n for n in range(5, 30) if ids[n] not in ids[:n])
    sentence = "The" + demo.decode(ids[:n])
    ends = demo_with_stop_id(ids[n], tmp_path / "ends")
    assert cli(*greedy, "--model", ends).out == sentence + "\n"
    found = cli(*greedy, "--model", ends, "--json").json()
    assert (found["text"], found["new_ids"]) == (sentence, ids[: n + 1])


def test_an_empty_prompt_starts_from_end_of_text(cli: Cli, demo: Tokenizer, endless: Path) -> None:
    found = cli("generate", "", "--model", endless, "--max-new-tokens", 3, "--json").json()
    assert (found["prompt"], found["prompt_ids"]) == ("", [demo.end_of_text])
    assert len(found["new_ids"]) == 3


def test_zero_new_tokens_print_the_prompt(cli: Cli) -> None:
    done = cli("generate", "The", "--model", "demo", "--max-new-tokens", 0)
    assert (done.code, done.out) == (0, "The\n")


def test_a_padded_vocabulary_generates_only_ids_with_text(
    cli: Cli, make_checkpoint: MakeCheckpoint, demo: Tokenizer
) -> None:
    """Half of the ids have no text, although a noisy model finds them as likely as the others."""
    n = load_pretrained("demo").config.vocab_size
    folder = with_tokenizer(make_checkpoint, vocab_size=2 * n)
    done = cli("generate", "The", "--model", folder, "--seed", 0, "--max-new-tokens", 20, "--json")
    assert done.code == 0
    new_ids = done.json()["new_ids"]
    assert len(new_ids) == 20
    assert not {*new_ids} & {*demo.ids_without_text(2 * n)}
    ids, seeded = torch.tensor([demo.encode("The")]), torch.Generator().manual_seed(0)
    expected = generate(load_pretrained(folder), ids, max_new_tokens=20, generator=seeded)
    assert {*expected[0].tolist()} & {*demo.ids_without_text(2 * n)}
