"""Text from a GPT-2."""

from compat.generation.generate import generate, stream
from compat.generation.sampling import Sampling
from compat.generation.text import TextStream, generate_text, stream_text
from compat.generation.writing import Completion

__all__ = [
    "Completion",
    "Sampling",
    "TextStream",
    "generate",
    "generate_text",
    "stream",
    "stream_text",
]
