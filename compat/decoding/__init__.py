"""Logits, one id after another: by the readable blocks, or as fast as the machine can."""

from compat.decoding.decoder import Choose, Decoder, HasDecoder, Rehearse, left_pad
from compat.decoding.not_finite import NotFiniteError
from compat.decoding.of_model import decoder_of
from compat.decoding.plain import PlainBlocks, PlainDecoder

__all__ = [
    "Choose",
    "Decoder",
    "HasDecoder",
    "NotFiniteError",
    "PlainBlocks",
    "PlainDecoder",
    "Rehearse",
    "decoder_of",
    "left_pad",
]
