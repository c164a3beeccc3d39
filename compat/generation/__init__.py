"""Generation of token ids and of text."""

from compat.generation.generate import GenerateOptions, generate, stream
from compat.generation.sampling import Sampling, SamplingOptions
from compat.generation.text import Completion, TextStream, generate_text, stream_text

__all__ = [
    "Completion",
    "GenerateOptions",
    "Sampling",
    "SamplingOptions",
    "TextStream",
    "generate",
    "generate_text",
    "stream",
    "stream_text",
]
