"""Golden files: their contents, and candidates that are unusual, damaged or hostile."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from compat import CheckpointError, CompatError, ParityError, load_pretrained, save_pretrained
from compat.golden_files import Golden, arrays, golden
from compat.parity import transformers_gpt2
from tests.command_line import Cli
from tests.conftest import noisy_reference
from tests.golden.torch_port import FAULTS, gradients

B, T, N = 2, 5, 3


@pytest.fixture(scope="module")
def file(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden.safetensors"
    ids = torch.randint(97, (B, T), generator=torch.Generator().manual_seed(1))
    golden(tiny, path, input_ids=ids, gradients=True, decode=N)
    return path


@pytest.fixture(scope="module")
def reference(file: Path) -> Golden:
    return Golden.open(file)


@pytest.fixture(scope="module")
def taps(reference: Golden) -> dict[str, Any]:
    """The taps of a correct candidate as NumPy arrays."""
    return {name: reference.read(name).numpy() for name in reference.taps}


# The contents of a file


def test_the_file_is_an_ordinary_safetensors_file(file: Path, reference: Golden) -> None:
    stored = load_file(file)
    assert stored["input_ids"].shape == (B, T) and stored["decode.logits"].shape == (B, N, 97)
    assert {f"bound.{name}" for name in reference.judged} <= stored.keys()
    with safe_open(file, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["golden"])
    assert metadata["taps"]["h.0.probs"]["axes"] == "B H T S"
    assert all(list(stored[n].shape) == tap["shape"] for n, tap in metadata["taps"].items())
    assert len(metadata["checkpoint_sha256"]) == 64 and metadata["dtype"] == "float32"


def test_gradients_and_decode_steps_equal_those_of_transformers(reference: Golden) -> None:
    model = noisy_reference()
    loss = model(reference.ids, labels=reference.ids).loss
    loss.backward()
    torch.testing.assert_close(reference.read("loss"), loss.detach())
    for name, parameter in model.transformer.named_parameters():
        found = reference.read(f"grad.{name}")
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
    fed = reference.read("decode.input_ids")
    with torch.no_grad():
        logits = model(torch.cat([reference.ids, fed], 1)).logits
    assert torch.equal(logits[:, T - 1 : -1].argmax(-1), fed)
    torch.testing.assert_close(reference.read("decode.logits"), logits[:, T:], rtol=1e-4, atol=1e-5)


def test_gradients_at_taps_equal_those_of_autograd(reference: Golden) -> None:
    model, kept = noisy_reference(), {}

    def keep(_module: object, _args: object, output: Tensor) -> None:
        output.retain_grad()
        kept["fc"] = output

    model.transformer.h[1].mlp.c_fc.register_forward_hook(keep)
    model(reference.ids, labels=reference.ids).loss.backward()
    torch.testing.assert_close(reference.read("grad.h.1.fc"), kept["fc"].grad, rtol=1e-4, atol=1e-7)


def test_a_wrong_gradient_fails(reference: Golden, taps: dict[str, Any]) -> None:
    correct = {name: reference.read(name) for name in reference.judged}
    assert reference.check(correct).passed
    wrong = {**correct, "grad.h.1.mlp.c_fc.weight": correct["grad.h.1.mlp.c_fc.weight"] * 1.0001}
    report = reference.check(wrong)
    assert report.first_divergence == "grad.h.1.mlp.c_fc.weight"
    transposed = {"grad.h.1.mlp.c_fc.weight": correct["grad.h.1.mlp.c_fc.weight"].T}
    assert reference.check(transposed).passed  # the layout of nn.Linear


def backward(reference: Golden, fault: str = "") -> dict[str, Tensor]:
    """Return all gradients of a port, by default of a correct one."""
    model: Any = noisy_reference()
    parameters = {name: p.detach() for name, p in model.transformer.named_parameters()}
    return gradients(parameters, reference.ids, 3, 4, fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_backward_pass_are_named(reference: Golden, tiny: Path, fault: str) -> None:
    report = reference.check(backward(reference, fault), model=tiny)
    found = [(finding.code, finding.tap) for finding in report.findings]
    assert not report.passed and found == [FAULTS[fault]]
    assert report.first_divergence == FAULTS[fault][1] and report.findings[0].evidence


def test_a_correct_backward_pass_agrees(reference: Golden, tiny: Path) -> None:
    correct = backward(reference)
    report = reference.check(correct, model=tiny)
    assert report.passed and report.first_divergence is None and not report.findings
    # Without the gradients at taps, a factor of all parameters is still one finding.
    scaled = {n: x * 0.3 for n, x in correct.items() if n.endswith(("weight", "bias"))}
    [finding] = reference.check(scaled).findings
    assert finding.code == "scaled_gradient" and finding.values["found"] == 0.3


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 1.1), (torch.bfloat16, 1.6)])
def test_gradients_in_half_precision_are_judged(
    reference: Golden, dtype: torch.dtype, factor: float
) -> None:
    """`transformers` passes in half precision, and damage to one parameter does not."""
    half = by_transformers(reference, dtype)
    report = reference.check(half)
    assert report.passed, report.headline
    assert {tap.tap for tap in report.taps} == set(half)
    for name in ("h.1.mlp.c_fc.weight", "h.0.ln_1.bias", "wte.weight", "h.2.act"):
        damaged = half[f"grad.{name}"] * factor
        report = reference.check({**half, f"grad.{name}": damaged})
        assert report.first_divergence == f"grad.{name}"
        assert not reference.check({**half, f"grad.{name}": torch.zeros_like(damaged)}).passed


def by_transformers(reference: Golden, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the logits, the loss and the gradients of the reference in half precision."""
    model: Any = noisy_reference().to(dtype)
    model.set_attn_implementation("eager")
    kept: dict[str, Tensor] = {}

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(partial(kept.__setitem__, "h.2.act"))

    model.transformer.h[2].mlp.act.register_forward_hook(watch)
    logits = model(reference.ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), reference.ids[:, 1:].flatten())
    loss.backward()
    kept |= {name: p.grad for name, p in model.transformer.named_parameters()}
    found = {f"grad.{name}": gradient for name, gradient in kept.items()}
    return {"logits": logits.detach(), "loss": loss.detach(), **found}


