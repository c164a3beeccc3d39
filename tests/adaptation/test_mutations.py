"""Every deviation in the catalogue is reported with its code, its line and its severity."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import Adaptation, Finding, adapt
from compat.adaptation import CODES
from tests.adaptation.catalogue import MODELS, MUTATIONS, ZOO, Mutation, composed
from tests.adaptation.common import build
from tests.conftest import MakeCheckpoint

pytestmark = pytest.mark.usefixtures("shared_reference")


@pytest.fixture(scope="module")
def tiny(make_checkpoint: MakeCheckpoint) -> Path:
    """Return a checkpoint with two layers, which suffice for a deviation in one of them."""
    return make_checkpoint(n_layer=2)


# Deviations that are not confirmed by a change of the reference.
NOT_CONFIRMED = {
    "inner_dim", "head_width", "vocab_mismatch", "n_layer_mismatch", "random_parameters",
    "dropout_always_on", "softmax_output", "fast_path", "changed_logits", "gated_mlp",
}  # fmt: skip
ADDITIONAL = {"rope": {"no_pos"}}  # mutations that are two deviations: wpe is removed as well
DRIFTS = {"eps_value", "eps_outside_sqrt"}  # a small one is within the calibrated bound
# Codes that the catalogue inserts into fewer than two styles, and the test of each.
FEW_STYLES = {
    "changed_in_place": "test_gradients.py adds to the input of a norm",
    "refused_input": "test_mistakes.py asserts that texts are short",
    "unexplained": "a difference without an explanation; no mutation may cause it",
    "partly_examined": "test_cli_adapt_partly.py has models that cannot be built or called",
    "unexamined": "an error in compat itself; test_adapt.py causes one",
    "n_embd_mismatch": "test_odd_models.py builds models of other widths",
    "random_in_forward": "test_odd_models.py creates modules in forward",
    "input_shape": "test_odd_models.py passes one sequence at a time",
    "setup_first": "test_odd_models.py makes masks and caches in a method",
    "no_forward": "test_mistakes.py renames forward",
    "last_id_left_out": "test_mistakes.py cuts the ids in forward",
    "logits_method": "test_mistakes.py moves the head to another method",
    "output_shape": "test_mistakes.py returns flattened logits",
    "plain_list": "test_odd_models.py keeps blocks in a list",
    "low_precision": "test_odd_models.py computes attention in bfloat16",
    "grouped_query_attention": "test_odd_models.py shares keys among heads",
    "latent_attention": "test_odd_models.py projects k and v twice",
    "rounded_weights": "test_odd_models.py rounds the weights of its projections",
    "sliced_heads": "test_odd_models.py projects the channels of each head alone",
    "scaled_probs": "test_mistakes.py divides the probabilities",
    "cross_attention": "test_mistakes.py builds torch's decoder",
    "extra_projection": "test_mistakes.py runs an MLP after the blocks",
    "no_mlp": "test_mistakes.py leaves out the MLP",
    "hyper_connections": "test_mistakes.py keeps three copies of the hidden states",
    "unknown_mlp": "test_mistakes.py runs a router and two experts",
    "one_mlp_projection": "test_mistakes.py leaves out the second projection",
    "low_rank_term": "test_mistakes.py adds LoRA to the head",
    "weights_changed": "test_mistakes.py writes to the embedding",
    "batch_first": "test_mistakes.py calls nn.MultiheadAttention with (B, T, C)",
    "no_head": "test_odd_models.py returns hidden states",
    "one_token": "test_mistakes.py asserts sequences of one token",
    "continued": "test_mistakes.py keeps a position and a cache in the modules",
    "mixed_types": "test_mistakes.py and test_odd_models.py mix data types",
    "wrong_gradient": "test_gradients.py detaches residuals and breaks backward passes",
    "kv_cache": "test_kv_cache.py has caches of two kinds",
    "kv_cache_chunk": "test_kv_cache.py drops the mask after the first call",
    "per_head_projection": "test_odd_models.py projects each head before they are concatenated",
    "no_attention": "test_foreign.py has an RNN and an MLP",
    "unused_attention": "test_mistakes.py projects the input of the heads",
    "extra_operation": "test_mistakes.py activates keys and shifts tensors",
    "no_qkv_projection": "test_mistakes.py leaves out single projections",
    "other_norm": "test_mistakes.py uses BatchNorm and GroupNorm",
    "other_attention": "test_mistakes.py transposes and cuts the weights",
    "nan_scores": "test_mistakes.py multiplies infinity by zero",
    "mlp_before_attention": "test_mistakes.py exchanges the branches",
    "other_embedding": "test_mistakes.py multiplies and concatenates positions",
    "extra_tokens": "test_mistakes.py puts vectors before the tokens",
    "pooled_positions": "test_mistakes.py pools over all positions",
    "other_shape": "test_odd_models.py builds norms of other widths",
    "unknown_part": "test_mistakes.py and test_odd_models.py have parts of other structure",
    "not_compared": "tests/parity/test_proof.py tests the limits of a proof",
}


def mutation_id(mutation: Mutation) -> str:
    return f"{mutation.style}-{mutation.code}"


def adapted_to(mutations: list[Mutation], folder: Path, tiny: Path) -> tuple[Path, Adaptation]:
    """Return the path of the file with these deviations, and the result of `adapt`."""
    model = MODELS[mutations[0].style]
    path = composed(model, mutations, folder)
    return path, adapt(build(model, path, tiny), tiny)


def accepted_lines(mutation: Mutation, path: Path) -> set[int]:
    """Return the lines at which the finding may be reported, counted from 1."""
    marks = [mark for mark in (mutation.at, *mutation.also) if mark is not None]
    lines = path.read_text().splitlines()
    return {n for n, line in enumerate(lines, 1) if any(mark in line for mark in marks)}


def at_an_accepted_line(finding: Finding, mutation: Mutation, path: Path) -> bool:
    if finding.line is None:
        return mutation.at is None
    text = path.read_text().splitlines()[finding.line - 1].strip()
    line_is_accepted = finding.line in accepted_lines(mutation, path)
    return line_is_accepted and finding.file == str(path) and finding.source_line == text


def check(mutation: Mutation, path: Path, found: Adaptation) -> None:
    """Check that the deviation is reported with its severity and at an accepted line."""
    findings = [f for f in found.findings if f.code == mutation.code]
    assert findings, [f.code for f in found.findings]
    drifts = {"drifts"} if mutation.code in DRIFTS else set()
    assert {f.severity for f in findings} <= {CODES[mutation.code].severity, *drifts}
    assert any(at_an_accepted_line(f, mutation, path) for f in findings), [
        (f.line, f.source_line) for f in findings
    ]
    if CODES[mutation.code].severity == "breaks" and mutation.code not in NOT_CONFIRMED:
        assert findings[0].evidence.startswith("confirmed: ")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=mutation_id)
def test_a_deviation_is_reported_at_its_line(
    tiny: Path, tmp_path: Path, mutation: Mutation
) -> None:
    path, found = adapted_to([mutation], tmp_path, tiny)
    check(mutation, path, found)
    breaking = {f.code for f in found.findings if f.severity == "breaks"}
    assert breaking <= {mutation.code} | ADDITIONAL.get(mutation.code, set())
    assert breaking >= ADDITIONAL.get(mutation.code, set())
    assert found.compatible is (not breaking)


def test_every_code_is_tested_in_at_least_two_styles() -> None:
    styles: dict[str, set[str]] = {code: set() for code in CODES}
    for mutation in MUTATIONS:
        styles[mutation.code].add(mutation.style)
    assert {code for code, found in styles.items() if len(found) < 2} <= FEW_STYLES.keys()


def test_the_catalogue_has_no_unknown_codes_and_no_duplicates() -> None:
    assert {mutation.code for mutation in MUTATIONS} <= CODES.keys()
    names = [(m.style, m.code, m.old, m.new) for m in MUTATIONS]
    assert len(set(names)) == len(names)


# Several deviations together.

TOGETHER = [
    ("nano", "erf_gelu", "no_mask"),
    ("nano", "eps_value", "pos_offset", "head_bias"),
    ("mingpt", "no_attn_scale", "missing_residual", "no_proj_bias"),
    ("book", "unbiased_var", "relu", "mask_off"),
    ("scratch", "wrong_scale", "rmsnorm"),
    ("einsum_heads", "scale_by_d_model", "mask_off", "attn_upcast"),
    ("vkq_fused", "silu", "no_head_merge_transpose", "no_final_ln"),
    ("hub_style", "pos_offset", "extra_ln", "missing_residual"),
    ("functional", "erf_gelu", "wrong_scale", "scaled_embedding"),
    ("mha", "no_mask", "no_pos"),
    ("flat", "other_activation", "no_pos", "no_mlp_bias"),
    ("lens", "silu", "softmax_dim", "no_final_ln"),
]


@pytest.mark.parametrize("wanted", TOGETHER, ids="-".join)
def test_several_deviations_are_all_reported(
    tiny: Path, tmp_path: Path, wanted: tuple[str, ...]
) -> None:
    style, *codes = wanted
    by_code = {m.code: m for m in reversed(MUTATIONS) if m.style == style}
    mutations = [by_code[code] for code in codes]
    path, found = adapted_to(mutations, tmp_path, tiny)
    for mutation in mutations:
        check(mutation, path, found)
    breaking = {f.code for f in found.findings if f.severity == "breaks"}
    assert breaking == {code for code in codes if CODES[code].severity == "breaks"}
    assert not found.compatible


def test_shapes_that_follow_from_the_number_of_heads_are_not_reported(
    tiny: Path, tmp_path: Path
) -> None:
    model = MODELS["lecture"]
    text = (ZOO / model.file).read_text()
    for old, new in (
        ("range(num_heads)", "range(2 * num_heads)"),
        ("nn.Linear(n_embd, n_embd)", "nn.Linear(2 * n_embd, n_embd)"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / model.file
    path.write_text(text)
    adaptation = adapt(build(model, path, tiny), tiny)
    assert any("attn.c_attn.weight" in name for name in adaptation.unmatched)
    assert "n_head_mismatch" in {f.code for f in adaptation.deviations}
    assert not any("cannot be loaded" in f.message for f in adaptation.findings)
