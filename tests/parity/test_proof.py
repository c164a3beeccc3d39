"""What a proof covers: designed inputs, conditions in the code, half precision, large models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat import ParityError, check_parity, load_pretrained
from compat.checkpoint import open_checkpoint
from compat.dialects import linear
from compat.parity import ParityReport, check, reference
from compat.parity.inputs import designed_inputs, sequences, special_ids
from compat.tap import Tap
from tests.conftest import MakeCheckpoint
from tests.parity.mistakes import block

Edit = Callable[[linear.GPTModel], None]
V, N = 300, 160


@pytest.fixture(scope="module")
def long_context(make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint whose context is longer than the windows of the tests below."""
    return make_checkpoint(n_positions=N, vocab_size=V, bos_token_id=V - 2, eos_token_id=V - 3)


class Wrapped(nn.Module):
    """A user's model around correct blocks; `change` is called with the ids and these blocks."""

    def __init__(self, folder: Path, change: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.inner = load_pretrained(folder, "linear")
        self.change = change

    def forward(self, ids: Tensor) -> Tensor:
        return self.change(ids, self.inner)


def one_sided_condition(ids: Tensor, inner: nn.Module) -> Tensor:
    if ids.float().mean() > 1e6:
        ids = ids.flip(1)
    logits: Tensor = inner(ids)
    return logits


def test_the_designed_inputs_cover_shapes_modes_and_special_ids(long_context: Path) -> None:
    config = open_checkpoint(long_context).config
    rows = sequences(config, N)
    inputs = designed_inputs(len(rows), N)
    shapes = {(len(item.rows), item.length) for item in inputs}
    assert (1, N) in shapes and (1, 1) in shapes and any(B >= 3 and T > 1 for B, T in shapes)
    assert {item.mode for item in inputs} == {
        "no_grad", "gradients", "inference", "thread", "hooks",
    }  # fmt: skip
    for token_id in special_ids(config):
        assert any(row[0] == token_id == row[-1] for row in rows)
    assert any(len(set(row.tolist())) == 1 for row in rows)
    again = [(item.rows, item.length) for item in inputs]
    assert len(set(again)) < len(again), "no input is repeated"


@pytest.mark.parametrize("n_positions", [1, 2, 3, 5, 33])
def test_short_contexts_can_be_proved(make_checkpoint: MakeCheckpoint, n_positions: int) -> None:
    folder = make_checkpoint(n_positions=n_positions, pad_token_id=4)
    report = check_parity("linear", folder)
    assert report.passed, report.headline
    assert max(result.input_shape[1] for result in report.logits.inputs) == n_positions


def test_logits_are_compared_for_any_taps(tiny: Path) -> None:
    model = load_pretrained(tiny, "linear")
    for taps in ([], [Tap("embed", "trf_blocks.0", at="input")]):
        assert check_parity(model, tiny, taps=taps).passed
    model.final_norm.eps = 1e-2
    for taps in ([], [Tap("embed", "trf_blocks.0", at="input")]):
        report = check_parity(model, tiny, taps=taps)
        assert not report.passed and report.first_divergence == "logits"
        assert report.max_abs_diff > 1e-3 and "diverges" in report.headline


def test_a_correct_tap_does_not_hide_a_wrong_output(tiny: Path) -> None:
    model = Wrapped(tiny, lambda ids, inner: inner(ids) * 1.001)
    report = check_parity(model, tiny, taps=[Tap("logits", "inner")])
    assert all(tap.passed for tap in report.taps) and not report.passed


def test_the_truth_value_of_a_report_is_the_verdict(tiny: Path) -> None:
    model = load_pretrained(tiny, "linear")
    report = check_parity(model, tiny)
    assert report
    report.raise_if_failed()
    model.final_norm.eps = 1e-2
    broken = check_parity(model, tiny)
    assert not broken
    with pytest.raises(ParityError, match="diverges from transformers at ln_f"):
        broken.raise_if_failed()


def test_a_function_that_raises_is_named(tiny: Path) -> None:
    with pytest.raises(
        ParityError, match=r"the function relu raised TypeError: .*must return logits"
    ):
        check_parity(torch.relu, tiny)


@pytest.mark.parametrize("model", [nn.ReLU(), 3, None, {"wte.weight": 1}])
def test_a_model_without_weights_is_refused(tiny: Path, model: Any) -> None:
    with pytest.raises(ParityError, match=r"must be a dialect's name|no parameters"):
        check_parity(model, tiny)


# Conditions in the code


def test_a_one_sided_condition_is_reported_as_a_limit_with_its_line(long_context: Path) -> None:
    report = check_parity(Wrapped(long_context, one_sided_condition), long_context)
    assert report.passed
    [limit] = [limit for limit in report.limits if limit.file == __file__]
    assert "never true" in limit.message and "1e6" in limit.source_line


def test_blocks_without_conditions_have_no_limits(long_context: Path) -> None:
    for dialect in ("linear", "conv1d"):
        assert check_parity(dialect, long_context).limits == []


CONDITIONS: dict[str, Callable[[Tensor], bool]] = {
    "a length": lambda ids: ids.shape[1] == 57,
    "lengths above": lambda ids: ids.shape[1] > 155,
    "a remainder": lambda ids: ids.size(1) % 11 == 9,
    "a batch": lambda ids: len(ids) > 6,
    "an id": lambda ids: bool((ids == 137).any()),
    "an id in a list": lambda ids: 211 in ids[0].tolist(),
    "an id first": lambda ids: ids[0, 0].item() == 71,
    "several ids": lambda ids: bool(torch.isin(ids, torch.tensor([18, 77])).any()),
    "gradients": lambda ids: torch.is_grad_enabled(),
    "the last id": lambda ids: bool((ids[:, -1] == V - 1).any()),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_inputs_with_the_constants_of_a_condition_reach_its_other_side(
    long_context: Path, name: str
) -> None:
    holds = CONDITIONS[name]

    def change(ids: Tensor, inner: nn.Module) -> Tensor:
        logits: Tensor = inner(ids)
        return logits * 1.01 if holds(ids) else logits

    assert not check_parity(Wrapped(long_context, change), long_context).passed


def test_a_forward_pass_that_draws_random_numbers_fails(long_context: Path) -> None:
    def change(ids: Tensor, inner: nn.Module) -> Tensor:
        logits: Tensor = inner(ids)
        return logits + 1 if torch.rand(()) < 1e-9 else logits

    report = check_parity(Wrapped(long_context, change), long_context)
    assert not report.passed and "random numbers" in report.headline


def test_state_that_a_call_changes_is_reported_as_a_limit(long_context: Path) -> None:
    class Counting(Wrapped):
        calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(ids)

    report = check_parity(Counting(long_context, lambda ids, inner: inner(ids)), long_context)
    assert report.passed
    assert [limit.message for limit in report.limits] == [
        "the forward pass changes calls, which later calls may read"
    ]


def test_the_embedding_of_an_id_that_no_input_contains_is_compared(long_context: Path) -> None:
    rows = torch.cat(sequences(open_checkpoint(long_context).config, N))
    unused = next(i for i in range(V) if i not in rows)
    model = load_pretrained(long_context, "linear")
    with torch.no_grad():
        model.out_head.weight = nn.Parameter(model.out_head.weight.clone())
        model.tok_emb.weight[unused, 3] += 1e-3
    report = check_parity(model, long_context)
    assert not report.passed and "every id" in report.headline


def test_a_condition_on_an_array_is_not_evaluated(long_context: Path) -> None:
    def change(ids: Tensor, inner: nn.Module) -> Tensor:
        array = ids.numpy()
        valid = array < V
        logits: Tensor = inner(ids)
        return logits if valid.all() else logits * 2

    report = check_parity(Wrapped(long_context, change), long_context)
    assert report.passed, report.headline


# Outputs of a model


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "a dictionary": lambda logits: {"loss": None, "logits": logits},
    "a tuple": lambda logits: (logits, None),
    "flat": lambda logits: logits.flatten(0, 1),
    "of the last position": lambda logits: logits[:, -1:],
    "of the last position, and a loss": lambda logits: (logits[:, -1:], None),
}


@pytest.mark.parametrize("name", RETURNED)
def test_logits_are_found_in_the_output(long_context: Path, name: str) -> None:
    returned = RETURNED[name]
    report = check_parity(
        Wrapped(long_context, lambda ids, inner: returned(inner(ids))), long_context
    )
    assert report.passed, report.headline
    last = [limit for limit in report.limits if "last position only" in limit.message]
    assert len(last) == ("last" in name)
    wrong = Wrapped(long_context, lambda ids, inner: returned(1.001 * inner(ids)))
    assert not check_parity(wrong, long_context)


# Half precision and large models


def shifted_positions(model: linear.GPTModel) -> None:
    model.pos_emb.weight.data = model.pos_emb.weight.data.roll(1, 0)


def changed_eps(model: linear.GPTModel) -> None:
    for module in model.modules():
        if isinstance(module, linear.LayerNorm):
            module.eps = 1e-2


def noise(model: linear.GPTModel) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))


