"""Saving a model as Hugging Face's files, in a folder that is replaced as a whole."""

from compat.saving.save import save_pretrained

__all__ = ["save_pretrained"]
