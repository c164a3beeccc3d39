"""`adapt` on the command line: models that cannot be built or called, whose parts are examined."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from tests.adapt_project import ERF, GPT, NO_GPT, TANH, line_of
from tests.command_line import Cli

pytestmark = pytest.mark.usefixtures("project", "shared_reference")

CALL, BUILD = "        x = self.tokens(ids)", "        self.tokens = nn.Embedding"
FAILS = '        assert self.training is None, "not yet"'
NO_CALL, NO_BUILD = f"{FAILS}\n{CALL}", f"{FAILS}\n{BUILD}"
NO_LOGITS = GPT.replace(CALL, NO_CALL)
NOT_BUILT = GPT.replace(BUILD, NO_BUILD)
# A class in the class of the model.
_BLOCK = NOT_BUILT[NOT_BUILT.index("class Block") : NOT_BUILT.index("class MyGPT")]
NESTED = NOT_BUILT.replace(_BLOCK, "").replace(" Block(", " self.Block(")
NESTED = NESTED.replace("(nn.Module):\n", f"(nn.Module):\n{indent(_BLOCK, '    ')}")
# A block that needs more than hidden states, of which two parts are modules.
IN_PARTS = NOT_BUILT.replace(
    "        self.up = nn.Linear(width, 4 * width)\n"
    "        self.down = nn.Linear(4 * width, width)\n",
    "        self.mlp = nn.Sequential(\n"
    "            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)\n"
    "        )\n",
).replace(f"self.down({TANH})", "scale.sum() * self.mlp(self.norm_2(x))")
IN_PARTS = IN_PARTS.replace("def forward(self, x)", "def forward(self, x, scale)")


def examined(cli: Cli, text: str, tiny: Path, *options: str) -> dict[str, Any]:
    """Return the result for a model with this source."""
    Path("partly.py").write_text(text)
    done = cli("adapt", "partly.py:MyGPT", "--model", tiny, "--json", *options)
    assert done.code == 1, done.err
    found: dict[str, Any] = json.loads(done.out)
    assert not found["compatible"] and found["parity"] is None and found["mapped"] == 0
    return found


@pytest.mark.parametrize("text", [NO_LOGITS, NOT_BUILT, NESTED])
def test_the_block_of_a_model_is_examined_alone(cli: Cli, tiny: Path, text: str) -> None:
    """The first finding is the line that fails, the second the deviation of the block."""
    erf = text.replace(TANH, ERF)
    assert erf != text
    first, second = examined(cli, erf, tiny)["findings"]
    assert (first["code"], first["severity"]) == ("partly_examined", "breaks")
    assert first["line"] == line_of(erf, FAILS) and "Block as h.0" in first["message"]
    assert "AssertionError: not yet" in first["message"] and FAILS.strip() not in first["message"]
    assert (second["code"], second["line"]) == ("erf_gelu", line_of(erf, ERF))
    assert second["evidence"].startswith("Block was examined alone as h.0; confirmed: ")


def test_a_block_without_deviations_has_no_further_findings(cli: Cli, tiny: Path) -> None:
    (found,) = examined(cli, NOT_BUILT, tiny)["findings"]
    assert found["code"] == "partly_examined"


def test_parts_of_a_block_are_examined_if_it_needs_more_than_hidden_states(
    cli: Cli, tiny: Path
) -> None:
    first, second = examined(cli, IN_PARTS, tiny)["findings"]
    assert "LayerNorm as h.0.ln_1 and Sequential as h.0.mlp" in first["message"]
    assert second["code"] == "relu"


def test_the_output_names_the_parts(cli: Cli, tiny: Path) -> None:
    Path("partly.py").write_text(NOT_BUILT.replace(TANH, ERF))
    done = cli("adapt", "partly.py:MyGPT", "--model", tiny)
    headline, empty, place, what, *_ = done.out.splitlines()
    assert done.code == 1 and empty == ""
    parity = "✗ parity could not be checked: only parts of the model were examined"
    assert headline == f"✗ mapped 0 of 40 tensors   {parity}"
    assert place.startswith("partly.py:") and place.endswith(FAILS.strip())
    assert what.startswith("  ✗ partly_examined · breaks parity: MyGPT(")
    assert "note: compat built Block(width=24, heads=4)" in done.err.splitlines()


def test_no_edits_are_tried(cli: Cli, tiny: Path) -> None:
    text = NOT_BUILT.replace(TANH, ERF)
    Path("partly.py").write_text(text)
    done = cli("adapt", "partly.py:MyGPT", "--model", tiny, "--fix")
    assert done.code == 1 and "erf_gelu" in done.out
    assert done.err.endswith("so no edits were tried. Nothing was written\n")
    assert Path("partly.py").read_text() == text


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (NOT_BUILT.replace("class Block(nn.Module)", "class Block"), []),  # has no such part
        (NO_GPT.replace("return self.mix", "return self.other"), []),
        (GPT, ["--kwargs", '{"layers": "three"}']),  # the user's own mistake
        (NO_LOGITS, ["--forward", "model(ids).other"]),
    ],
)
def test_other_models_are_refused(cli: Cli, tiny: Path, text: str, options: list[str]) -> None:
    Path("partly.py").write_text(text)
    done = cli("adapt", "partly.py:MyGPT", "--model", tiny, *options)
    assert (done.code, done.out) == (3, "") and done.err.count("error: ") == 1