def erf_gelu(model: linear.GPTModel) -> None:
    block(model).feedforward.layers[1] = nn.GELU()


def unbiased_variance(model: linear.GPTModel) -> None:
    norm = block(model).norm2
    norm.forward = lambda x: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + norm.eps).sqrt() * norm.scale
        + norm.shift
    )


def changed_scale(model: linear.GPTModel) -> None:
    block(model).attention.scale *= 1.01


def one_weight(model: linear.GPTModel) -> None:
    with torch.no_grad():
        block(model).feedforward.layers[0].weight[3, 5] += 0.05


FAULTS: list[Edit] = [
    shifted_positions, changed_eps, noise, erf_gelu, unbiased_variance, changed_scale, one_weight,
]  # fmt: skip


MODES = [(None, False), (False, False), (None, True)]  # calibrate, large
TYPES: list[tuple[torch.dtype, bool | None, bool]] = [
    *((torch.float32, *mode) for mode in MODES),
    *((torch.bfloat16, *mode) for mode in MODES),
    (torch.float16, None, False),
]


@pytest.mark.parametrize(("dtype", "calibrate", "large"), TYPES)
def test_faults_are_not_hidden_by_rounding_errors(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    calibrate: bool | None,
    large: bool,
) -> None:
    if large:  # the mode for models of 500M parameters and more
        monkeypatch.setattr(check, "LARGE", 1)
        monkeypatch.setattr(reference, "LARGE", 1)
    good = load_pretrained(tiny, "linear", dtype=dtype)
    assert_exact(check_parity(good, tiny, calibrate=calibrate))
    for fault in FAULTS:
        model = load_pretrained(tiny, "linear", dtype=dtype)
        assert isinstance(model, linear.GPTModel)
        fault(model)
        if calibrate is None and not large:  # neither affects the comparison of logits
            assert not check_parity(model, tiny, taps=[]), fault.__name__
        assert not check_parity(model, tiny, calibrate=calibrate), fault.__name__


