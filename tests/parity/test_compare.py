"""The verdict on differences that are known in advance."""

from __future__ import annotations

import json
import math

import pytest
import torch

from compat import ParityError, ParityReport
from compat.parity.compare import AT_ONCE, compare, difference, rms
from tests.pages import GOOD_LOGITS


def test_the_measures_of_a_known_difference_are_correct() -> None:
    reference = torch.tensor([3.0, -4.0])
    found = difference(reference + torch.tensor([0.0, 0.5]), reference, None, tolerance=1e-6)
    assert found.max_abs == 0.5
    assert found.rel_rms == pytest.approx(0.1)  # √(0.25 / 2) over √(25 / 2)
    assert found.ratio is None and not found.bit_identical and not found.within


def test_an_error_is_relative_to_the_scale_of_the_tensor() -> None:
    """The same max|Δ| passes for activations in the thousands and fails for small ones."""
    torch.manual_seed(0)
    x = torch.randn(1000)
    assert difference(1000 * x + 1e-4, 1000 * x, None, tolerance=1e-6).within
    assert not difference(x + 1e-4, x, None, tolerance=1e-6).within


def test_the_error_may_be_twice_the_references_own() -> None:
    torch.manual_seed(0)
    exact, noise = torch.randn(10_000).double(), torch.randn(10_000).double() * 1e-4
    reference = (exact + noise).float()
    for factor, within in ((-1.9, True), (-2.1, False)):
        found = difference((exact + factor * noise).float(), reference, exact, tolerance=0.0)
        assert found.within is within
        assert found.ratio == pytest.approx(abs(factor), rel=1e-3)


@pytest.mark.parametrize("calibrated", [True, False])
def test_the_bound_is_the_largest_error_that_passes(calibrated: bool) -> None:
    torch.manual_seed(0)
    truth, noise = torch.randn(1000).double(), 1e-4 * torch.randn(1000).double()
    reference, exact = (truth + noise).float(), truth if calibrated else None
    for factor in (-3.0, -1.0, 0.5, 1.5, 2.5, 4.0):
        found = difference((truth + factor * noise).float(), reference, exact, tolerance=1e-4)
        assert found.bound is not None
        assert found.within is (found.error <= found.bound)
        assert calibrated or found.error == found.rel_rms
    unjudged = difference(reference, reference, None, tolerance=None)
    assert unjudged.bound is None and unjudged.within


