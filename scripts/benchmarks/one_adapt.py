"""One adapt, or one forward pass, in a process of its own: one_adapt.py STAGE FOLDER → JSON."""

import json
import statistics
import sys
import time
from timeit import repeat

import torch

TARGET = "compat.dialects.linear:GPTModel"  # stands for a user's model
N_IDS, FORWARDS = 128, 9


def adapt_once(source: str) -> dict[str, float]:
    """Return the stages of adapt."""
    from compat import adapt
    from compat.checkpoint import open_checkpoint
    from compat.user_models import construct, load_target

    checkpoint = open_checkpoint(source)
    model = construct(load_target(TARGET), checkpoint.config)
    start = time.perf_counter()
    adaptation = adapt(model, checkpoint)
    call = time.perf_counter() - start
    if not adaptation.compatible:
        sys.exit(f"adapt found {TARGET} incompatible: {adaptation.findings}")
    return {"call": call, **adaptation.seconds}


def forward_once(source: str) -> dict[str, float]:
    """Return the median of several forward passes of transformers, after one to warm up."""
    from compat.checkpoint import open_checkpoint
    from compat.parity.transformers_gpt2 import load_reference

    checkpoint = open_checkpoint(source)
    model = load_reference(checkpoint, torch.float32, "sdpa")
    length = min(N_IDS, checkpoint.config.n_positions)
    ids = torch.randint(checkpoint.config.vocab_size, (1, length))
    with torch.no_grad():
        seconds = repeat(lambda: model(ids, use_cache=False), number=1, repeat=1 + FORWARDS)
    return {"forward": statistics.median(seconds[1:])}


if __name__ == "__main__":
    stage, folder = sys.argv[1:]
    print(json.dumps({"adapt": adapt_once, "forward": forward_once}[stage](folder)))