def assert_exact(report: ParityReport) -> None:
    assert report.passed, report.headline
    assert report.smallest_detectable < 1e-4
    assert (report.float32 is not None) == (report.dtype in ("bfloat16", "float16"))


def test_a_model_in_half_precision_is_not_changed(tiny: Path) -> None:
    model = load_pretrained(tiny, "linear", dtype=torch.bfloat16)
    before = {name: (id(p), p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    assert check_parity(model, tiny)
    for name, p in model.named_parameters():
        same, address, value = before[name]
        assert (same, address) == (id(p), p.data_ptr()) and torch.equal(value, p)


def test_a_float64_copy_by_modules_equals_a_complete_one(tiny: Path) -> None:
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(3))
    checkpoint = open_checkpoint(tiny)
    from compat.parity.transformers_gpt2 import in_float64, load_reference

    model = load_reference(checkpoint, torch.float32)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    complete, by_module = in_float64(model), in_float64(model, by_module=True)
    with torch.no_grad():
        expected, found = complete(ids).logits, by_module(ids).logits
    assert found.dtype == torch.float64 and torch.equal(found, expected)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert all(p.dtype == torch.float32 for p in by_module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_detectable_error_is_detected(long_context: Path, dtype: torch.dtype) -> None:
    """An error of that size at one position, in a random direction, fails."""
    limit = check_parity(
        load_pretrained(long_context, dtype=dtype), long_context, taps=[]
    ).smallest_detectable
    direction = torch.randn(V, generator=torch.Generator().manual_seed(5))

    def change(ids: Tensor, inner: nn.Module, size: float) -> Tensor:
        logits: Tensor = inner(ids)
        error = direction / direction.norm() * logits[:, -1:].float().norm(dim=-1, keepdim=True)
        return torch.cat([logits[:, :-1], logits[:, -1:] + size * error.to(logits.dtype)], dim=1)

    def passes(size: float) -> bool:
        model = Wrapped(long_context, lambda ids, inner: change(ids, inner, size)).to(dtype)
        return check_parity(model, long_context).passed

    assert limit < 1e-4
    assert passes(0.0)
    assert not passes(1.05 * limit)


def test_weights_that_compat_converted_are_noted(tmp_path: Path, tiny: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    save_file(load_file(tiny / "model.safetensors"), tmp_path / "other.safetensors")
    [note] = check_parity("conv1d", tmp_path / "other.safetensors", taps=[]).notes
    assert "compat translated" in note and "other.safetensors" in note
    assert check_parity("conv1d", tiny, taps=[]).notes == []


# Arguments


@pytest.mark.parametrize("ids", [[[1, 2, 3]], ((4, 5),), torch.tensor([[1, 2]]).numpy()])
def test_ids_are_accepted_in_any_container(tiny: Path, ids: Any) -> None:
    assert check_parity("conv1d", tiny, input_ids=ids).input_shape == torch.tensor(ids).shape


@pytest.mark.parametrize("ids", ["text", [[1.5]], [1, 2], [[97]], [[-1]], [[]], {1: 2}])
def test_invalid_ids_raise_a_parity_error(tiny: Path, ids: Any) -> None:
    with pytest.raises(ParityError):
        check_parity("conv1d", tiny, input_ids=ids)


def test_the_data_type_may_be_a_string(tiny: Path) -> None:
    assert check_parity("conv1d", tiny, dtype="float16").dtype == "float16"
