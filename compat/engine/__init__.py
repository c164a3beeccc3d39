"""GPT-2 run fast: packed weights, a static cache, the machine's best kernels, drafts checked."""

from compat.engine.engine import Engine

__all__ = ["Engine"]
