"""Tensors are distributed over files as huggingface_hub does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization._base import parse_size_to_int
from hypothesis import given
from hypothesis import strategies as st

from compat import ConfigError, load_pretrained, save_pretrained
from compat.export_view import hf_tensors
from compat.saving.shards import parse_size, split
from tests.conftest import noisy_reference
from tests.loading_common import check_identical, save
from tests.saving_common import stored_tensors


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_shards_equal_those_of_huggingface_hub(sizes: list[int], limit: int) -> None:
    """Tensors have any size, even beyond the limit, and do not share memory."""
    tensors = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    expected = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    found = split({name: tensor.nbytes for name, tensor in tensors.items()}, limit)
    assert found == list(expected.filename_to_tensors.values())


@pytest.mark.parametrize("limit", [1, 8 * 24 * 4, 9312, 20_000, "20KB", "0.05MB", "1TB"])
def test_files_and_index_equal_those_of_transformers(
    tmp_path: Path, tiny: Path, limit: int | str
) -> None:
    """The order of the tensors is ours, which differs from that of transformers."""
    ours = load_pretrained(tiny)
    save_pretrained(ours, tmp_path / "ours", max_shard_size=limit)
    state = {f"transformer.{name}": t.make() for name, t in hf_tensors(ours).items()}
    expected = split_torch_state_dict_into_shards(state, max_shard_size=limit)
    found = {path.name for path in (tmp_path / "ours").glob("model*.safetensors")}
    assert found == set(expected.filename_to_tensors)
    check_identical(stored_tensors(tmp_path / "ours"), stored_tensors(tiny))
    theirs = save(tmp_path / "theirs", noisy_reference())
    noisy_reference().save_pretrained(theirs, max_shard_size=limit)
    path = Path("model.safetensors.index.json")
    assert (tmp_path / "ours" / path).exists() == (theirs / path).exists() == expected.is_sharded
    if expected.is_sharded:
        index = json.loads((tmp_path / "ours" / path).read_text())
        assert index["weight_map"] == expected.tensor_to_filename
        assert index["metadata"] == json.loads((theirs / path).read_text())["metadata"]


@pytest.mark.parametrize("text", ["5GB", "200MB", " 20KB ", "1.5 TB", "20kb", "0.29GB"])
def test_sizes_are_parsed_as_by_huggingface_hub(text: str) -> None:
    assert parse_size(text) == parse_size_to_int(text)


def test_a_number_is_a_size_in_bytes() -> None:
    assert parse_size(1) == parse_size("1") == 1
    assert parse_size(10**15) == 10**15


@pytest.mark.parametrize(
    "size",
    [0, -1, True, 2.5, None, "", "GB", "5GiB", "5 G", "-5GB", "0KB", "nanGB", "٣GB", "1e3KB"],
)
def test_invalid_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_shard_size is .*'5GB', '200MB' or '20KB'"):
        parse_size(size)
