"""Names have no effect: after renaming, a model has the same map."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compat import adapt
from tests.adaptation.catalogue import MODELS, ZOO
from tests.adaptation.common import adapted, build, build_style, error_of, mapped
from tests.adaptation.renaming import names_in, pairs, renamed

pytestmark = pytest.mark.usefixtures("shared_reference")

STYLES = [
    "nano", "mingpt", "book", "tf_port", "megatron", "lens", "mha", "annotated", "scratch",
    "cached", "functional", "hub_style", "conv_proj", "wrappers", "flat",
]  # fmt: skip
# Common names, which are assigned at random.
MISLEADING = """
    wte wpe ln_1 ln_2 ln_f attn mlp c_attn c_proj c_fc lm_head query key value q_proj k_proj v_proj
    W_query W_key W_value out_proj norm norm1 norm2 final_norm dropout embedding positions head
    mask blocks layers h scale shift gamma beta gate rotary w1 w2 w3 fc1 fc2 tok_emb pos_emb
""".split()


# Shrinking would take minutes.
quick = settings(derandomize=True, deadline=None, phases=[Phase.generate], database=None)


def meaningless(seed: int) -> Callable[[], str]:
    """Return a function that returns unique names without meaning."""
    generator, used = random.Random(seed), set[str]()

    def fresh() -> str:
        while True:
            letters = generator.choices("abcdefghijklmnopqrstuvwxyz_", k=generator.randint(2, 9))
            name = "z" + "".join(letters)  # no keyword starts with z
            if name not in used:
                used.add(name)
                return name

    return fresh


def misleading(seed: int) -> Callable[[], str]:
    """Return a function that returns names from other GPT-2 code, in random order."""
    generator = random.Random(seed)
    plain = generator.sample(MISLEADING, len(MISLEADING))
    names = iter([f"{name}{end}" for end in ("_", "_b", "_c", "_d") for name in plain])
    return lambda: next(names)


def check(style: str, fresh: Callable[[], str], tiny: Path, folder: Path) -> None:
    """Check that the renamed model has the same map, for parameters in order of construction."""
    known = adapted(style, tiny)
    path = folder / f"{style}_renamed.py"
    source, words = renamed((ZOO / MODELS[style].file).read_text(), known.model, fresh)
    path.write_text(source)
    model = build(MODELS[style], path, tiny)
    names = pairs(known.model, model, words)
    assert all(old != new for old, new in names.items())
    found = adapt(model, tiny)
    assert found.compatible, [f.code for f in found.findings]
    back = {new: old for old, new in names.items()}
    ours = {
        hf: frozenset(back[name] for name in ours)
        for hf, ours in mapped(found.name_map, model).items()
    }
    assert ours == mapped(known.adaptation.name_map, known.model)
    assert error_of(model) < 1e-5


@settings(quick, max_examples=5)
@given(style=st.sampled_from(STYLES), seed=st.integers(0, 10_000))
def test_meaningless_names_do_not_change_the_map(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, style: str, seed: int
) -> None:
    check(style, meaningless(seed), tiny, tmp_path_factory.mktemp("renamed"))


@settings(quick, max_examples=3)
@given(style=st.sampled_from(STYLES), seed=st.integers(0, 10_000))
def test_misleading_names_do_not_change_the_map(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, style: str, seed: int
) -> None:
    check(style, misleading(seed), tiny, tmp_path_factory.mktemp("renamed"))


@pytest.mark.parametrize("style", STYLES)
def test_the_renamed_model_shares_no_name_with_the_model(
    tiny: Path, tmp_path: Path, style: str
) -> None:
    model = build_style(style, tiny)
    path = tmp_path / "renamed.py"
    path.write_text(renamed((ZOO / MODELS[style].file).read_text(), model, meaningless(1))[0])
    before, after = names_in(model), names_in(build(MODELS[style], path, tiny))
    shared = set().union(*before.values()) & set().union(*after.values())
    assert not shared
