"""Memory bandwidth of a device, of the CPU with all threads: one_bandwidth.py DEVICE → JSON."""

import json
import mmap
import sys
import time

import torch

SIZE = 1 << 31  # beyond what caches hold
PASSES = 5


def bandwidth(device: str) -> float:
    """Measure bytes per second of the fastest pass over a buffer, in large pages if any."""
    if device == "cuda":
        buffer = torch.ones(SIZE // 4, device=device)
    else:
        memory = mmap.mmap(-1, SIZE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    times = []
    for read in (lambda: buffer.sum(), lambda: torch.dot(buffer, buffer)):
        for _ in range(PASSES):
            start = time.perf_counter()
            read().item()  # which waits for the device
            times.append(time.perf_counter() - start)
    return SIZE / min(times)


if __name__ == "__main__":
    print(json.dumps({"bandwidth": bandwidth(sys.argv[1])}))
