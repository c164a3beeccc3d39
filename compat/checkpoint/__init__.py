"""Finding, reading and checking GPT-2 checkpoints of Hugging Face, nanoGPT and minGPT."""

from compat.checkpoint.source import Checkpoint, Source, open_checkpoint

__all__ = ["Checkpoint", "Source", "open_checkpoint"]
