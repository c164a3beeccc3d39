"""`adapt` on the command line: what it prints about a user's model, and to which stream."""

from __future__ import annotations

import json
import socket
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console

from compat import Adaptation, Finding, NameMap, check_parity, load_into
from compat.adaptation import CODES
from compat.adaptation.diagnosis.explanations import EXPLANATIONS, explain
from compat.cli.adapt import show
from compat.errors import collapse_layers
from compat.tap import Tap
from compat.user_models import load_target
from tests.adapt_project import ERF_LINE, ERF_SOURCE, GPT, line_of, notebook
from tests.command_line import Cli, run_forked, script
from tests.conftest import State, Write

pytestmark = pytest.mark.usefixtures("project", "shared_reference")


def _notes(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("note: ")]


# Output for people


def test_a_breakpoint_does_not_stop_the_calls(cli: Cli, tiny: Path, project: Path) -> None:
    source = GPT.replace('print("called")', "breakpoint()")
    (project / "stopped.py").write_text(source)
    done = cli("adapt", "stopped.py:MyGPT", "--model", tiny)
    assert source != GPT and done.code == 0 and "(Pdb)" not in done.out + done.err


def test_a_model_that_passes_exits_with_0(cli: Cli, tiny: Path) -> None:
    """The output of the model's own code goes to stderr."""
    done = cli("adapt", "right.py:MyGPT", "--model", tiny)
    assert done.code == 0
    printed, [built] = set(done.err.splitlines()), _notes(done.err)
    assert printed == {"built", "called", built}
    assert built == "note: compat built MyGPT(vocab=97, context=32, width=24, heads=4, layers=3)"
    first, *_, last = done.out.splitlines()
    assert last == f'    adapt(model, "{tiny}").raise_if_failed()'
    assert first.startswith("✓ mapped 40 of 40 tensors   ✓ parity at ")
    assert ", and logits on 22 inputs; max|Δlogits| = " in first
    assert "✗" not in done.out


@pytest.mark.parametrize("file", ["erf.py", "deeper/erf.py"])
def test_a_deviation_is_printed_with_its_line_and_its_fix(cli: Cli, tiny: Path, file: str) -> None:
    done = cli("adapt", f"{file}:MyGPT", "--model", tiny)
    assert done.code == 1
    headline, empty, place, what, fix, evidence, *_ = done.out.splitlines()
    assert headline == "✓ mapped 40 of 40 tensors   ✗ parity fails from h.0.act on"
    assert empty == ""
    assert place == f"{file}:{ERF_LINE}  {ERF_SOURCE}"
    assert what == f"  ✗ erf_gelu · breaks parity at h.0.act: {CODES['erf_gelu'].message}"
    assert fix == '  → F.gelu(x, approximate="tanh")'
    assert evidence.startswith("    confirmed: ")


def test_a_file_outside_the_working_directory_is_named_by_its_full_path(
    cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "deeper")
    done = cli("adapt", tmp_path / "erf.py:MyGPT", "--model", tiny)
    assert done.out.splitlines()[2] == f"{tmp_path}/erf.py:{ERF_LINE}  {ERF_SOURCE}"


def test_another_model_of_the_file_is_used_if_the_last_one_is_refused(cli: Cli, tiny: Path) -> None:
    """If the user names a class, no other class is examined."""
    last = """

class OtherGPT(nn.Module):
    def __init__(self, vocab, attention):
        super().__init__()
        self.tokens = nn.Embedding(vocab, attention.mlp.norm.head.position)
        self.block = self.mlp = self.norm = self.head = None
"""
    check_instead_of(cli, tiny, "OtherGPT", last)
    refused = cli("adapt", "two.py:OtherGPT", "--model", tiny)
    assert refused.code == 3 and not refused.out


def test_a_model_that_runs_in_one_depth_only_is_built_in_it(cli: Cli, tiny: Path) -> None:
    """That is only known once it is called with all arguments that it requires."""
    Path("deep.py").write_text(
        GPT.replace("def forward(self, ids):", "def forward(self, ids, targets):\n"
                    "        assert len(self.blocks) == 6")
    )  # fmt: skip
    done = cli("adapt", "deep.py", "--model", tiny)
    assert done.code == 1 and "n_layer_mismatch" in done.out
    [note] = [line for line in _notes(done.err) if "compat built" in line]
    assert note.endswith("layers=6); your code runs with 6 layers and not with 3")


