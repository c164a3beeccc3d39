"""The recipes of README.md run unchanged and have correct results."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compat import Engine, NameMapError, generate, load_pretrained, load_tokenizer, trace
from compat.decoding.fast_path import is_unmodified
from compat.demo import __path__ as demo_path
from compat.validation import is_quantized
from tests.conftest import MakeCheckpoint, noisy_reference

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
RECIPES = dict(
    re.findall(r"^## ([^\n]+)\n.*?```python\n(.*?)```", README, re.DOTALL | re.MULTILINE)
)
# These packages are not in the extra interop, because transformers imports torchao in every process
# if it is installed. CI runs their recipes in separate processes.
OPTIONAL = {"lm_eval", "lightning", "nnsight", "torchao", "transformer_lens"}
SMALL = {"vocab_size": 1024, "n_layer": 1}
IDS = torch.randint(1024, (1, 32), generator=torch.Generator().manual_seed(4))


def packages(recipe: str) -> set[str]:
    """Return the packages that a recipe imports."""
    found = set()
    for node in ast.walk(ast.parse(recipe)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


def runs_here(title: str) -> bool:
    if title == "AOTInductor" and not shutil.which(os.environ.get("CXX", "g++")):
        return False
    return all(find_spec(name) for name in packages(RECIPES[title]) & OPTIONAL)


@pytest.fixture(scope="module")
def one_layer(make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint of one layer with a tokenizer."""
    folder = make_checkpoint(**SMALL)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes(Path(demo_path[0], name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the recipes write; one recipe uses the adapter of another."""
    return tmp_path_factory.mktemp("recipes")


def trusted_instruction_sets() -> AbstractContextManager[None]:
    """Keep Inductor from compiling programs that test the CPU's instruction sets.

    Compiling these takes longer than compiling the model.
    """
    from torch._inductor import config

    patched: AbstractContextManager[None] = config.patch({"cpp.vec_isa_ok": True})
    return patched


def logits_of(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found = model(ids)
    return found if isinstance(found, Tensor) else found.logits


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check_adapter_of_ours(names: dict[str, Any]) -> None:
    check_close(logits_of(names["theirs"]), logits_of(names["peft_model"]))


def check_adapter_of_gpt2(names: dict[str, Any]) -> None:
    check_close(logits_of(names["peft_model"]), logits_of(names["merged"]))


def check_torchao(names: dict[str, Any]) -> None:
    expected, model = logits_of(noisy_reference(**SMALL)), names["model"]
    found = logits_of(model)
    assert 0 < (found - expected).norm() / expected.norm() < 0.02
    assert not is_unmodified(model)
    first = generate(model, IDS[:, :5], max_new_tokens=1, temperature=0)[0, -1]
    assert first == found[0, 4].argmax()
    with pytest.raises(Exception, match=r"torchao quantized .*W_query"):
        Engine(model)


def check_torchao_of_conv1d(names: dict[str, Any]) -> None:
    """Only the head is quantized, because it is an nn.Linear."""
    model, expected = names["model"], logits_of(noisy_reference(**SMALL))
    assert 0 < (logits_of(model) - expected).norm() / expected.norm() < 0.02
    changed = {name for name, value in model.named_parameters() if is_quantized(value)}
    assert changed == {"lm_head.weight"}
    with pytest.raises(NameMapError, match=r"quantized lm_head.weight .* left out h.0.attn.c_attn"):
        Engine(model)


def check_any_length(run: Callable[[Tensor], Tensor]) -> None:
    reference = noisy_reference(**SMALL)
    for length in (1, 2, 17, 32):
        check_close(run(IDS[:, :length]), logits_of(reference, IDS[:, :length]))


def check_onnx(names: dict[str, Any]) -> None:
    def run(ids: Tensor) -> Tensor:
        (logits,) = names["session"].run(None, {"input_ids": ids.numpy()})
        return torch.from_numpy(logits)

    check_any_length(run)


def check_aot_inductor(names: dict[str, Any]) -> None:
    check_any_length(names["run"])


def check_finetuned(names: dict[str, Any]) -> None:
    tuned = logits_of(load_pretrained("tuned"))
    assert (tuned - logits_of(noisy_reference(**SMALL))).abs().max() > 1e-3
    model = names["model"]
    check_close(tuned, logits_of(model.eval()))


def check_nnsight(names: dict[str, Any]) -> None:
    model, ids = names["model"], names["ids"]
    zeros = {"h.0.mlp": torch.zeros_like}
    found = trace(model, ids, taps=["h.0.attn", "logits"], patch=zeros)
    check_close(names["attn"], found["h.0.attn"])
    check_close(names["logits"], found["logits"])
    assert (found["logits"] - logits_of(model, ids)).abs().max() > 0.1


def check_bridge(names: dict[str, Any]) -> None:
    tokenizer = load_tokenizer("exported")
    ids = torch.tensor(
        [[tokenizer.special["<|endoftext|>"], *tokenizer.encode("Every effort moves")]]
    )
    expected = trace(names["model"], ids, taps=["h.0.resid_mid", "logits"])
    check_close(names["logits"], expected["logits"])
    check_close(names["cache"]["blocks.0.hook_resid_mid"], expected["h.0.resid_mid"])


def check_evaluated(names: dict[str, Any]) -> None:
    assert 0 < names["found"]["results"]["texts"]["bits_per_byte,none"] < 20


CHECKS = {
    "lm-eval": check_evaluated,
    "PEFT: from an adapter of your model to one of Hugging Face's GPT-2": check_adapter_of_ours,
    "PEFT: from an adapter of Hugging Face's GPT-2 to one of your model": check_adapter_of_gpt2,
    "torchao": check_torchao,
    "ONNX": check_onnx,
    "AOTInductor": check_aot_inductor,
    "Accelerate": check_finetuned,
    "Trainer of transformers": check_finetuned,
    "Lightning": check_finetuned,
    "nnsight": check_nnsight,
    "TransformerLens": check_bridge,
}


CHECKS_OF_CONV1D = {
    "torchao": check_torchao_of_conv1d,
    "ONNX": check_onnx,
    "AOTInductor": check_aot_inductor,
}
RUNS = [("linear", title) for title in CHECKS] + [("conv1d", title) for title in CHECKS_OF_CONV1D]


@pytest.mark.parametrize(
    ("dialect", "title"), [(dialect, title) for dialect, title in RUNS if runs_here(title)]
)
def test_a_recipe_runs_with_correct_results(
    dialect: str, title: str, one_layer: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in packages(RECIPES[title]):
        pytest.importorskip(package)
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(workspace / "cache"))
    torch.manual_seed(0)
    code = RECIPES[title].replace('"gpt2"', repr(str(one_layer)))
    if dialect == "conv1d":
        code = code.replace("load_pretrained(", f"load_pretrained(dialect={dialect!r}, source=")
    file = workspace / re.sub(r"\W+", "_", f"{title}.py")  # nnsight reads the source
    file.write_text(code, encoding="utf-8")
    checks = CHECKS if dialect == "linear" else CHECKS_OF_CONV1D
    with trusted_instruction_sets() if title == "AOTInductor" else nullcontext():
        checks[title](runpy.run_path(str(file)))


def test_recipes_are_short_and_checked() -> None:
    assert RECIPES.keys() == CHECKS.keys()
    for title, recipe in RECIPES.items():
        assert len([line for line in recipe.splitlines() if line]) <= 15, title
