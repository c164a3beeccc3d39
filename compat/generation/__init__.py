"""Text from a GPT-2."""

from compat.generation.generate import generate, left_pad, stream

__all__ = ["generate", "left_pad", "stream"]
