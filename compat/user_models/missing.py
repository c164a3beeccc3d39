"""Libraries that a user's files import and that are not installed, such as those for logging.

The model may not need them. Their names can be imported and used in annotations. While files are
loaded, they can be called outside of functions, as in `config = load("config.yaml")`; such a call
returns an `Unknown`. As decorators they return the decorated object. A call whose result is not
used, such as `logger.info(…)`, does nothing in code that imports the library. One that makes an
attribute for training, as in `self.loss = Loss()`, returns an `Unknown`, and one that makes a
tokenizer a stand-in. A class that derives from them alone is a name like them; one that derives
from `nn.Module` too lacks only what they add. Any other use raises the import error.

A module of an installed library counts as missing too if it cannot be imported without another
library, such as `torch.utils.tensorboard`, and so does a name that the installed version lacks.

Lightning's module, the functions of flash-attn and fairscale's parallel layers have stand-ins that
compute the same in one process.
"""

from __future__ import annotations

import contextlib
import dis
import importlib.machinery
import importlib.metadata
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec, module_from_spec
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compat.config import GPT2Config
from compat.errors import AdaptError
from compat.user_code import is_users
from compat.user_models.synonyms import SIZES, role_of, value_of

Loaded = TypeVar("Loaded")

# Names of what a model has for its training only.
FOR_TRAINING = re.compile("(?i)loss|criterion|metric|accuracy|perplexity|logger")
TOKENIZER = re.compile("(?i)tokeni[sz]er|vocab|sentencepiece")


def despite_missing_libraries(load: Callable[[], Loaded]) -> Loaded:
    """Load code, with placeholders for the libraries that are missing.

    Raises:
        ModuleNotFoundError: the code cannot be loaded without a missing library.
    """
    finder, first = _Finder(), None
    sys.meta_path.append(finder)
    try:
        while True:
            try:
                with _while_loading():
                    return load()
            except Exception as error:
                name, cause = "", error
                if isinstance(error, AdaptError) and isinstance(error.__cause__, Exception):
                    cause = error.__cause__
                if isinstance(cause, ModuleNotFoundError) and not isinstance(cause, _UsedError):
                    parts = (cause.name or "").split(".")
                    names = (".".join(parts[: i + 1]) for i in range(len(parts)))
                    name = next((n for n in names if n not in sys.modules), "")
                elif isinstance(cause, ImportError):
                    if finder.add_name(cause):
                        first = first or error
                        continue
                    name = _missing_submodule(cause)
                replaced = _folder_of_data(cause)
                if not replaced and finder.names and (not name or name in finder.names):
                    name = replaced = _failed_module(cause)
                if replaced and replaced not in finder.names:  # other finders would find it
                    name, sys.modules[replaced] = replaced, module_from_spec(finder.spec(replaced))
                if not name or name in finder.names:
                    if first is None or isinstance(cause, _UsedError):
                        raise
                    raise first from None
                first = first or error
                finder.names.add(name)
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n, m in sys.modules.items() if isinstance(m, _MissingModule)]:
            if finder.covers(name):
                del sys.modules[name]
        finder.remove_names()
        if finder.names:
            _forget_installed()