def test_a_model_that_takes_vectors_is_built_with_the_switch_for_ids(cli: Cli, tiny: Path) -> None:
    """The switch is only in the body of the config's class."""
    configured = """

class Config:
    discrete = False

    def __init__(self, vocab, context, **kwargs):
        self.vocab, self.context = vocab, context
        for name, value in kwargs.items():
            setattr(self, name, value)


class Behaviour(MyGPT):
    def __init__(self, config: Config):
        super().__init__(
            config.vocab, config.context, config.width, config.heads, config.layers
        )
        self.discrete = config.discrete

    def forward(self, ids):
        if not self.discrete:
            B, T, C = ids.shape
        return super().forward(ids)
"""
    Path("switched.py").write_text(GPT + configured)
    done = cli("adapt", "switched.py", "--model", tiny)
    assert done.code == 0
    [note] = [line for line in _notes(done.err) if "compat built" in line]
    assert "; your code only runs with config.discrete=True" in note
    own = cli("adapt", "switched.py", "--model", tiny, "--kwargs", '{"config": {"discrete": true}}')
    assert own.code == 0 and "only runs with" not in own.err


def check_instead_of(cli: Cli, tiny: Path, refused: str, last: str) -> None:
    """Check that MyGPT is examined in a file whose last model is refused."""
    Path("two.py").write_text(GPT + last)
    done = cli("adapt", "two.py", "--model", tiny)
    assert done.code == 0 and done.out.startswith("✓ mapped 40 of 40 tensors")
    [note] = [line for line in _notes(done.err) if "was examined" in line]
    assert note.startswith(f"note: two.py:MyGPT was examined, because {refused} was refused: ")


def test_the_model_that_another_one_uses_is_examined_if_that_is_refused(
    cli: Cli, tiny: Path
) -> None:
    last = """

class SeveralGPTs(nn.Module):
    def __init__(self, vocab, config):
        super().__init__()
        self.head = nn.Embedding(vocab, 2)
        self.blocks = self.norm = self.mlp = self.positions = None
        self.members = nn.ModuleList(MyGPT(**member.sizes) for member in config["members"])
"""
    check_instead_of(cli, tiny, "SeveralGPTs", last)


def test_the_base_of_a_model_is_used_if_the_model_is_refused(cli: Cli, tiny: Path) -> None:
    last = """

class TrainedGPT(MyGPT):
    def forward(self, ids, labels):
        return nn.functional.cross_entropy(super().forward(ids), labels)
"""
    check_instead_of(cli, tiny, "TrainedGPT", last)


def test_a_notebook_is_adapted(cli: Cli, tiny: Path) -> None:
    """Only the code of the model is executed, and the line number is the one in its cell."""
    done = cli("adapt", "notebook.ipynb:MyGPT", "--model", tiny)
    (place,) = (line for line in done.out.splitlines() if ERF_SOURCE in line)
    assert done.code == 1
    assert place.startswith("notebook.ipynb")
    assert f":{ERF_LINE}  " in place


def test_tensors_without_a_parameter_are_listed(cli: Cli, tiny: Path) -> None:
    done = cli("adapt", "biasless.py:MyGPT", "--model", tiny)
    headline, unmatched, *_ = done.out.splitlines()
    assert done.code == 1
    assert headline.startswith("✗ mapped 37 of 40 tensors   ✗ parity fails from h.0.")
    assert unmatched == "  no parameter for h.{0…2}.attn.c_attn.bias"


def test_names_are_collapsed_by_layer() -> None:
    names = ["wpe.weight", *(f"h.{i}.ln_1.bias" for i in (0, 1, 2, 5, 11)), "h.3.ln_2.bias"]
    names += [f"h.{i}.mlp.c_fc.bias" for i in range(12)]
    assert collapse_layers(names) == [
        "wpe.weight",
        "h.{0…2,5,11}.ln_1.bias",
        "h.3.ln_2.bias",
        "h.{0…11}.mlp.c_fc.bias",
    ]


