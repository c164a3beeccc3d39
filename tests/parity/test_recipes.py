"""The recipes of compat/parity/README.md yield the numbers of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compat import load_pretrained, open_checkpoint
from tests.parity.test_patching import close, edited_logits

README = Path(__file__).parents[2] / "compat/parity/README.md"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the recipes define."""
    text = README.read_text(encoding="utf-8").partition("## Traces")[2].partition("\n## ")[0]
    names: dict[str, Any] = {"load_pretrained": load_pretrained}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("recipes"))
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(block.replace('"gpt2"', '"demo"'), names)
        names["picture"] = Path("head.png").read_bytes()
    return names


@pytest.fixture(scope="module")
def reference() -> Any:
    folder = open_checkpoint("demo").folder
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def test_the_logit_lens_equals_that_of_transformers(
    recipes: dict[str, Any], reference: Any
) -> None:
    states = reference(recipes["ids"], output_hidden_states=True).hidden_states[1:]
    # transformers has already normalized the last one.
    normalized = [*map(reference.transformer.ln_f, states[:-1]), states[-1]]
    ids = [int(reference.lm_head(state)[0, -1].argmax()) for state in normalized]
    assert recipes["lens"] == [recipes["tokenizer"].decode([token_id]) for token_id in ids]


def test_the_attention_pattern_equals_that_of_transformers(
    recipes: dict[str, Any], reference: Any
) -> None:
    expected = reference(recipes["ids"], output_attentions=True).attentions[1][0, 2]
    assert close(recipes["pattern"], expected)
    assert recipes["picture"].startswith(b"\x89PNG")


def test_patching_equals_hand_written_hooks(recipes: dict[str, Any], reference: Any) -> None:
    ids, clean, recovered = recipes["ids"], reference(recipes["ids"]), []
    for block in reference.transformer.h:
        kept: list[torch.Tensor] = []

        def keep(module: Any, args: Any, output: Any, kept: Any = kept) -> None:
            kept.append(output[0])

        def put(module: Any, args: Any, output: Any, kept: Any = kept) -> Any:
            return (kept[0], *output[1:])

        with block.attn.register_forward_hook(keep):
            reference(ids)
        with block.attn.register_forward_hook(put):
            patched = reference(recipes["other"])
        recovered.append((patched.logits - clean.logits)[0, -1].norm())
    assert close(torch.stack(recipes["recovered"]), torch.stack(recovered))


def test_ablation_of_a_head_equals_hand_written_hooks(
    recipes: dict[str, Any], reference: Any
) -> None:
    D = reference.config.n_embd // reference.config.n_head

    def without_head_2(module: Any, args: Any) -> Any:
        heads = args[0].clone()
        heads[..., 2 * D : 3 * D] = 0
        return (heads,)

    with reference.transformer.h[1].attn.c_proj.register_forward_pre_hook(without_head_2):
        assert close(recipes["ablated"]["logits"], reference(recipes["ids"]).logits)
        ids = reference.generate(recipes["ids"], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert recipes["text"] == recipes["tokenizer"].decode(ids[0].tolist())
    assert not close(recipes["ablated"]["logits"], reference(recipes["ids"]).logits)


def test_gradients_equal_those_of_transformers(recipes: dict[str, Any], reference: Any) -> None:
    kept = {}

    def keep(name: str, state: torch.Tensor) -> torch.Tensor:
        if name == "h.1.probs":
            state = kept[name] = state.clone().requires_grad_()
        return state

    edited_logits(reference, recipes["ids"], keep)[0, -1].max().backward()
    assert close(recipes["states"]["h.1.probs"].grad, kept["h.1.probs"].grad)
