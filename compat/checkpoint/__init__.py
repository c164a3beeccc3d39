"""Where bytes live: finding, reading and checking Hugging Face GPT-2 checkpoints."""

from compat.checkpoint.source import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
