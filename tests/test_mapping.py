"""Memory use while loading: memory-mapped pages, or copies on request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compat import CheckpointError, load_into, load_pretrained
from compat.checkpoint import open_checkpoint
from compat.dialects import DIALECTS
from tests.command_line import python
from tests.conftest import MakeCheckpoint, State, Write

IDS = torch.arange(24).view(2, 12)
both_dialects = pytest.mark.parametrize("dialect", list(DIALECTS))
linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux has /proc")


def mappings(path: Path) -> Iterator[range]:
    """Yield the address ranges to which this process has mapped a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path.resolve())):
            start, end = line.split()[0].split("-")
            yield range(int(start, 16), int(end, 16))


def is_mapped_from(path: Path, tensor: Tensor) -> bool:
    return any(tensor.data_ptr() in pages for pages in mappings(path))


@both_dialects
def test_a_mapped_model_equals_a_copied_one(tiny: Path, dialect: str) -> None:
    copied, mapped = (load_pretrained(tiny, dialect, mmap=mmap) for mmap in (False, True))
    for (name, copy), parameter in zip(copied.named_parameters(), mapped.parameters(), strict=True):
        assert copy.is_contiguous() and torch.equal(copy, parameter), name
    assert torch.equal(copied(IDS), mapped(IDS))


@linux
@both_dialects
def test_a_mapped_model_uses_the_pages_of_the_file(tiny: Path, dialect: str) -> None:
    model = load_pretrained(tiny, dialect)
    assert all(is_mapped_from(tiny / "model.safetensors", p) for p in model.parameters())


@linux
@both_dialects
def test_a_model_is_copied_on_request(tiny: Path, dialect: str) -> None:
    mapped = load_pretrained(tiny, "conv1d")  # so that the file is mapped
    model = load_pretrained(tiny, dialect, mmap=False)
    assert is_mapped_from(tiny / "model.safetensors", next(mapped.parameters()))
    assert not any(is_mapped_from(tiny / "model.safetensors", p) for p in model.parameters())