def test_arrays_that_rounding_destroys_are_not_judged(
    tiny: Path, reference: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compat.golden_files.bounds.LARGEST_BOUND", 1e-9)
    recorded = golden(tiny, input_ids=reference.ids, gradients=True)
    half = {name: recorded.read(name).half() for name in ("logits", "grad.h.1.fc")}
    with pytest.raises(ParityError, match=r"rounding to float16 alone.*float32"):
        recorded.check(half)
    report = recorded.check({"embed": recorded.read("embed"), **half})
    assert [tap.tap for tap in report.taps] == ["embed"]
    assert any("rounding to float16 alone" in note for note in report.notes)


def test_npz_files_contain_the_same_arrays(tiny: Path, tmp_path: Path, reference: Golden) -> None:
    recorded = golden(tiny, tmp_path / "golden.npz", input_ids=reference.ids, taps="layers")
    assert recorded.taps == ["embed", "h.0.out", "h.1.out", "h.2.out", "ln_f", "logits"]
    assert all(torch.equal(recorded.read(name), reference.read(name)) for name in recorded.taps)
    assert recorded.check(tmp_path / "golden.npz").passed
    recorded.save(tmp_path / "again.safetensors")
    assert Golden.open(tmp_path / "again.safetensors").check(tmp_path / "golden.npz").passed


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_file_can_be_saved_again_with_its_data_types(
    tmp_path: Path, reference: Golden, suffix: str
) -> None:
    reference.save(tmp_path / f"reopened{suffix}")
    reopened = Golden.open(tmp_path / f"reopened{suffix}")
    assert list(reopened.arrays) == list(reference.arrays)
    for name in reopened.arrays:
        found, expected = reopened.read(name), reference.read(name)
        assert found.dtype == expected.dtype and torch.equal(found, expected), name


def test_bfloat16_is_refused_for_npz_files(tiny: Path, tmp_path: Path) -> None:
    """It is refused even if only the weights have it, because they keep the checkpoint's type."""
    half = tmp_path / "half"
    save_pretrained(load_pretrained(tiny, dtype="bfloat16"), half)
    with pytest.raises(ParityError, match="cannot store bfloat16"):
        golden(half, tmp_path / "golden.npz", input_ids=[[1, 2]], dtype="float32")
    kept = golden(half, input_ids=[[1, 2]], dtype="float32")
    with pytest.raises(ParityError, match="cannot store bfloat16"):
        kept.save(tmp_path / "golden.npz")
    with pytest.raises(ParityError, match=r"suffix '\.txt'"):
        kept.save(tmp_path / "golden.txt")
    kept.save(tmp_path / "golden.safetensors")
    reopened = Golden.open(tmp_path / "golden.safetensors")
    assert reopened.read("weight.wpe.weight").dtype == torch.bfloat16


def test_reports_are_short_and_pages_name_the_deviation(
    reference: Golden, taps: dict[str, Any]
) -> None:
    report = reference.check({**taps, "h.1.act": np.maximum(taps["h.1.fc"], 0)})
    assert "h.1.act relu" in repr(report) and len(repr(report)) < 1000
    assert "relu" in report._repr_html_() and report._repr_html_().startswith("<iframe")
    assert "2 × 5 ids, 42 taps, gradients" in repr(reference) and len(repr(reference)) < 300
    assert "h.2.probs" in reference._repr_html_()
    assert reference.to_json()["taps"][0] == "embed"
    # A correct candidate that consists only of gradients
    known = {name: reference.read(name) for name in reference.judged if name.startswith("grad.")}
    report = reference.check(known)
    assert report.passed and report.first_divergence is None
    assert "grad.h.2" in report._repr_html_() and "Δlogits" not in report._repr_html_()


def test_a_wrong_tap_is_named_although_the_gradients_agree(
    reference: Golden, taps: dict[str, Any]
) -> None:
    every = {name: reference.read(name) for name in reference.judged}
    report = reference.check({**every, "h.1.act": np.maximum(taps["h.1.fc"], 0)})
    assert [finding.code for finding in report.findings] == ["relu"]


def test_only_one_block_at_a_time_is_in_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tap is written before the model computes the tap after the next one."""
    from compat.golden_files import write

    computed: list[str] = []
    distance = 0
    original = write.stream_taps

    def watched(model: Any, taps: Any, ids: Tensor, record: Any) -> None:
        def watched_record(name: str, value: Tensor) -> None:
            computed.append(name)
            record(name, value)

        original(model, taps, ids, watched_record)

    def keep(arrays: Any, shapes: Any, name: str, tensor: Tensor) -> None:
        nonlocal distance
        if name in computed:
            distance = max(distance, len(computed) - computed.index(name))

    monkeypatch.setattr(write, "stream_taps", watched)
    monkeypatch.setattr(write, "_keep", keep)
    golden(tiny, input_ids=[[1, 2, 3]])
    assert 1 <= distance <= 2, distance


def test_a_patched_reference_is_not_recorded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = transformers_gpt2.load_reference

    def wrong(*arguments: Any) -> Any:
        model = original(*arguments)
        model.transformer.h[1].mlp.act = torch.nn.GELU()
        return model

    monkeypatch.setattr(transformers_gpt2, "load_reference", wrong)
    with pytest.raises(ParityError, match="cannot be trusted"):
        golden(tiny, input_ids=[[1, 2, 3]])


# Correct candidates in another form


def time_first(x: Any) -> Any:
    return np.ascontiguousarray(np.swapaxes(x, 0, 1))


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "reversed order": lambda taps: dict(reversed(taps.items())),
    "float64": lambda taps: {n: x.astype(np.float64) for n, x in taps.items()},
    "big-endian": lambda taps: {n: x.astype(">f4") for n, x in taps.items()},
    "Fortran order": lambda taps: {n: np.asfortranarray(x) for n, x in taps.items()},
    "long double": lambda taps: {n: x.astype(np.longdouble) for n, x in taps.items()},
    "torch": lambda taps: {n: torch.from_numpy(x) for n, x in taps.items()},
    "time first": lambda taps: {n: x if "probs" in n else time_first(x) for n, x in taps.items()},
    "flat": lambda taps: {
        n: x if "probs" in n else x.reshape(B * T, -1) for n, x in taps.items()
    },
    "padded vocabulary": lambda taps: {
        **taps, "logits": np.pad(taps["logits"], ((0, 0), (0, 0), (0, 31)))
    },
    "heads": lambda taps: {
        n: x.reshape(B, T, 4, 6).transpose(0, 2, 1, 3) if n[-2:] in (".q", ".k", ".v") else x
        for n, x in taps.items()
    },
    "fused": lambda taps: {
        **{n: x for n, x in taps.items() if n[-2:] not in (".q", ".k", ".v")},
        **{f"h.{i}.qkv": np.concatenate([taps[f"h.{i}.{p}"] for p in "qkv"], -1) for i in range(3)},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_correct_arrays_in_another_form_pass(
    reference: Golden, taps: dict[str, Any], form: str
) -> None:
    report = reference.check(FORMS[form](taps))
    assert report.passed and len(report.taps) == 42, report.headline
    noted = form in ("time first", "flat", "padded vocabulary", "heads", "fused")
    words = ("read as", "ignored", "fused")
    assert noted == any(word in note for note in report.notes for word in words)


def test_a_half_precision_port_is_judged_by_its_rounding_errors(
    reference: Golden, taps: dict[str, Any]
) -> None:
    for convert in (lambda x: x.astype(np.float16), lambda x: torch.from_numpy(x).bfloat16()):
        report = reference.check({name: convert(x) for name, x in taps.items()})
        assert report.passed and any(
            "small deviations stay undetected" in note for note in report.notes
        )
    # Half precision that is stored as float32 is recognized by its values.
    report = reference.check({n: x.astype(np.float16).astype("f4") for n, x in taps.items()})
    assert report.passed and any("float16 values" in note for note in report.notes)
    wrong = {**taps, "h.1.act": np.maximum(taps["h.1.fc"], 0)}
    assert not reference.check({n: x.astype(np.float16) for n, x in wrong.items()}).passed


def test_logits_may_have_only_the_last_position_or_be_missing(
    reference: Golden, taps: dict[str, Any]
) -> None:
    report = reference.check({"logits": taps["logits"][:, -1]})
    assert report.passed and any("last position" in note for note in report.notes)
    report = reference.check({"h.0.act": taps["h.0.act"]})
    assert report.passed and not report.has_logits
    assert "logits were not compared" in report.headline
    assert not reference.check({"logits": taps["logits"][:, -1] * 1.001}).passed


def test_one_wrong_value_fails(reference: Golden, taps: dict[str, Any]) -> None:
    for name in ("embed", "h.1.probs", "h.2.out", "logits"):
        wrong = taps[name].copy()
        wrong.flat[7] += 1e-3 * np.abs(wrong).max()
        assert not reference.check({name: wrong}).passed, name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_fail(reference: Golden, taps: dict[str, Any], value: float) -> None:
    wrong = taps["h.0.act"].copy()
    wrong[1, 2, 3] = value
    report = reference.check({**taps, "h.0.act": wrong})
    assert not report.passed and report.first_divergence == "h.0.act"
    assert "NaN or infinite" in report.headline
    assert "[1, 2, 3]" in report.findings[0].message
    assert report.to_json()["passed"] is False


# Candidates that cannot be compared


def altered(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda taps: {**taps, **changes}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown name": (altered(**{"h.0.atn": np.zeros(3)}), "h.0.atn. Did you mean h.0.attn?"),
    "a layer too many": (altered(**{"h.3.act": np.zeros(3)}), "h.3.act"),
    "other shape": (altered(logits=np.zeros((B, T, 9))), r"logits is float64 \[2, 5, 9\]"),
    "scalar": (altered(logits=np.float32(1)), r"logits is float32 \[\]"),
    "objects": (altered(logits=np.array([None, {}])), "Python objects"),
    "text": (altered(logits=np.array(["a"])), "must hold numbers"),
    "complex": (altered(logits=np.zeros((B, T, 97), complex)), "must hold numbers"),
    "integers": (altered(logits=np.zeros((B, T, 97), int)), "floating-point"),
    "other ids": (altered(input_ids=np.zeros((B, T), int)), "Run the candidate on"),
    "ids of another shape": (altered(input_ids=np.zeros((1, 1), int)), r"shape \[1, 1\]"),
    "twice": (lambda taps: {**taps, "h.0.qkv": np.zeros((B, T, 72))}, "twice|both"),
    "nothing": (lambda taps: {}, "none of the golden arrays"),
    "not arrays": (lambda taps: {"logits": "text"}, "must be an array"),
    "no mapping": (lambda taps: 3, "must be a file"),
    "raises": (lambda taps: lambda ids: 1 / 0, "ZeroDivisionError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_that_cannot_be_compared_raise_one_error(
    reference: Golden, taps: dict[str, Any], case: str
) -> None:
    make, words = REFUSED[case]
    with pytest.raises(CompatError, match=words):
        reference.check(make(taps))


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def damaged(path: Path, keep: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy"])
def test_truncated_files_are_refused(
    reference: Golden, taps: dict[str, Any], tmp_path: Path, kind: str, keep: float
) -> None:
    if kind == "npy":
        path = tmp_path / "arrays"
        path.mkdir()
        np.save(path / "logits.npy", taps["logits"])
        damaged(path / "logits.npy", keep)
    elif kind == "npz":
        path = damaged(write_npz(tmp_path / "a.npz", **taps), keep)
    else:
        path = tmp_path / "a.safetensors"
        save_file({name: torch.from_numpy(x) for name, x in taps.items()}, path)
        damaged(path, keep)
    with pytest.raises(CompatError):
        reference.check(path)


def test_hostile_npy_files_are_refused(reference: Golden, tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    np.save(folder / "logits.npy", np.array([Path("/")], dtype=object), allow_pickle=True)
    with pytest.raises(CompatError, match="Python objects"):
        reference.check(folder)
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 5, 1000000000000), }"
    text = header.encode().ljust(117) + b"\n"
    (folder / "logits.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    )
    with pytest.raises(CompatError):
        reference.check(folder)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("logits.npy", b"no array")
    with pytest.raises(CompatError, match="cannot be read"):
        reference.check(tmp_path / "a.npz")


def test_files_that_are_not_golden_files_are_refused(
    tmp_path: Path, file: Path, tiny: Path
) -> None:
    for path in (tiny / "model.safetensors", write_npz(tmp_path / "a.npz", x=np.zeros(2))):
        with pytest.raises(ParityError, match="is not a golden file"):
            Golden.open(path)
    for path in (tmp_path / "none.safetensors", tmp_path / "none", tmp_path):
        with pytest.raises(CompatError):
            Golden.open(path)


def test_a_failed_write_leaves_the_existing_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compat.golden_files import write

    path = tmp_path / "golden.safetensors"
    path.write_text("what was there")

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "chain", fail)
    with pytest.raises(KeyboardInterrupt):
        golden(tiny, path, input_ids=[[1, 2]])
    assert path.read_text() == "what was there" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_full_disk_raises_one_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrays, "tensor_bytes", full)
    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space .* Free space there"):
        golden(tiny, tmp_path / f"golden.{suffix}", input_ids=[[1, 2]])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused_before_anything_is_computed(cli: Cli) -> None:
    done = cli("golden", "--out", "no/such/folder/golden.npz")
    assert done.code == 2 and "no/such/folder is not a folder" in done.err


def test_a_candidate_of_another_checkpoint_is_refused(
    reference: Golden, taps: dict[str, Any], tiny: Path
) -> None:
    report = reference.check(taps, model=tiny)
    assert report.passed and all(tap.local is not None for tap in report.taps)
    without = reference.check(taps)
    assert {t.tap for t in without.taps if t.local is None} >= {"h.0.q", "h.0.mlp", "logits"}
    assert all(t.local for t in without.taps if t.tap.endswith(("ln_1", "act", "probs", "out")))
    with pytest.raises(ParityError, match="the golden arrays were recorded from"):
        reference.check(taps, model="demo")


def test_names_can_be_mapped(reference: Golden, taps: dict[str, Any]) -> None:
    theirs = {f"blocks.{i}.mlp.hook_post": taps[f"h.{i}.act"] for i in range(3)}
    theirs |= {"hook_embed": np.zeros(1)}
    names = {"blocks.{i}.mlp.hook_post": "h.{i}.act", "hook_embed": None}
    report = reference.check(theirs, rename=names)
    assert report.passed and [t.tap for t in report.taps] == ["h.0.act", "h.1.act", "h.2.act"]


# The commands


def test_the_commands_write_and_compare_files(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    done = cli(
        "golden", "--model", "demo", "--out", path, "--ids", "1,2,3;4,5,6", "--taps", "layers"
    )
    assert done.code == 0 and "7 arrays with bounds for 2 × 3 ids" in done.err
    arrays = load_file(path)
    correct = write_npz(tmp_path / "right.npz", final=arrays["ln_f"], logits=arrays["logits"])
    (tmp_path / "map.json").write_text(json.dumps({"final": "ln_f"}))
    done = cli(
        "compare", path, correct, "--rename", tmp_path / "map.json", "--html", tmp_path / "p.html"
    )
    assert done.code == 0 and "✓ right.npz agrees with transformers on demo: 2 of 2" in done.out
    assert "right.npz" in (tmp_path / "p.html").read_text()
    wrong = write_npz(tmp_path / "wrong.npz", logits=arrays["logits"] / 2, ln_f=arrays["ln_f"])
    done = cli("compare", path, wrong)
    assert done.code == 1 and "scaled_logits · breaks parity at logits" in done.out
    assert json.loads(cli("compare", path, wrong, "--json").out)["findings"][0]["values"]["found"]
    assert cli("explain", "transposed_weight").out.startswith("transposed_weight: breaks parity")
    for argv in (
        ("golden", "--out", tmp_path / "g.bin"),
        ("golden", "--out", path, "--ids", "1,x"),
        ("golden", "--out", path, "--ids", "1,2;3"),
        ("golden", "--out", path, "--ids", "1", "--text", "a"),
        ("golden",),
    ):
        assert cli(*argv).code == 2
    for argv in (
        ("golden", "--out", path, "--ids", "5000"),
        ("golden", "--out", path, "--taps", "h.9.*"),
        ("golden", "--out", path, "--length", "250", "--decode", "9"),
        ("compare", tmp_path / "none.safetensors", correct),
        ("compare", path, correct),
        ("compare", path, correct, "--rename", path),
    ):
        assert cli(*argv).code == 3, argv
