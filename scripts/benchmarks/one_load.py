"""One load in a process of its own: one_load.py LOADER FOLDER → seconds and memory as JSON.

Only what the loader needs is imported, since the time of the whole process counts too.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

loader, folder = sys.argv[1:3]
load: Any
if loader == "transformers":
    import transformers

    transformers.utils.logging.disable_progress_bar()
    load = transformers.GPT2LMHeadModel.from_pretrained
else:
    from functools import partial

    from compat import load_pretrained

    dialect, _, copied = loader.partition(" ")
    load = partial(load_pretrained, dialect=dialect, mmap=not copied)

import torch  # noqa: E402 (after what the loader needs)


def memory(field: str) -> int:
    """Return a field of this process's status, in bytes; only Linux has it."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith(field + ":"))


imported = memory("VmRSS")
start = time.perf_counter()
model = load(folder)
call = time.perf_counter() - start
peak = memory("VmHWM") - imported
with torch.no_grad():
    model(torch.arange(8)[None])
logits = time.perf_counter() - start
print(json.dumps({"call": call, "logits": logits, "peak": peak}))