def test_a_copied_model_outlives_its_file(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint()
    model = load_pretrained(folder, "conv1d", mmap=False)
    before = model(IDS)
    os.truncate(folder / "model.safetensors", 100)
    assert torch.equal(model(IDS), before)


def test_writing_to_a_mapped_model_does_not_change_the_file(
    make_checkpoint: MakeCheckpoint,
) -> None:
    path = make_checkpoint() / "model.safetensors"
    content = path.read_bytes()
    model = load_pretrained(path.parent, "conv1d")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    assert path.read_bytes() == content
    assert torch.equal(load_pretrained(path.parent)(IDS), load_pretrained(path.parent)(IDS))


@linux
def test_pages_are_unmapped_with_their_tensor(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    tensor = checkpoint.read("wte.weight")
    assert is_mapped_from(checkpoint.weights, tensor)
    before = len(list(mappings(checkpoint.weights)))
    del tensor
    assert len(list(mappings(checkpoint.weights))) == before - 1


@linux
def test_misaligned_tensors_are_copied(write: Write, state: State) -> None:
    path = write(state) / "model.safetensors"
    expected = load_pretrained(path.parent, "conv1d")(IDS)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")  # of the header, which may end with spaces
    header = (size + 3).to_bytes(8, "little") + content[8 : 8 + size] + b"   "
    path.write_bytes(header + content[8 + size :])
    model = load_pretrained(path.parent, "conv1d")
    assert torch.equal(model(IDS), expected)
    assert not any(is_mapped_from(path, parameter) for parameter in model.parameters())


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("change", ["truncated", "rewritten"])
def test_a_file_that_changes_between_header_and_tensor_is_an_error(
    write: Write, state: State, change: str, mmap: bool
) -> None:
    path = write(state) / "model.safetensors"
    checkpoint = open_checkpoint(path, mmap=mmap)
    if change == "truncated":
        os.truncate(path, path.stat().st_size - 10_000)
    else:
        save_file({name: tensor + 1 for name, tensor in state.items()}, path)
    with pytest.raises(CheckpointError, match="was changed while"):
        for name in state:
            checkpoint.read(name)


def test_models_of_one_pickle_share_no_memory(write: Write, state: State) -> None:
    checkpoint = open_checkpoint(write(state, "pytorch_model.bin"))
    first, second = load_pretrained(checkpoint, "conv1d"), load_pretrained(checkpoint, "conv1d")
    before = second(IDS)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert torch.equal(second(IDS), before)


# Non-finite values

BROKEN = {
    "h.0.mlp.c_fc.weight": [(5, 11), (7, 2)],
    "h.2.ln_1.bias": [(3,)],
    "wte.weight": [(0, 0), (1, 1), (96, 23)],
}


@pytest.fixture
def broken(write: Write, state: State) -> Path:
    for name, indices in BROKEN.items():
        for index in indices:
            state[name][index] = torch.nan if name == "wte.weight" else torch.inf
    return write(state)


@both_dialects
def test_all_tensors_with_non_finite_values_are_listed(broken: Path, dialect: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(broken, dialect)
    for fragment in (
        "h.0.mlp.c_fc.weight has 2 NaN or infinite values, the first at [5, 11]",
        "h.2.ln_1.bias has 1 NaN or infinite values, the first at [3]",
        "wte.weight has 3 NaN or infinite values, the first at [0, 0]",
        "check_finite=False",
    ):
        assert fragment in str(caught.value)


def test_a_module_keeps_its_weights_if_the_new_ones_are_not_finite(
    broken: Path, tiny: Path
) -> None:
    model = load_pretrained(tiny, "conv1d")
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match="non-finite weights"):
        load_into(model, DIALECTS["conv1d"].name_map, broken)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_non_finite_values_are_loaded_on_request(broken: Path) -> None:
    model = load_pretrained(open_checkpoint(broken, check_finite=False), "conv1d")
    stored = load_file(broken / "model.safetensors")
    assert torch.equal(model.wte.weight, stored["wte.weight"]) is False  # NaN does not equal NaN
    assert model.wte.weight.isnan().sum() == 3


# Arguments, imports and peak memory


def test_an_open_checkpoint_cannot_be_opened_with_other_options(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is already open\. Pass mmap to open_checkpoint"):
        load_pretrained(open_checkpoint(tiny), mmap=False)


def test_loading_does_not_import_the_compiler() -> None:
    """Random initial values on the meta device would import the compiler, which takes a second."""
    code = """
import sys
from compat import load_pretrained
load_pretrained("demo"), load_pretrained("demo", "conv1d")
print({"torch._dynamo", "sympy", "transformers", "huggingface_hub"} & set(sys.modules))
"""
    done = python(code)
    assert done.stdout == "set()\n"


PEAK = """
import sys
from pathlib import Path
from compat import load_pretrained
def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))
load_pretrained("demo")
copied = len(sys.argv) > 3
field = "VmRSS" if copied else "RssAnon"  # the pages of a mapped file are not the process's own
before = memory(field)
model = load_pretrained(sys.argv[1], sys.argv[2], mmap=not copied)
print(memory("VmHWM" if copied else field) - before)
"""


@pytest.fixture(scope="module")
def large(make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint with 134 MB of weights."""
    return make_checkpoint(n_embd=768, n_head=12, n_layer=4, vocab_size=6000)


@linux
@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        (("conv1d", "copied"), 1.05),
        (("linear", "copied"), 1.2),
        (("conv1d",), 0.1),
        (("linear",), 0.1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_peak_memory_while_loading_is_bounded(
    large: Path, arguments: tuple[str, ...], most: float
) -> None:
    """The bounds are multiples of the weights; `linear` briefly has two copies of two matrices."""
    done = python(PEAK, large, *arguments)
    weights = (large / "model.safetensors").stat().st_size
    assert int(done.stdout) <= most * weights
