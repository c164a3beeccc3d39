"""Text from a GPT-2."""

from compat.generation.decoding import Decoder, HasDecoder, PlainDecoder, decoder_of, left_pad
from compat.generation.generate import generate, stream
from compat.generation.sampling import Sampling
from compat.generation.text import TextStream, generate_text, stream_text
from compat.generation.writing import Completion

__all__ = [
    "Completion",
    "Decoder",
    "HasDecoder",
    "PlainDecoder",
    "Sampling",
    "TextStream",
    "decoder_of",
    "generate",
    "generate_text",
    "left_pad",
    "stream",
    "stream_text",
]
