"""One run of lm-eval's requests in a process of its own: one_evaluate.py MODEL FOLDER → JSON.

MODEL is "compat" or "hf", with the batch size after a space.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TQDM_DISABLE"] = "1"

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from compat.evaluation import CompatLM

QUESTIONS, CHOICES = 8, 4
WORDS = Path(__file__).with_name("held_out.txt").read_text().split()


def words(start: int, count: int) -> str:
    return " ".join(WORDS[start : start + count])


def requests() -> dict[str, tuple[str, list[tuple[Any, ...]]]]:
    """Return, by kind, the method of the model and the arguments of its requests."""
    starts = [100 * number for number in range(QUESTIONS)]
    contexts = [words(start, 60) for start in starts]
    choices = [" " + words(start + 60, 8) for start in starts]
    settings = {"until": ["\n\n"], "max_gen_toks": 24}
    return {
        "choices": (
            "loglikelihood",
            [
                (context, choices[(number + other) % QUESTIONS])
                for number, context in enumerate(contexts)
                for other in range(CHOICES)
            ],
        ),
        "last words": ("loglikelihood", list(zip(contexts, choices, strict=True))),
        "whole texts": ("loglikelihood_rolling", [(words(0, 700),)]),
        "generated": ("generate_until", [(context, settings) for context in contexts]),
    }


model, _, batch_size = sys.argv[1].partition(" ")
folder = sys.argv[2]
lm: Any
if model == "compat":
    lm = CompatLM(folder, batch_size=batch_size)
else:
    transformers.utils.logging.disable_progress_bar()
    lm = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=int(batch_size))
lm.loglikelihood([Instance("loglikelihood", {}, ("To be,", " or not"), 0)], disable_tqdm=True)
seconds, results = {}, {}
for kind, (method, arguments) in requests().items():
    instances = [Instance(method, {}, args, number) for number, args in enumerate(arguments)]  # type: ignore[arg-type]
    start = time.perf_counter()
    results[kind] = getattr(lm, method)(instances, disable_tqdm=True)
    seconds[kind] = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "results": results, "threads": torch.get_num_threads()}))