SOURCE = "scores = torch.einsum('bqhd,bkhd->bhqk', queries, keys)[:, None] * self.width**-0.5"
FIX = (
    "scores = torch.einsum('bqhd,bkhd->bhqk', queries, keys) / math.sqrt(self.width // self.heads)"
)


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_narrow_terminal_cuts_neither_source_nor_fix(width: int) -> None:
    """Everything else is wrapped to the width."""
    texts = {"message": "word " * 40, "fix": FIX, "evidence": "far " * 40, "source_line": SOURCE}
    finding = Finding("scale_by_d_model", "breaks", "h.0.probs", "my.py", 87, **texts)
    style = Finding("untied_head", "info", None, None, None, None, "but " * 40, "nothing", "")
    unmatched = [f"h.{i}.attn.c_attn.{kind}" for i in range(12) for kind in ("weight", "bias")]
    adaptation = Adaptation(
        "GPT", "gpt2", 12, 148, unmatched, NameMap(()), None, [finding, finding, style]
    )
    out = StringIO()
    show(adaptation, Console(file=out, width=width, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    assert [line.strip() for line in lines].count(f"→ {FIX}") == 2
    assert sum(line.endswith(SOURCE) for line in lines) == 1  # two findings on one line
    whole = {line for line in lines if SOURCE in line or FIX in line}
    assert max(len(line) for line in lines if line not in whole) <= width
    text = " ".join(out.getvalue().split())
    assert f"scale_by_d_model · breaks parity at h.0.probs: {'word ' * 40}" in text
    assert f"· untied_head: {'but ' * 40} → nothing".replace("  ", " ") in text
    assert "✗ mapped 124 of 148 tensors" in text
    assert "no parameter for h.{0…11}.attn.c_attn.weight and h.{0…11}.attn.c_attn.bias" in text


# Output for programs


@pytest.mark.parametrize(("file", "code"), [("right.py", 0), ("erf.py", 1)])
def test_json_has_every_field(cli: Cli, tiny: Path, tmp_path: Path, file: str, code: int) -> None:
    done = cli("adapt", f"{file}:MyGPT", "--model", tiny, "--json")
    found = done.json()
    assert (done.code, found["compatible"]) == (code, code == 0)
    assert (found["model"], found["source"]) == ("MyGPT", str(tiny))
    assert (found["mapped"], found["tensors"], found["unmatched"]) == (40, 40, [])
    assert len(found["name_map"]) == 40
    assert found["parity"]["passed"] is (code == 0)
    assert found["seconds"].keys() >= {"trace", "map", "load", "parity", "diagnose"}
    breaking = [finding for finding in found["findings"] if finding["severity"] == "breaks"]
    assert [finding["code"] for finding in breaking] == ["erf_gelu"] * code
    for finding in breaking:
        assert (finding["file"], finding["line"]) == (str(tmp_path / "erf.py"), ERF_LINE)
        assert finding["source_line"] == ERF_SOURCE
        assert finding["tap"] == "h.0.act"


def test_the_emitted_map_loads_the_model(cli: Cli, tiny: Path) -> None:
    """The code can be pasted unchanged; stdout contains nothing else."""
    argv = ("adapt", "right.py:MyGPT", "--model", tiny)
    done, rows = cli(*argv, "--emit-map"), cli(*argv, "--json").json()["name_map"]
    assert done.code == 0
    assert "✓ mapped 40 of 40 tensors" in done.err
    pasted: dict[str, Any] = {}
    exec(compile(done.out, "pasted.py", "exec"), pasted)
    name_map: NameMap = pasted["name_map"]
    assert [
        {"tensor": row.hf, "operation": str(row.op), "parameters": list(row.ours)}
        for row in name_map.expand(3)
    ] == rows
    model = load_target("right.py:MyGPT")(97, 32, 24, 4, 3)
    load_into(model, name_map, tiny)
    assert check_parity(model.eval(), tiny, taps=[Tap("logits", "")]).passed


def test_the_html_report_is_written(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = cli("adapt", "erf.py:MyGPT", "--model", tiny, "--html", page, "--json")
    assert done.code == 1
    assert done.err.splitlines()[-1] == f"wrote {page}"
    assert "erf_gelu" in page.read_text(encoding="utf-8")
    assert done.json()["compatible"] is False


def test_notes_on_the_checkpoint_go_to_stderr(
    cli: Cli, tiny: Path, state: State, write: Write
) -> None:
    folder = write({**state, "h.0.attn.bias": torch.ones(1, 1, 32, 32).tril()})
    done = cli("adapt", "right.py:MyGPT", "--model", folder)
    assert done.code == 0
    assert "causal-mask" in done.err
    assert "causal-mask" not in done.out


def test_help_states_whose_code_is_run(cli: Cli) -> None:
    done = cli("adapt", "--help")
    text = " ".join(done.out.split())
    assert done.code == 0
    assert "The model's code is imported and run" in text
    assert "no code from the checkpoint is run" in text


# The scripts


def test_the_script_runs_the_command(tiny: Path, tmp_path: Path) -> None:
    done = script("adapt", f"{tmp_path}/erf.py:MyGPT", "--model", tiny)
    assert done.returncode == 1
    assert done.stdout.startswith("✓ mapped 40 of 40 tensors")
    assert f"erf.py:{ERF_LINE}" in done.stdout


def test_the_benchmark_times_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", run_forked)
    done = script("bench", "adapt", "--model", "demo", "--runs", "1", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["runs"]) == (0, "", 1)
    assert found["seconds"].keys() >= {"trace", "map", "load", "reference", "parity", "diagnose"}
    assert sum(found["seconds"].values()) == pytest.approx(found["total"])
    assert found["total"] < found["process"]
    assert found["ratio"] == pytest.approx(found["total"] / (6 * found["forward"] + 10))


# Repairs


def test_a_diff_is_printed_and_nothing_is_written(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests cover the proof, and the next test runs it.
    monkeypatch.setattr("compat.adaptation.repair.repair.is_proved", lambda *_: True)
    before = Path("erf.py").read_text()
    done = cli("adapt", "erf.py:MyGPT", "--model", tiny, "--diff")
    assert done.code == 1
    changed = [line for line in done.out.splitlines() if line.startswith(("+", "-"))]
    assert changed[:2] == ["--- a/erf.py", "+++ b/erf.py"]
    assert changed[2] == f"-        {ERF_SOURCE}" and 'approximate="tanh"' in changed[3]
    assert "Write them with --fix" in done.err
    assert Path("erf.py").read_text() == before


def test_a_fix_is_written(cli: Cli, tiny: Path) -> None:
    done = cli("adapt", "erf.py:MyGPT", "--model", tiny, "--fix")
    assert done.code == 0 and "repaired erf_gelu in erf.py" in done.err
    assert cli("adapt", "erf.py:MyGPT", "--model", tiny).code == 0


def test_a_model_that_runs_in_another_width_is_not_repaired(cli: Cli, tiny: Path) -> None:
    path = Path("narrow.py")
    last = "self.norm = nn.LayerNorm"
    edited = Path("erf.py").read_text().replace(f"{last}(width)", f"{last}(40)")
    path.write_text(edited)
    done = cli("adapt", "narrow.py:MyGPT", "--model", tiny, "--fix")
    assert done.code == 1 and "your code runs in width 40 and not in 24" in done.err
    assert "none for n_embd_mismatch" in done.err and "Nothing was written" in done.err
    assert path.read_text() == edited


@pytest.mark.parametrize("downloads", [True, False])
@pytest.mark.parametrize("reachable", [True, False])
def test_downloads_fail_at_once_if_the_hub_cannot_be_reached(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch, downloads: bool, reachable: bool
) -> None:
    def address(*args: object) -> list[str]:
        if not reachable:
            raise socket.gaierror
        return ["address"]

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", address)
    monkeypatch.setattr("compat.checkpoint.hub.getproxies", dict)
    asked = "# GPT2Tokenizer.from_pretrained('gpt2')" if downloads else ""
    source = f"{asked}\nfrom huggingface_hub import constants\nprint(constants.HF_HUB_OFFLINE)\n"
    Path("download.py").write_text(source + GPT)
    done = cli("adapt", "download.py:MyGPT", "--model", tiny)
    assert done.code == 0 and not constants.HF_HUB_OFFLINE
    assert done.err.startswith(f"{downloads and not reachable}\n")


def test_code_for_an_unavailable_device_is_noted(cli: Cli, tiny: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the machine has the device")
    source = GPT.replace("torch.arange(ids.shape[1])", "torch.arange(ids.shape[1]).to('cuda')")
    Path("device.py").write_text(source)
    done = cli("adapt", "device.py:MyGPT", "--model", tiny)
    assert done.code == 0
    assert "note: your code uses a device that this machine lacks" in done.err


def test_nothing_is_written_if_one_deviation_has_no_fix(cli: Cli, tiny: Path) -> None:
    path = Path("odd.py")
    path.write_text(Path("erf.py").read_text().replace("return self.norm(x)", "return x.sin()"))
    before = path.read_text()
    done = cli("adapt", "odd.py:MyGPT", "--model", tiny, "--fix")
    assert done.code == 1
    assert "edits were found for erf_gelu" in done.err
    assert "but none for extra_operation" in done.err
    assert "Nothing was written" in done.err
    assert "✗" in done.out and path.read_text() == before


def test_the_line_of_a_constructor_in_a_notebook_is_named(cli: Cli, tiny: Path) -> None:
    text = GPT.replace("3 * width)", "3 * width, bias=False)")
    Path("bias.ipynb").write_text(notebook("import torch\nfrom torch import nn", text))
    done = cli("adapt", "bias.ipynb:MyGPT", "--model", tiny)
    line = line_of(text, "bias=False")
    assert (
        f"bias.ipynb#cell-2:{line}  self.qkv = nn.Linear(width, 3 * width, bias=False)" in done.out
    )


def test_further_lines_of_a_deviation_are_listed(cli: Cli, tiny: Path) -> None:
    text = Path("right.py").read_text().replace("LayerNorm(width)", "LayerNorm(width, eps=1e-6)")
    Path("eps.py").write_text(text)
    lines = [n for n, line in enumerate(text.splitlines(), 1) if "eps=1e-6" in line]
    done = cli("adapt", "eps.py:MyGPT", "--model", tiny, "--html", "page.html")
    assert f"eps.py:{lines[0]}  " in done.out
    also = f"also at eps.py:{lines[1]} and eps.py:{lines[2]}"
    assert also in done.out and "<dt>Also at</dt>" in Path("page.html").read_text()


def test_a_custom_call_of_the_model_can_be_passed(cli: Cli, tiny: Path) -> None:
    text = Path("right.py").read_text().replace("def forward(self, ids):", "def run(self, ids, /):")
    Path("own.py").write_text(f"{text}\n\ndef logits(model, ids):\n    return model.run(ids)\n")
    done = cli("adapt", "own.py:MyGPT", "--model", tiny)
    assert done.code == 1 and "partly_examined" in done.out
    for call in ("model.run(ids)", "own.py:logits"):
        assert cli("adapt", "own.py:MyGPT", "--model", tiny, "--forward", call).code == 0
    done = cli("adapt", "own.py:MyGPT", "--model", tiny, "--forward", "model.run(")
    assert done.code == 3 and "for example" in done.err
    done = cli("adapt", "own.py:Block", "--part", "h.0", "--forward", "model(ids)")
    assert done.code == 2 and "--forward" in done.err


def changed(old: str, new: str) -> str:
    """Write a variant of the compatible model, and return its target."""
    text = Path("right.py").read_text()
    assert old in text
    Path("part.py").write_text(text.replace(old, new))
    return "part.py:MyGPT"


def test_vectors_that_are_joined_with_the_tokens_are_reported(cli: Cli, tiny: Path) -> None:
    """Every second vector of two copies of the tokens is read."""
    mlp = "return x + self.down("
    twice = "x = torch.cat([self.merge(x), x @ self.merge.weight], 1)[:, ::2]"
    done = cli("adapt", changed(mlp, f"{twice}\n        {mlp}"), "--model", tiny)
    assert done.code == 1 and "✗ mapped 4 of 40 tensors" in done.out
    reason = "the model's attention cannot be mapped because of extra_tokens"
    assert f"parity could not be checked: {reason}" in done.out and done.out.count("✗") == 3
    assert "part.py:27  x = torch.cat(" in done.out
    words = " ".join(done.out.split())
    assert "attention reads" in words and "but GPT-2 reads nothing but the embeddings" in words


def test_a_tensor_that_is_added_to_the_heads_is_reported(cli: Cli, tiny: Path) -> None:
    target = changed("self.merge(y.transpose", "self.merge(x + y.transpose")
    done = cli("adapt", target, "--model", tiny)
    assert done.code == 1 and "✓ mapped 40 of 40 tensors" in done.out
    assert "the code computes add between the heads and their projection" in done.out
    assert "confirmed" in done.out


def test_a_single_part_is_adapted(cli: Cli, tiny: Path) -> None:
    done = cli("adapt", "erf.py:Block", "--model", tiny, "--part", "h.1")
    assert done.code == 1
    assert done.out.startswith("✓ mapped 12 of 12 tensors")
    assert "erf_gelu · breaks parity at h.1.act" in done.out


@pytest.mark.parametrize("code", CODES)
def test_explain_describes_every_deviation(code: str) -> None:
    what, why, fix = explain(code).split("\n\n")
    assert what.endswith(".") and why == EXPLANATIONS[code] and fix.startswith("Fix: ")
    assert "{" not in explain(code)


def test_explain_suggests_the_nearest_code(cli: Cli) -> None:
    done = cli("explain", "erf_gelu")
    assert done.code == 0 and done.out.startswith("erf_gelu: breaks parity\n")
    assert EXPLANATIONS["erf_gelu"].split()[-1] in done.out
    done = cli("explain", "erf_gleu")
    assert done.code == 2 and "erf_gelu?" in done.err