def _forget_installed() -> None:
    """Let transformers search again for the libraries that it can use, of which it keeps a list."""
    for function in vars(sys.modules.get("transformers.utils.import_utils", object)).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def _while_loading() -> Iterator[None]:
    """Let names of missing libraries be called in the body.

    The user's code can read the version of a package that is not installed, as of its own.
    """
    installed = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return installed(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if is_users(sys._getframe(1).f_code.co_filename):
                return "0"
            raise

    _loading.append(True)
    try:
        with patch.object(importlib.metadata, "version", version):
            yield
    finally:
        _loading.pop()


def _folder_of_data(error: BaseException) -> str:
    """Return the name of a library in whose place a folder without code was imported, or "".

    An example is the folder `wandb`, to which that library writes.
    """
    found = re.match(r"module '(\w+)' has no attribute", str(error))
    module = sys.modules.get(found[1]) if found and isinstance(error, AttributeError) else None
    if module is None or getattr(module, "__file__", None) or not hasattr(module, "__path__"):
        return ""
    has_code = any(True for folder in module.__path__ for _ in Path(folder).glob("*.py"))
    return "" if has_code else module.__name__


def _missing_submodule(error: ImportError) -> str:
    """Return `package.name` if `from package import name` found no such module."""
    name, package = _missing_name(error), sys.modules.get(error.name or "")
    return f"{error.name}.{name}" if name and hasattr(package, "__path__") else ""


def _missing_name(error: ImportError) -> str:
    """Return the name that `from module import name` did not find, or ""."""
    name = re.match(r"cannot import name '(\w+)' from", str(error))
    return name[1] if name else ""


def _failed_module(error: BaseException) -> str:
    """Return the library's module that the user's code imports and that raised the error, or ""."""
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            module = ""
        elif not module and frame.f_code.co_name == "<module>":
            module = str(frame.f_globals.get("__name__", ""))
    return module


def is_missing(value: object) -> bool:
    """Return whether a value is a name of a missing library."""
    return isinstance(value, _Missing)


def is_installed(library: str) -> bool:
    """Return whether a library can be imported, and is not only replaced by a placeholder."""
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(library)
        return spec is not None and not isinstance(spec.loader, _Finder)
    return False


_loading: list[bool] = []
_configs: list[GPT2Config] = []
_tokenizers: list[object] = []


@contextlib.contextmanager
def known_sizes(config: GPT2Config, tokenizer: object) -> Iterator[None]:
    """Run the body with the checkpoint's values for sizes that are read off an `Unknown`.

    Args:
        config: That of the checkpoint.
        tokenizer: A stand-in for that of a missing library.
    """
    _configs.append(config)
    _tokenizers.append(tokenizer)
    try:
        yield
    finally:
        _configs.pop()
        _tokenizers.pop()


class Unknown:
    """A value that could not be computed while a file was loaded, as from data that is missing.

    What is read off it is unknown too, and what it returns while files are loaded. In the body of
    `known_sizes`, `tokenizer.vocab_size`, `args.dropout` and `len(tokenizer)` are the checkpoint's.
    A call whose result is not used, such as `run.log(loss)`, does nothing. Any other use raises the
    exception that was raised when it was computed.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def error(self) -> BaseException:
        """Return the exception that was raised when the value was computed."""
        return self._error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in STAND_INS:  # as of get_kernel("flash-attn3")
            return STAND_INS[name]
        role = role_of(name) if _configs else None
        if role is None:
            return Unknown(self._error)
        value = value_of(role, _configs[-1])
        return CallableSize(value) if role in SIZES else value

    def __getitem__(self, key: object) -> Any:
        return self.__getattr__(key) if isinstance(key, str) else Unknown(self._error)

    def __len__(self) -> int:
        if not _configs:
            raise self._error
        return _configs[-1].vocab_size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _loading:
            if _is_discarded(sys._getframe(1)):
                return None
            raise self._error
        return args[0] if _decorates(sys._getframe(1), args, kwargs) else Unknown(self._error)


class CallableSize(int):
    """A size of the checkpoint that may be called, as in `tokenizer.get_vocab_size()`."""

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        return int(self)


def _decorates(caller: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call decorates a function or class, or a library makes it in order to."""
    one = len(args) == 1 and not kwargs and callable(args[0]) and not is_missing(args[0])
    library = not is_users(caller.f_code.co_filename)
    return one and (library or _line(caller).startswith("@"))


def _moved(module: ModuleType, name: str) -> type | None:
    """Return the class of this name in another module of the same library, if one is loaded.

    An example is Conv1D, which `transformers.modeling_utils` had before version 5.
    """
    library = module.__name__.partition(".")[0]
    others = (other for key, other in sys.modules.items() if key.startswith(f"{library}."))
    found = (vars(other).get(name) for other in [*others] if isinstance(other, ModuleType))
    return next((each for each in found if isinstance(each, type)), None)


class _Finder:
    """Finds the missing libraries."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.added: list[tuple[ModuleType, str]] = []  # names in modules of installed libraries

    def add_name(self, error: ImportError) -> bool:
        """Add the name that an installed module lacks, as in another version than the user's."""
        name, module = _missing_name(error), sys.modules.get(error.name or "")
        file = getattr(module, "__file__", None)
        if not name or module is None or file is None or is_users(file):
            return False
        if hasattr(module, name) or module.__name__.partition(".")[0] == "compat":
            return False
        missing = _Missing(name, (), {"library": f"{error.name}.{name}"})
        setattr(module, name, _moved(module, name) or missing)
        self.added.append((module, name))
        return True

    def remove_names(self) -> None:
        for module, name in self.added:
            delattr(module, name)

    def covers(self, name: str) -> bool:
        """Return whether a module is missing: one of the names, or in such a package."""
        return any(f"{name}.".startswith(f"{missing}.") for missing in self.names)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return self.spec(name) if self.covers(name) else None

    def spec(self, name: str) -> importlib.machinery.ModuleSpec:
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


_GETS_ENTRY = re.compile("get_(setting|value|param(eter)?|option|entry|item|key)")


class ReadableDict(dict[str, Any]):
    """A dictionary whose entries are attributes as well, and with `to_dict` as in transformers.

    Methods such as `get_setting("model.n_layer")` return the entry with the last of the names.
    """

    def to_dict(self) -> dict[str, Any]:
        return dict(self)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if _GETS_ENTRY.fullmatch(name):
            return lambda key, *default: getattr(self, key.rpartition(".")[2], *default)
        raise AttributeError(f"the config has no {name!r}", name=name, obj=self)


class LightningModule(nn.Module):
    """What a model needs of Lightning's class, where Lightning is missing; the rest is training."""

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def save_hyperparameters(self, *args: Any, **kwargs: Any) -> None:
        """Keep the arguments of the constructor that calls it as `self.hparams`."""
        frame = sys._getframe(1)
        code, values = frame.f_code, dict(frame.f_locals)
        count = code.co_argcount + code.co_kwonlyargcount
        self.hparams = ReadableDict({n: values[n] for n in code.co_varnames[1:count]})
        if code.co_flags & inspect.CO_VARKEYWORDS:
            starred = bool(code.co_flags & inspect.CO_VARARGS)
            self.hparams.update(values[code.co_varnames[count + starred]])

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **kwargs: Any,
) -> Tensor:
    """Compute in torch what flash-attn computes on a GPU: attention of q, k and v (B, T, H, D).

    The last query and the last key have the same position. A token attends to up to `window_size`
    tokens before and after it, or to all if that is −1.

    Raises:
        ModuleNotFoundError: softcapping, ALiBi or the probabilities are requested.
    """
    more = kwargs.get("softcap") or kwargs.get("return_attn_probs")
    if more or kwargs.get("alibi_slopes") is not None:
        raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")
    T, S = q.shape[1], k.shape[1]
    before, after = window_size[0], 0 if causal else window_size[1]
    mask = None
    if before >= 0 or after >= 0:
        distance = torch.arange(S) - torch.arange(S - T, S)[:, None]  # (T, S)
        mask = (distance <= after) if after >= 0 else torch.ones(T, S, dtype=torch.bool)
        mask = mask & (distance >= -before) if before >= 0 else mask
    is_causal = causal and before < 0 and T == S
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    context = F.scaled_dot_product_attention(
        q, k, v, None if is_causal else mask, dropout_p, is_causal, scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return context.transpose(1, 2)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the same for q, k and v in one tensor (B, T, 3, H, D)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


class ParallelLinear(nn.Linear):
    """What fairscale's parallel projections compute in one process."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, bias)


class ParallelEmbedding(nn.Embedding):
    """What fairscale's parallel embedding computes in one process."""

    def __init__(self, num_embeddings: int, embedding_dim: int, **kwargs: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, kwargs.get("padding_idx"))


def get_model_parallel_world_size() -> int:
    """Return the number of processes."""
    return 1


STAND_INS: dict[str, Any] = {
    "ColumnParallelLinear": ParallelLinear,
    "RowParallelLinear": ParallelLinear,
    "ParallelEmbedding": ParallelEmbedding,
    "VocabParallelEmbedding": ParallelEmbedding,
    "get_model_parallel_world_size": get_model_parallel_world_size,
    "LightningModule": LightningModule,
    "flash_attn_func": flash_attn_func,
    "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
}


class _MissingModule(ModuleType):
    @property
    def library(self) -> str:
        """The package to install; of an installed package or the user's own, the module."""
        package = self.__name__.partition(".")[0]
        is_missing = isinstance(sys.modules.get(package, self), _MissingModule)
        return package if is_missing else self.__name__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in STAND_INS:
            return STAND_INS[name]
        return _Missing(name, (), {"library": self.library})


class _UsedError(ModuleNotFoundError):
    """A missing library was used."""


_UsedError.__name__ = ModuleNotFoundError.__name__  # in messages


class _Missing(type):
    """The type of a name in a missing library: a class, so that it can be an annotation."""

    library: str
    line: TracebackType | None = None  # that derives a class from it

    def __new__(
        cls, name: str, bases: tuple[type, ...], entries: dict[str, Any], **options: Any
    ) -> _Missing:
        missing = [base for base in bases if isinstance(base, _Missing)]
        if kept := tuple(base for base in bases if base not in missing):  # beside nn.Module
            return cast(_Missing, type(kept[0])(name, kept, entries))
        if missing:
            frame = sys._getframe(1)
            line = TracebackType(None, frame, frame.f_lasti, frame.f_lineno)
            entries = {**entries, "library": missing[0].library, "line": line}
        return super().__new__(cls, name, (), entries)

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {"library": cls.library})

    def __getitem__(cls, item: object) -> type:
        return cls  # Dataset[int]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if re.fullmatch(r"is_\w+_available", cls.__name__):
            return False
        if _loading and _decorates(caller, args, kwargs):
            return args[0]
        config, module = kwargs.get("config"), sys.modules.get(cls.library)
        # After wandb.init(config=…), code reads wandb.config.
        if isinstance(config, dict) and module is not None:
            config = vars(module)["config"] = ReadableDict(config)
        if _loading and (caller.f_code.co_name == "<module>" or _line(caller).startswith("@")):
            found = Unknown(cls.error())
            if isinstance(config, dict):
                vars(found)["config"] = config
            return found
        names = [v for v in caller.f_globals.values() if isinstance(v, (_Missing, _MissingModule))]
        imported = any(name.library == cls.library for name in names)
        if imported and _is_discarded(caller):
            return None
        following = _next_operations(caller) if imported else []
        for after in following:  # the second one stores the attribute, after LOAD_FAST self
            named = f"{cls.__name__} {after.argval}"
            if after.opname == "STORE_ATTR" and FOR_TRAINING.search(named):
                return Unknown(cls.error())
            if after.opname in ("STORE_ATTR", "STORE_FAST") and TOKENIZER.search(named):
                if _tokenizers:
                    return _tokenizers[-1]
        raise cls.error()

    def error(cls) -> ModuleNotFoundError:
        error = _UsedError(f"No module named {cls.library!r}", name=cls.library)
        return error.with_traceback(cls.line)


def _line(frame: FrameType) -> str:
    """Return the line that a frame executes."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def _is_discarded(caller: FrameType) -> bool:
    """Return whether the result of the call that a frame executes is not used."""
    following = _next_operations(caller)
    return bool(following) and following[0].opname == "POP_TOP"


def _next_operations(frame: FrameType) -> list[dis.Instruction]:
    """Return the two operations that follow the one that a frame executes."""
    operations = (o for o in dis.get_instructions(frame.f_code) if o.offset > frame.f_lasti)
    return list(islice(operations, 2))


def _use(value: _Missing | Unknown, *args: object, **kwargs: object) -> Any:
    raise value.error()


_BOTH = "iter int float index add radd sub rsub mul rmul truediv floordiv"
_UNKNOWN = "mro_entries bool contains rtruediv rfloordiv mod pow neg eq ne lt le gt ge enter exit"
for _name in ("len", *_BOTH.split()):
    setattr(_Missing, f"__{_name}__", _use)
for _name in (*_BOTH.split(), *_UNKNOWN.split()):
    setattr(Unknown, f"__{_name}__", _use)
