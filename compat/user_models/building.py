"""Call a user's constructor, and then its model, with limits on what they may do."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from compat.config import GPT2Config
from compat.user_models.eval_mode import ModelState, eval_mode
from compat.user_models.target import finding_modules
from compat.user_models.usage import is_users_class, users_folders, users_globals
from compat.user_models.vocabulary_argument import Vocabulary

# What loads a tokenizer: the module, the class or "", and the function.
TOKENIZERS = (
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "from_pretrained"),
    ("transformers.models.auto.tokenization_auto", "AutoTokenizer", "from_pretrained"),
    ("tiktoken", "", "get_encoding"),
    ("tiktoken", "", "encoding_for_model"),
)


def constructed(
    target: Callable[..., nn.Module], arguments: Mapping[str, Any], config: GPT2Config
) -> nn.Module:
    """Return what the target returns, also if it has a list of tied weights, as in transformers 4.

    Version 5 expects a dictionary in its place. The head is tied as version 4 tied it. In place of
    a tokenizer that cannot be downloaded, or that the user's own class cannot load, the target gets
    one of the checkpoint's size. Imports in its code find the modules of its project.

    Raises:
        MemoryError: the tensors are far larger than those of a model with the sizes of `config`.
    """
    values = [value for _, value in users_globals(target)]
    lists = {
        value for value in values
        if is_users_class(value) and isinstance(vars(value).get("_tied_weights_keys"), list)
    }  # fmt: skip
    tokenizers = {
        value for value in values
        if is_users_class(value) and re.search("Token|Vocab", value.__name__)
        and "__init__" in vars(value) and not issubclass(value, nn.Module)
    }  # fmt: skip
    with contextlib.ExitStack() as undo, _NewTensors(config), _tokenizers(config):
        for cls in tokenizers:
            undo.enter_context(patch.object(cls, "__init__", _loaded_or_stand_in(cls, config)))
        undo.enter_context(finding_modules(users_folders(target)))
        undo.enter_context(patch.object(os, "_exit", sys.exit))  # which ends without a message
        for cls in lists:
            undo.enter_context(patch.object(cls, "_tied_weights_keys", {}))
        base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        if base is not None:
            # Version 5 sets it in `post_init`, which constructors for version 4 need not call.
            undo.enter_context(patch.object(base, "all_tied_weights_keys", {}, create=True))
        model: Any = target(**arguments)
        for module in getattr(model, "modules", list)() if base is not None else ():
            if isinstance(module, base) and not hasattr(module, "get_head_mask"):
                module.get_head_mask = _get_head_mask
    if type(model) in lists and getattr(model.config, "tie_word_embeddings", False):
        with contextlib.suppress(AttributeError, NotImplementedError):
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return cast(nn.Module, model)


def _get_head_mask(head_mask: Any, num_hidden_layers: int, *args: Any) -> Any:
    """Return the mask of the heads in each layer, as models of transformers 4 do."""
    return [None] * num_hidden_layers if head_mask is None else head_mask


@contextlib.contextmanager
def _tokenizers(config: GPT2Config) -> Iterator[None]:
    """Let what loads a tokenizer return a stand-in where the tokenizer cannot be downloaded.

    Some classes of transformers return an empty tokenizer then.
    """

    def loading(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*args: Any, **kwargs: Any) -> Any:
            try:
                tokenizer = load(*args, **kwargs)
            except OSError:
                return Vocabulary(config)
            return Vocabulary(config) if getattr(tokenizer, "vocab_size", 1) == 0 else tokenizer

        return loaded

    with contextlib.ExitStack() as undo:
        for name, owner, attribute in TOKENIZERS:
            module = sys.modules.get(name)
            place = getattr(module, owner, None) if owner else module
            if isinstance(present := vars(place).get(attribute) if place else None, classmethod):
                replaced: Any = classmethod(loading(present.__func__))
            elif present is not None:
                replaced = loading(present)
            else:
                continue
            undo.enter_context(patch.object(place, attribute, replaced))
        yield


def _loaded_or_stand_in(cls: type, config: GPT2Config) -> Callable[..., None]:
    """Return a constructor that makes a stand-in of what the class's own cannot load."""
    original = vars(cls)["__init__"]

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            try:
                vars(self).clear()
                self.__class__ = Vocabulary
            except TypeError:  # of a class with slots, or of a dictionary
                raise error from None
            Vocabulary.__init__(self, config)

    return initialize


class _NewTensors(TorchFunctionMode):
    """Fills `torch.empty(C)` with ones, and limits the size of all new tensors together.

    Authors that load weights of their own leave parameters uninitialized, as in `self.weight =
    nn.Parameter(torch.empty(C))` of a norm. A parameter that no checkpoint fills would make every
    run different, or its logits NaN. An author's own sizes, such as 32 layers of width 4096, or a
    mask for 65,536 positions, may need more memory than there is, so that the system would end the
    process without a message.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        weights = 12 * config.n_layer * config.n_embd**2 + config.vocab_size * config.n_embd
        self.limit = 4 * weights + 2**29  # elements; the constant allows sizes fixed in the code
        self.elements = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _FACTORIES:  # others are called by the million, as by a loop over elements
            return func(*args, **(kwargs or {}))
        self._count(func, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        if func is torch.empty and found.dim() == 1 and found.is_floating_point():
            found.fill_(1.0)
        return found

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise a MemoryError if a new tensor would exceed the limit, before it is created."""
        meta = torch.device("meta")
        if meta in (torch.get_default_device(), torch.device(kwargs.get("device") or "cpu")):
            return
        with contextlib.suppress(Exception):  # the call itself raises it with the user's line
            size = {name: each for name, each in kwargs.items() if name != "generator"}
            self.elements += func(*args, **{**size, "device": meta}).numel()
        if self.elements > self.limit:
            raise MemoryError(f"its tensors have more than {self.limit:,} elements")


_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})


def runs(model: nn.Module, config: GPT2Config) -> bool:
    """Return whether a model can be called with ids."""
    with contextlib.suppress(Exception, SystemExit):
        called(model, config)
        return True
    return False


def called(model: nn.Module, config: GPT2Config) -> Any:
    """Call a model on a few ids or, if that fails, on a full context or a single sequence.

    None if it needs more than ids.
    """
    if _needs_more_than_ids(model):
        return None
    full, state = torch.arange(config.n_positions)[None] % config.vocab_size, ModelState(model)
    with eval_mode(model):
        try:
            return model(full[:, :6])
        except Exception:
            for ids in (full, full[0, :6]):
                state.restore(model)
                with contextlib.suppress(Exception):
                    return model(ids)
            raise
        finally:
            state.restore(model)


def _needs_more_than_ids(model: nn.Module) -> bool:
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
