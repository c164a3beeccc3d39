"""llama.cpp's converter recognizes the names of an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import load_pretrained, save_pretrained
from tests.conftest import MakeCheckpoint
from tests.loading_common import both_dialects
from tests.saving_common import stored_tensors

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.interop


@both_dialects
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_recognizes_all_names(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, dialect: str, tied: bool
) -> None:
    source = make_checkpoint(tie_word_embeddings=tied)
    save_pretrained(load_pretrained(source, dialect), tmp_path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 3)
    found = {
        name: names.get_name(name, try_suffixes=(".weight", ".bias"))
        for name in stored_tensors(tmp_path)
    }
    assert None not in found.values(), found
    assert len({*found.values()}) == len(found) == 2 + 12 * 3 + 2 + (not tied)
    assert found["transformer.h.2.attn.c_attn.weight"] == "blk.2.attn_qkv.weight"
