"""Correct ports in NumPy and C pass, and all planted faults are found and named."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from compat import check_parity, load_pretrained, open_checkpoint
from compat.golden_files import Golden, GoldenReport, golden
from compat.golden_files.codes import ARRAYS_ONLY, CODES, GRADIENTS
from tests.golden.numpy_port import FAULTS, Array, forward
from tests.golden.torch_port import FAULTS as BACKWARD_FAULTS

SIZES = 3, 4  # layers and heads of `tiny`
IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(3))

C_FAULTS = {
    "erf": ("erf_gelu", "h.0.act"),
    "relu": ("relu", "h.0.act"),
    "eps": ("eps_value", "h.0.ln_1"),
    "unbiased": ("unbiased_var", "h.0.ln_1"),
    "rms": ("rmsnorm", "h.0.ln_1"),
    "no shift": ("no_ln_bias", "h.0.ln_1"),
    "no scale": ("no_attn_scale", "h.0.probs"),
    "scale by width": ("scale_by_d_model", "h.0.probs"),
    "no mask": ("no_mask", "h.0.probs"),
    "mask sees one more": ("mask_off", "h.0.probs"),
    "not merged": ("no_head_merge_transpose", "h.0.heads"),
    "swapped": ("kv_swapped", "h.0.k"),
    "transposed": ("transposed_weight", "h.0.attn"),
    "no bias": ("no_proj_bias", "h.0.attn"),
    "no residual": ("missing_residual", "h.0.resid_mid"),
    "offset": ("pos_offset", "embed"),
    "no ln_f": ("no_final_ln", "ln_f"),
}


Port = Callable[..., dict[str, Array]]
Check = Callable[..., GoldenReport]


@pytest.fixture(scope="module")
def file(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden.safetensors"
    golden(tiny, path, input_ids=IDS)
    return path


@pytest.fixture(scope="module")
def reference(file: Path) -> Golden:
    return Golden.open(file)


@pytest.fixture(scope="module")
def port(tiny: Path) -> Port:
    """A function that runs the port in NumPy: `port(ids, fault)`."""
    checkpoint = open_checkpoint(tiny)
    weights = {name: checkpoint.read(name).numpy() for name in checkpoint.infos}

    def run(ids: NDArray[np.int64], fault: str = "") -> dict[str, Array]:
        return forward(weights, ids, *SIZES, fault)

    return run


@pytest.fixture(scope="module")
def check(reference: Golden, port: Port, tiny: Path) -> Check:
    """A function that returns the report on a port with a fault, for all or some of its arrays."""

    def run(fault: str = "", only: Callable[[str], bool] = lambda name: True) -> GoldenReport:
        found = port(IDS.numpy(), fault)
        return reference.check({n: x for n, x in found.items() if only(n)}, model=tiny)

    return run


def test_a_correct_port_in_numpy_passes(check: Check) -> None:
    report = check()
    assert report.passed and not report.findings and report.has_logits
    assert len(report.taps) == 42 and all(tap.local is not None for tap in report.taps)
    assert all(tap.local and tap.local.bound for tap in report.taps)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_in_numpy_is_named(check: Check, fault: str) -> None:
    code, tap = FAULTS[fault]
    report = check(fault)
    assert not report.passed and report.first_divergence == tap
    assert [(finding.code, finding.tap) for finding in report.findings] == [(code, tap)]
    [finding] = report.findings
    assert "{" not in finding.message.replace("{0…2}", "") and finding.fix and finding.evidence


def test_the_faults_have_at_least_forty_codes() -> None:
    codes = {code for code, _ in FAULTS.values()}
    assert len(codes) >= 40 and codes <= CODES.keys()
    assert ARRAYS_ONLY.keys() - {"qkv_order"} <= codes
    assert GRADIENTS.keys() == {code for code, _ in BACKWARD_FAULTS.values()}


@pytest.mark.parametrize("fault", ["erf", "eps"])
def test_logits_alone_name_a_fault_of_all_layers(check: Check, fault: str) -> None:
    report = check(fault, only=lambda name: name == "logits")
    assert [finding.code for finding in report.findings] == [FAULTS[fault][0]]
    assert len(report.taps) == 1 and report.taps[0].local is None


def test_two_faults_are_both_named(reference: Golden, port: Port, tiny: Path) -> None:
    mixed = port(IDS.numpy(), "erf")
    act, fc = mixed["h.1.act"], mixed["h.1.fc"]
    assert not np.array_equal(act, np.maximum(fc, 0))
    mixed["h.1.act"] = np.maximum(fc, 0)  # no longer fits the later taps of layer 1
    report = reference.check(mixed, model=tiny)
    found = {finding.code: finding for finding in report.findings}
    assert {"erf_gelu", "relu"} <= found.keys()
    assert "only in h.1" in found["relu"].message
    assert "only in h.0 and h.2" in found["erf_gelu"].message


def test_a_wrong_piece_is_reported_at_the_first_tap_that_can_be_recomputed(
    check: Check,
) -> None:
    report = check("smaller scale", only=lambda name: not name.endswith("probs"))
    [finding] = report.findings
    assert finding.tap == "h.0.heads"


def test_a_port_in_c_passes_and_its_faults_are_named(
    file: Path, reference: Golden, tiny: Path, tmp_path: Path
) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None, "a C compiler is missing"
    program = tmp_path / "port"
    source = Path(__file__).with_name("port.c")
    subprocess.run([compiler, "-O2", "-o", program, source, "-lm"], check=True)

    def run(fault: str) -> Path:
        folder = tmp_path / fault.replace(" ", "-")
        folder.mkdir()
        layers, heads = map(str, SIZES)
        command = [program, tiny / "model.safetensors", file, folder, layers, heads, fault]
        subprocess.run(command, check=True)
        return folder

    report = reference.check(run("none"), model=tiny)
    assert report.passed and len(report.taps) == 42
    for fault, (code, tap) in C_FAULTS.items():
        report = reference.check(run(fault), model=tiny)
        found = [(finding.code, finding.tap) for finding in report.findings]
        assert not report.passed and found == [(code, tap)], fault


def test_check_parity_accepts_functions(port: Port, reference: Golden, tiny: Path) -> None:
    def fused(ids: NDArray[np.int64]) -> dict[str, Array]:
        """Return fused q, k and v for the last block, as in many ports."""
        found = port(ids)
        found["h.2.qkv"] = np.concatenate([found.pop(f"h.2.{name}") for name in "qkv"], -1)
        return found

    correct = check_parity(fused, tiny, input_ids=IDS)
    assert correct.passed and len(correct.taps) == 42 and len(correct.logits.inputs) > 20
    assert all(tap.local is None for tap in correct.taps) and "locally" not in correct.headline
    assert reference.check(load_pretrained(tiny)).passed  # a module is accepted, too
    wrong = check_parity(lambda ids: torch.from_numpy(port(ids, "erf")["logits"]), tiny)
    assert not wrong.passed and wrong.first_divergence == "logits"
