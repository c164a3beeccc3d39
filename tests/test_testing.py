"""`assert_parity` passes for a correct model, and otherwise fails with an informative message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compat import load_into, load_pretrained
from compat.testing import assert_parity
from tests.own_gpt2 import MyGPT2, my_map

pytestmark = pytest.mark.usefixtures("shared_reference")
OWN = Path(__file__).parent / "own_gpt2.py"

TEST = """
import sys
sys.path.insert(0, {folder!r})
from my_model import MyGPT2

def test_parity(assert_parity):
    assert_parity(MyGPT2(), {source!r})
"""


def test_correct_models_pass(tiny: Path) -> None:
    assert_parity("conv1d", tiny)
    assert_parity(MyGPT2(), tiny, gradients=True)


def test_a_model_with_other_weights_fails(tiny: Path) -> None:
    model = MyGPT2()
    with pytest.raises(AssertionError, match="other weights than"):
        assert_parity(model, tiny, name_map=my_map())
    load_into(model, my_map(), tiny)
    assert_parity(model, tiny, name_map=my_map())
    blocks = load_pretrained(tiny)
    blocks.final_norm.eps = 0.1
    with pytest.raises(AssertionError, match="first divergence: ln_f"):
        assert_parity(blocks, tiny)


@pytest.mark.parametrize("correct", [True, False])
def test_the_fixture_works_in_a_users_test_file(
    tiny: Path, tmp_path: Path, pytester: pytest.Pytester, correct: bool
) -> None:
    text = OWN.read_text()
    wrong = text.replace(', approximate="tanh"', "")
    assert wrong != text
    (tmp_path / "my_model.py").write_text(text if correct else wrong)
    pytester.makepyfile(TEST.format(folder=str(tmp_path), source=str(tiny)))
    # In this process, which has already imported torch. If compat is installed, the plugin is not
    # loaded twice.
    plugins = ("no:gpt2-compat", "compat.pytest_plugin", "no:cacheprovider")
    outcome = pytester.inline_run(*(word for name in plugins for word in ("-p", name)))
    passed, _, failed = outcome.listoutcomes()
    assert (len(passed), len(failed)) == ((1, 0) if correct else (0, 1))
    if not correct:
        log = str(failed[0].longrepr)
        [line] = [n for n, row in enumerate(wrong.splitlines(), 1) if "F.gelu" in row]
        assert "first divergence: h.0.mlp" in log or "first divergence: h.0.act" in log
        assert re.search(rf"my_model\.py:{line}  .*F\.gelu", log)
        assert "erf_gelu" in log and "fix: F.gelu(" in log
        assert "compat/testing.py" not in log.replace(str(tmp_path), "")
