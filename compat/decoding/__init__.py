"""Decoding: logits by prefill and decode steps, from a model's own modules or by a fast path."""

from compat.decoding.decoder import Choose, Decoder, HasDecoder, PreviewSampling, left_pad
from compat.decoding.fast_path import decoder_of
from compat.decoding.not_finite import NotFiniteError
from compat.decoding.plain import PlainBlocks, PlainDecoder

__all__ = [
    "Choose",
    "Decoder",
    "HasDecoder",
    "NotFiniteError",
    "PlainBlocks",
    "PlainDecoder",
    "PreviewSampling",
    "decoder_of",
    "left_pad",
]
