"""llama.cpp, by the C interface of llama-cpp-python: several sequences in one batch.

Of the kind "q8_0", llama.cpp repacks the weights for AMX where the machine has it; these kernels
crash on some. "q8_0 by id" reads prompts one token at a time, which uses other kernels;
"q8_0 no AMX" leaves the weights as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import llama_cpp as c
import numpy as np

from benchmarks.peers import Generate

FILE = "model.gguf"
CHUNK = 2048  # tokens of one call


def convert(source: Path, kind: str, folder: Path) -> None:
    from benchmarks.peers.gguf_file import write  # its imports are not needed to generate

    folder.mkdir(exist_ok=True)
    write(source, kind.split()[0], folder / FILE)


@c.llama_log_callback
def silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Discard llama.cpp's log; failures are reported by its return values."""


def load(folder: Path, kind: str, batch: int, threads: int) -> Generate:
    c.llama_log_set(silent, ctypes.c_void_p(0))
    c.llama_backend_init()
    path = str(folder / FILE).encode()
    settings = c.llama_model_default_params()
    settings.use_extra_bufts = not kind.endswith("no AMX")
    model = c.llama_model_load_from_file(path, settings)
    if not model:
        raise OSError(f"llama.cpp cannot load {path.decode()}")
    context = new_context(model, kind, batch, threads)
    vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def generate(prompts: list[list[int]], new: int, tick: Callable[[], None]) -> list[list[int]]:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        T = len(prompts[0])
        chunk = 1 if kind.endswith("by id") else T
        for t in range(0, T, chunk):
            rows = [prompt[t : t + chunk] for prompt in prompts]
            ids = read(context, rows, t, vocab_size)
        tick()
        rows = [[i] for i in ids]
        for n in range(new - 1):
            ids = read(context, [[i] for i in ids], T + n, vocab_size)
            tick()
            for row, i in zip(rows, ids, strict=True):
                row.append(i)
        return rows

    return generate


def new_context(model: c.llama_model_p, kind: str, batch: int, threads: int) -> c.llama_context_p:
    """Create a context for one sequence of full length, or for the short ones of a batch."""
    settings = c.llama_context_default_params()
    length = c.llama_model_n_ctx_train(model)
    settings.n_ctx = batch * (length if batch == 1 else min(length, 256))
    settings.n_batch = min(settings.n_ctx, CHUNK)
    settings.n_seq_max = batch
    settings.n_threads = settings.n_threads_batch = threads
    if kind == "f32":  # else keys and values are kept in float16
        settings.type_k = settings.type_v = c.GGML_TYPE_F32
    context = c.llama_init_from_model(model, settings)
    if not context:
        raise OSError("llama.cpp cannot create a context")
    return context


def read(context: c.llama_context_p, rows: list[list[int]], start: int, V: int) -> list[int]:
    """Return the most likely token after each row; the rows begin at position `start`."""
    B, T = len(rows), len(rows[0])
    batch = c.llama_batch_init(B * T, 0, 1)
    batch.n_tokens = B * T
    for row, ids in enumerate(rows):
        for t, token in enumerate(ids):
            at = row * T + t
            batch.token[at], batch.pos[at] = token, start + t
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
            batch.logits[at] = t == T - 1
    code = c.llama_decode(context, batch)
    c.llama_batch_free(batch)
    if code:
        raise OSError(f"llama_decode returned {code}; expected 0")
    found = [c.llama_get_logits_ith(context, (row + 1) * T - 1) for row in range(B)]
    return [int(np.ctypeslib.as_array(logits, (V,)).argmax()) for logits in found]
