"""A GPT-2 checkpoint as llama.cpp reads it: a GGUF file without a vocabulary, since ids are fed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from compat.checkpoint import open_checkpoint
from compat.checkpoint.layout import HEAD, expected_shapes, saved_name

TURNED = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # Conv1D: [in, out]
KINDS = {
    "f32": (Type.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (Type.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def write(source: Path, kind: str, path: Path) -> None:
    """Write matrices in the kind's type, as llama.cpp's converter does, and the rest in float32."""
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    matrix_type, file_type = KINDS[kind]
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.d_inner)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name in expected_shapes(config):
        if name == HEAD and config.tie_word_embeddings:
            continue
        tensor = checkpoint.read(name).float().numpy()
        if name.endswith(TURNED):
            tensor = tensor.T
        is_matrix = tensor.ndim == 2 and name != "wpe.weight"
        stored_as = matrix_type if is_matrix else Type.F32
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), stored_as)
        writer.add_tensor(
            names.get_name(saved_name(name), (".weight", ".bias")), data, raw_dtype=stored_as
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
