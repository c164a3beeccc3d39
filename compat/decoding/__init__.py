"""Decoding: logits from prefill and decode steps, by a model's own `forward` or a fast path."""

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