@pytest.mark.parametrize("factor", [0.0, 0.5, -1.9, 3.0])
def test_a_large_tensor_is_measured_completely(factor: float) -> None:
    """Although it is converted to float64 in parts, all numbers agree with their formulas."""
    torch.manual_seed(0)
    shape = (5, 2 * AT_ONCE // 5 + 7)
    exact = torch.randn(shape[::-1]).double().T  # not contiguous
    reference = (exact + 1e-4 * torch.randn(shape)).float()
    ours = reference if factor == 0 else (exact + factor * (reference - exact)).float()
    found = difference(ours.clone(), reference, exact, tolerance=1e-7)
    delta, error = ours.double() - reference.double(), rms(ours - exact)
    scale, reference_error = rms(reference.double()), rms(reference - exact)
    assert found.bit_identical is (factor == 0)
    assert found.max_abs == delta.abs().max()
    assert found.rel_rms == pytest.approx(rms(delta) / scale, rel=1e-12)
    assert found.error == pytest.approx(error / scale, rel=1e-12)
    assert found.ratio == pytest.approx(error / reference_error, rel=1e-12)
    assert found.bound == pytest.approx(2 * reference_error / scale, rel=1e-12)
    assert found.within is (abs(factor) <= 2)


@pytest.mark.parametrize("value", [5.0, math.nan, math.inf])
@pytest.mark.parametrize("index", [0, AT_ONCE, -1])
@pytest.mark.parametrize("calibrated", [True, False])
def test_one_wrong_number_at_any_index_fails(value: float, index: int, calibrated: bool) -> None:
    torch.manual_seed(0)
    reference = torch.randn(2 * AT_ONCE + 1)
    exact = reference.double() + 1e-8 if calibrated else None
    assert difference(reference.clone(), reference, exact, tolerance=1e-6).within
    ours = reference.clone()
    ours[index] = value
    found = difference(ours, reference, exact, tolerance=1e-6)
    assert not found.within and not found.bit_identical
    assert not found.max_abs < 1  # NaN, infinite or large


def test_rounding_errors_pass_where_the_reference_is_exact_by_chance() -> None:
    reference = {"embed": torch.full((100,), 1.0)}
    exact, one_ulp = {"embed": torch.ones(100).double()}, torch.finfo(torch.float32).eps
    for ulps, passes in ((2, True), (3, False)):
        ours = {"embed": reference["embed"] + ulps * one_ulp}
        assert compare(reference, ours, ours, exact, exact)[0].passed is passes


def test_only_the_accumulated_error_may_be_as_large_as_at_earlier_taps() -> None:
    """Rounding errors persist, although at a single tap the reference can be exact by chance."""
    torch.manual_seed(0)
    truth, noise = torch.randn(1000).double(), 1e-4 * torch.randn(1000).double()
    exact = {"embed": truth, "h.0.ln_1": truth}
    reference = {"embed": (truth + noise).float(), "h.0.ln_1": truth.float()}
    ours = {"embed": (truth - noise).float(), "h.0.ln_1": (truth - noise).float()}
    embed, ln_1 = compare(reference, ours, ours, exact, exact)
    assert embed.passed
    assert ln_1.accumulated.within and not ln_1.local.within


def test_a_reference_of_zeros_does_not_raise_the_bounds_of_later_taps() -> None:
    torch.manual_seed(0)
    truth = torch.randn(1000).double()
    exact = {"embed": truth * 1e-50, "h.0.ln_1": truth}
    reference = {tap: value.float() for tap, value in exact.items()}
    assert not reference["embed"].any()
    ours = reference | {"h.0.ln_1": 5 * reference["h.0.ln_1"]}
    embed, ln_1 = compare(reference, ours, reference, exact, exact)
    assert embed.passed and ln_1.local.within and not ln_1.accumulated.within


def test_bit_identical_tensors_always_pass_and_non_finite_values_never_do() -> None:
    x = torch.tensor([1.0, 2.0])
    assert difference(x, x.clone(), x.double() + 1, tolerance=0.0).within
    for bad in (math.nan, math.inf):
        found = difference(torch.tensor([1.0, bad]), x, x.double(), tolerance=1e-6)
        assert not found.within
        assert not difference(torch.tensor([1.0, bad]), x, None, tolerance=1e-6).within


def test_the_accumulated_error_is_judged_only_with_float64() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000)
    reference, grown = {"embed": x}, {"embed": x * (1 + 1e-4)}
    assert compare(reference, grown, {"embed": x})[0].passed
    assert not compare(reference, grown, grown)[0].passed
    exact = {"embed": x.double()}
    assert not compare(reference, grown, {"embed": x}, exact, exact)[0].passed


def test_a_tap_of_another_shape_is_named() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ParityError, match=r"tap embed has shape \[2, 4\], but must have \[2, 3\]"):
        compare({"embed": x}, {"embed": torch.zeros(2, 4)}, {"embed": x})


def make_report(*within: bool) -> ParityReport:
    x = torch.ones(8)
    names = ["embed", "h.0.ln_1", "ln_f", "logits"]
    reference = {name: x for name in names}
    ours = {name: x if ok else x * math.nan for name, ok in zip(names, within, strict=True)}
    taps = compare(reference, ours, ours)
    return ParityReport(
        "m", "linear", "float32", (1, 8), False, False, taps, {"torch": "2"}, GOOD_LOGITS
    )


def test_a_report_names_the_first_divergence_in_execution_order() -> None:
    report = make_report(True, False, False, True)
    assert not report.passed and report.first_divergence == "h.0.ln_1"
    assert "diverges from transformers at h.0.ln_1" in report.headline
    good = make_report(True, True, True, True)
    assert good.passed and good.first_divergence is None
    assert "4 of 4 taps pass, all bit-identical" in good.headline


def test_a_report_with_nan_is_valid_json() -> None:
    found = json.loads(
        json.dumps(make_report(True, False, True, True).to_json(full=True), allow_nan=False)
    )
    assert found["passed"] is False and found["first_divergence"] == "h.0.ln_1"
    assert found["taps"][1]["local"]["max_abs"] is None
    assert found["taps"][0]["accumulated"]["bit_identical"] is True
