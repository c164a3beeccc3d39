"""transformers, with torch's fused attention. The kind is its data type, and "+static" a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers import Generate

transformers.utils.logging.disable_progress_bar()


class Ticking(BaseStreamer):
    """Calls a function for every new position; the first thing put is the prompt."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick, self.prompt_seen = tick, False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.tick()
        self.prompt_seen = True

    def end(self) -> None:
        pass


def load(folder: Path, kind: str, batch: int, threads: int, device: str = "cpu") -> Generate:
    torch.set_num_threads(threads)
    dtype, _, cache = kind.partition("+")
    model = transformers.GPT2LMHeadModel.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model.eval().to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.cache_implementation = cache or None

    def generate(prompts: list[list[int]], new: int, tick: Callable[[], None]) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            streamer=Ticking(tick),
        )
        return done[:, ids.shape[1] :].tolist()

    return generate
