"""Writing back: a model as Hugging Face's files, in a folder that is replaced whole."""

from compat.saving.save import has_tokenizer, save_pretrained

__all__ = ["has_tokenizer", "save_pretrained"]
