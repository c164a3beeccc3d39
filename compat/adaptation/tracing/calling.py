"""Checks of a user's model, and how it is called to get logits from ids."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice, product
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from compat.errors import AdaptError, listed
from compat.parity.outputs import find_logits, other_shape
from compat.user_code import exception_report, is_users, users_frames
from compat.user_models.eval_mode import eval_mode
from compat.user_models.missing import ReadableDict
from compat.user_models.synonyms import neutral, plain
from compat.user_models.usage import is_users_class, modules_text, source_of, user_modules

Forward = Callable[[nn.Module, Tensor], Tensor]
Convert = Callable[[Tensor], Tensor]
Batch = Callable[[Tensor], Any]
Value = Callable[[nn.Module, Tensor], Any]  # an argument, from the model and the ids (B, T)

# The conventions for a mask (T, T): no mask; True where a query sees a key; True where the key is
# hidden; 1 where it is seen, for code that computes `1 - mask`; and −∞ where it is hidden, for
# code that adds the mask to the scores.
MASKS: dict[str, Callable[[int], Tensor | None]] = {
    "None": lambda T: None,
    "torch.ones(T, T, dtype=torch.bool).tril()": lambda T: torch.ones(T, T).tril().bool(),
    "torch.ones(T, T, dtype=torch.bool).triu(1)": lambda T: torch.ones(T, T).triu(1).bool(),
    "torch.ones(T, T).tril()": lambda T: torch.ones(T, T).tril(),
    'torch.full((T, T), float("-inf")).triu(1)': lambda T: torch.full((T, T), -torch.inf).triu(1),
}
TARGETS = ("targets", "target", "labels", "label", "y")
# Names of methods that may compute what `forward` computes, or a part of it.
FORWARD_PARTS = re.compile(r"encode|decode|embed|project|head|logits|hidden|backbone|generator")
LOGITS = re.compile(r"^(get_|lm_|compute_)?logits$")  # names of methods that return logits
HEADS = re.compile(
    r"^(project|unembed|generator?|lm_head|(to_)?logits|hidden_states?_to_token)|_head$|_logits$"
)
# Names of methods that make the masks and KV caches of a model, such as `setup_caches`, names of
# these caches, and the number to whose multiple such methods round the length of the masks up.
SETUP = re.compile(r"^(setup|set_up|init|initialize|allocate|build|create|make)_\w*(cache|mask)")
KV_CACHE = re.compile(r"^(past|(kv|[kv])_?cache|cache(_?[kv])?)s?$")
MASK_MULTIPLE = 8
MOST_SECONDS = 30  # of processor time, for the calls of a model that fail
MOST_COMBINATIONS = 24  # combinations of values for the arguments that a model needs


def check_model(model: object) -> None:
    """Accept only a module whose parameters are floating-point numbers on the CPU.

    Nothing is run or written.

    Raises:
        AdaptError: the message says what was passed, and what to pass instead.
    """
    if not isinstance(model, nn.Module):
        raise AdaptError(f"adapt() expects an nn.Module, but got {_described(model)}")
    name, parameters = type(model).__name__, dict(model.named_parameters())
    if any(isinstance(p, nn.UninitializedParameter) for p in parameters.values()):
        raise AdaptError(
            f"{name} has lazy modules, whose parameters have no shape yet. "
            "Call the model once on ids before you pass it to adapt()."
        )
    if not parameters:
        raise AdaptError(
            f"{name} has no parameters to load a checkpoint into. "
            "Keep weights in nn.Parameter, and lists of modules in nn.ModuleList."
        )
    others = {str(p.dtype) for p in parameters.values() if not p.is_floating_point()}
    if others:
        raise AdaptError(
            f"{name} has parameters of type {listed(sorted(others))}, but adapt() expected "
            "floating-point numbers. Load the model without quantization."
        )
    devices = {parameter.device for parameter in parameters.values()} - {torch.device("cpu")}
    if devices:
        raise AdaptError(
            f"{name} has parameters on {listed(sorted(map(str, devices)))}, but adapt() expected "
            "all of them on the CPU. Move the model with model.cpu(), or build it on the CPU."
        )


def _described(value: object) -> str:
    """Return what was passed instead of a module, and what to do."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        return f"the class {value.__name__}. Pass an instance, for example {value.__name__}()."
    if isinstance(value, Mapping):
        return (
            f"a {type(value).__name__} of {len(value)} entries. "
            "Load it into its model with load_state_dict, and pass the model."
        )
    if callable(value):
        named = getattr(value, "__name__", type(value).__name__)
        return f"the function {named}. Pass the nn.Module that holds its weights."
    return f"a value of type {type(value).__name__}. Pass an instance of your model."


class _FusedKernels:
    """torch's switch for the fused kernels of nn.MultiheadAttention, global to the process.

    It is off while any thread needs it off. A thread that needs it does not wait for others: it
    may itself be called, and waited for, by one of them.
    """

    def __init__(self) -> None:
        self.lock, self.uses, self.enabled = threading.Lock(), 0, True

    @contextmanager
    def disabled(self) -> Iterator[None]:
        with self.lock:
            if not self.uses:
                self.enabled = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.uses += 1
        try:
            yield
        finally:
            with self.lock:
                self.uses -= 1
                if not self.uses:
                    torch.backends.mha.set_fastpath_enabled(self.enabled)


_FUSED_KERNELS = _FusedKernels()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Disable gradients, and the fused kernels of nn.MultiheadAttention in eval mode."""
    with _FUSED_KERNELS.disabled(), torch.no_grad():
        yield


def describe_error(error: Exception) -> str:
    """Return the type and first line of an exception, and the user's line that raised it."""
    lines = [f"{f.filename}:{f.lineno} {f.line}" for f in users_frames(error)]
    named = re.findall(r'File "(.+?)", line (\d+), in \w+\n\s*(.+)', str(error))
    lines += [f"{file}:{line} {text}" for file, line, text in named if is_users(file)]
    headline = "".join(f": {line}" for line in str(error).strip().splitlines()[:1])
    where = f" at {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{headline}{where}"


@dataclass(frozen=True)
class Wrapped:
    """A call of a model that changes what another call of it computes.

    Args:
        call: the other call.
    """

    call: Forward


@dataclass(frozen=True)
class CallSignature:
    """One signature to call a model with: `signature(model, ids)` returns logits (B, T, V).

    Args:
        arguments: the names of the arguments besides the ids, and functions that make their values.
        last: accept logits (B, 1, V) of the last position alone.
        targets: pass the ids as targets too, because the model returns only the last position
            otherwise.
        batch: puts the ids into what is passed instead, such as a dictionary or a pair.
        rows: how many sequences are passed at once: any number, exactly so many, or with 0 a single
            sequence without the axis of the batch.
        convert: converts the ids (B, T) to what is passed: another data type, or one-hot vectors
            (B, T, V).
        mask: the argument among them that is optional, but without which tokens attend to later
            ones.
        time_first: the model takes ids (T, B) and returns logits (T, B, V).
        of_loss: the model returns the loss and no logits, which are what it computes the loss from.
        setup: the name of a method that makes the masks of the call, without which it fails.
        prefix: how many positions the model puts before those of the ids, as for a condition.
    """

    arguments: tuple[tuple[str, Value], ...] = ()
    last: bool = False
    targets: bool = False
    batch: Batch | None = None
    rows: int | None = None
    convert: Convert | None = None
    mask: str = ""
    time_first: bool = False
    of_loss: bool = False
    setup: str = ""
    prefix: int = 0

    @property
    def input_shape(self) -> str:
        """The shape of the ids that the model takes, if it is not (B, T)."""
        alone = self.rows == 0 or self.convert is only_row
        return "(T, B)" if self.time_first else "(T,)" if alone else ""

    def without_targets(self) -> CallSignature:
        """Return the call without targets, which returns the logits of the last position."""
        arguments = tuple(pair for pair in self.arguments if pair[0] not in TARGETS)
        return replace(self, arguments=arguments, targets=False, last=True)

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        if not ids.is_contiguous():  # code calls ids.view(-1)
            ids = ids.contiguous()
        if self.setup:
            return self._after_setup(model, ids)
        if self.rows in (None, len(ids)):
            return self._logits(model, ids)
        if self.rows == 0:
            with sdpa_kernel(SDPBackend.MATH):  # vmap does not batch the other kernels
                return torch.vmap(partial(self._logits, model), randomness="different")(ids)
        padded = torch.cat([ids, ids[-1:].expand(-len(ids) % self.rows, -1)])
        batches = padded.view(-1, self.rows, ids.shape[1])
        return torch.cat([self._logits(model, batch) for batch in batches])[: len(ids)]

    def _after_setup(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Return the logits of ids, padded at the end to a length that the masks can have."""
        T = ids.shape[1]
        more = -T % MASK_MULTIPLE
        padded = torch.cat([ids, ids[:, -1:].expand(-1, more)], 1) if more else ids
        with _set_up(model, self.setup, padded):
            logits = replace(self, setup="")(model, padded)
        return logits[:, :T] if more else logits

    def output_shape(self, model: nn.Module, ids: Tensor) -> str:
        """Return the shape of the logits for ids (B, T), if it is not (B, T, V)."""
        if self.rows is not None or self.time_first or self.setup or self.convert is one_more:
            return ""
        with eval_mode(model), plain_kernels():
            output = self._output(model, ids)
        return other_shape(output, ids)

    def _logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Return the logits for ids (B, T), or (T,) if `rows` is 0."""
        output = self._output(model, ids)
        if ids.ndim == 1:
            return find_logits(output, ids[None], self.last)[0]
        if self.time_first and not self.last:
            return find_logits(output, ids.mT).transpose(0, 1)
        longer = torch.cat([ids[:, :1].expand(-1, self.prefix), ids], dim=1)
        return find_logits(output, longer, self.last)[:, self.prefix :]

    def _output(self, model: nn.Module, ids: Tensor) -> Any:
        """Call the model on ids (B, T), or (T,) if `rows` is 0."""
        convert = self.convert(ids) if self.convert else ids
        rows = ids[None] if ids.ndim == 1 else ids
        arguments = {name: value(model, rows) for name, value in self.arguments}
        if self.time_first:
            convert = convert.mT
        if self.time_first or convert.ndim == 1:  # the other arguments have the axes of the ids
            for name, value in arguments.items():
                if getattr(value, "shape", None) == rows.shape:
                    arguments[name] = value.mT if self.time_first else value[0]
        passed = [self.batch(convert) if self.batch else convert]
        if name := _keyword_of_ids(model):
            arguments[name] = passed.pop()
        if self.of_loss:
            with _inputs_of_losses(ids) as logits:
                model(*passed, **arguments)
            return logits
        return model(*passed, **arguments)


def _parameter_of_ids(model: nn.Module) -> inspect.Parameter | None:
    """Return the parameter of `forward` that takes the ids: the first that is not a device."""
    parameters = inspect.signature(model.forward).parameters.values()
    return next((p for p in parameters if p.name != "device"), None)


def _keyword_of_ids(model: nn.Module) -> str:
    """Return the name of the ids' parameter if it can only be passed by name; otherwise ""."""
    own = _parameter_of_ids(model)
    is_first = own == next(iter(inspect.signature(model.forward).parameters.values()), None)
    return "" if own is None or (is_first and own.kind is not own.KEYWORD_ONLY) else own.name


@contextmanager
def _set_up(model: nn.Module, method: str, ids: Tensor) -> Iterator[None]:
    """Run the body after a method has made masks for these ids, without the KV caches it has made.

    Afterwards, the modules have the attributes that they had before.
    """
    before = [(module, _attributes(module)) for module in model.modules()]
    try:
        make = getattr(model, method)
        make(*(value(model, ids) for value in _setup_values(make)))
        for module, attributes in before:
            _restore(module, attributes, KV_CACHE)
        yield
    finally:
        for module, attributes in before:
            _restore(module, attributes, re.compile(""))


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    """Return a module's attributes, its modules and its buffers, by their names."""
    return [dict(vars(module)), dict(module._modules), dict(module._buffers)]


def _restore(module: nn.Module, before: list[dict[str, Any]], named: re.Pattern[str]) -> None:
    """Give a module the attributes, modules and buffers of these names that it had before."""
    present: list[dict[str, Any]] = [vars(module), module._modules, module._buffers]
    for now, old in zip(present, before, strict=True):
        for name in filter(named.search, [*now]):
            del now[name]
        now.update({name: value for name, value in old.items() if named.search(name)})


def setup_methods(model: nn.Module) -> list[str]:
    """Return the names of the model's own methods that make masks and KV caches for calls."""
    return [name for name in _own_methods(model) if SETUP.search(name)]


def _setup_values(method: Callable[..., Any]) -> list[Value]:
    """Return the values of the required arguments of such a method.

    Raises:
        LookupError: an argument is neither a size of the ids nor a data type or device.
    """
    values: tuple[tuple[str, Value], ...] = (
        ("batch|bsz|^b$", lambda model, ids: len(ids)),
        ("len|seq|pos|ctx|context|^t$", lambda model, ids: ids.shape[1]),
        ("dtype", lambda model, ids: next(iter(model.parameters())).dtype),
        ("device", lambda model, ids: ids.device),
    )
    required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    found = [[v for pattern, v in values if re.search(pattern, p.name.lower())] for p in required]
    if not all(found):
        raise LookupError(f"{method.__name__} needs another argument")
    return [each[0] for each in found]


_LOSS_FUNCTION = threading.RLock()


class _LastResults(TorchFunctionMode):
    """Keeps the last of the results (B, T, C) of each width C, and what log_softmax reads last."""

    def __init__(self, B: int, T: int) -> None:
        super().__init__()
        self.B, self.T, self.by_width = B, T, dict[int, Tensor]()
        self.normalized: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "log_softmax" and args:
            self.normalized = self.before_shift(args[0])
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim == 3:
            if result.shape[:2] == (self.B, self.T):
                self.by_width[result.shape[2]] = result
        return result

    def before_shift(self, logits: Tensor) -> Tensor:
        """Return the logits of all positions, of logits of all but the last.

        Their shape is (B·(T − 1), V), (B, V, T − 1) or (B, T − 1, V).
        """
        V = logits.shape[1] if logits.ndim > 1 else 0
        if logits.shape[:2] == (self.B, self.T - 1):
            V = logits.shape[2]
        shifted = logits.numel() == self.B * (self.T - 1) * V
        return self.by_width.get(V, logits) if shifted else logits


@contextmanager
def _inputs_of_losses(ids: Tensor) -> Iterator[list[Tensor]]:
    """Collect what the body passes to F.cross_entropy, which other threads do not call meanwhile.

    nn.CrossEntropyLoss calls it too. Without such a call, it is what the body passes to log_softmax
    last. Logits without the last position are those of all positions.
    """
    inputs: list[Tensor] = []
    original = F.cross_entropy
    results = _LastResults(*(ids[None] if ids.ndim == 1 else ids).shape)

    def collecting(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inputs.append(results.before_shift(input))
        return original(input, *args, **kwargs)

    with _LOSS_FUNCTION:
        F.cross_entropy = collecting
        try:
            with results:
                yield inputs
        finally:
            F.cross_entropy = original
        if not inputs and results.normalized is not None:
            inputs.append(results.normalized)


def one_more(ids: Tensor) -> Tensor:
    """Return ids with another one at the end, for a model that leaves out the last one."""
    return torch.cat([ids, ids[..., -1:]], dim=-1)


def only_row(ids: Tensor) -> Tensor:
    """Return the only sequence (T,) of ids (1, T)."""
    return ids[0]


def _always(value: Any) -> Value:
    return lambda model, ids: value


def _positions(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])


def _length(model: nn.Module, ids: Tensor) -> Tensor:
    """Return a number as large as any number of tokens may be."""
    return torch.tensor(ids.shape[1])


def _ids(model: nn.Module, ids: Tensor) -> Tensor:
    return ids


def _ones(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.ones_like(ids)


def _all_true(model: nn.Module, ids: Tensor) -> Tensor:
    """Return a mask that marks all tokens, for code that computes `~mask`."""
    return torch.ones_like(ids, dtype=torch.bool)


def _none_marked(model: nn.Module, ids: Tensor) -> Tensor:
    """Return a mask that marks no token, for code whose masks mark padding and not tokens."""
    return torch.zeros_like(ids)


def _zeros(name: str, of_each_token: bool, model: nn.Module, ids: Tensor) -> Tensor:
    """Return a vector of zeros for each sequence or token, as wide as its projection takes.

    Where `forward` does not project it first, it is as wide as the narrowest projection takes.
    """
    reader = re.search(rf"self\.(\w+)\(\s*{name}\b", source_of(model.forward))
    own = getattr(model, reader[1], None) if reader else None
    modules = [own] if isinstance(own, nn.Linear) else model.modules()
    widths = [module.in_features for module in modules if isinstance(module, nn.Linear)]
    return torch.zeros(*ids.shape[: 2 if of_each_token else 1], min(widths, default=1))


def _nothing_for_each_layer(model: nn.Module, ids: Tensor) -> list[None]:
    """Return an empty cache for each module of the longest list."""
    lists = [len(m) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return [None] * max(lists, default=1)


def _initial(name: str, model: nn.Module, ids: Tensor) -> Any:
    """Return what the model's own method makes for a state, as `model.initial_state(B)`."""
    owner = type(model)
    makers = [n for n in dir(owner) if re.search("init|make|create|empty|new", n) and name in n]
    maker = getattr(model, makers[0])
    return maker(*[len(ids)] * len(inspect.signature(maker).parameters))


_nothing, _yes, _no = _always(None), _always(True), _always(False)

# The values to try for an argument, the most likely first, by a pattern of its name.
VALUES: tuple[tuple[str, tuple[Value, ...]], ...] = (
    ("^device$", (_always("cpu"),)),
    ("lengths$|lens$", (lambda model, ids: torch.full((len(ids),), ids.shape[1]),)),
    ("start|offset|past_?len|cur", (_always(0),)),
    ("pos", (_positions, lambda model, ids: _positions(model, ids).expand_as(ids))),
    ("type|segment", (_nothing, lambda model, ids: torch.zeros_like(ids))),
    ("ids$", (_nothing, _ids)),
    ("^use_|^output_|^return_|^(is_)?train", (_no,)),
    ("causal", (_yes,)),
    ("^temp", (_always(1.0),)),
    ("cache|past|kv|mems?$|memory|state", (_nothing, _nothing_for_each_layer)),
    ("mask", (_nothing, _ones, _none_marked, _all_true)),
    ("^n_|^num_|_num_|window", (_length,)),  # a number, of blocks in a window for example
    ("", (_nothing, _ids)),  # as for a decoder beside an encoder
)


def _values(name: str) -> tuple[Value, ...]:
    """Return the values to try for an argument of this name, the most likely first."""
    if name in TARGETS:
        return _ids, _always(None)
    is_neutral, value = neutral(name)
    if is_neutral and "pad" in name:  # a padding id that no token has
        return (_always(value),)
    if _is_mask(name):
        return tuple(_masks().values())
    pattern, values = next(each for each in VALUES if re.search(each[0], name))
    if not pattern:
        return (*values, partial(_zeros, name, False), partial(_zeros, name, True))  # a condition
    return (*values, partial(_initial, name)) if _nothing_for_each_layer in values else values


def _is_mask(name: str) -> bool:
    return "mask" in name and "pad" not in name


def _masks() -> dict[str, Value]:
    """Return the values to try for a mask, by their text; the last is one without padding."""

    def value(make: Callable[[int], Tensor | None], axes: tuple[None, ...]) -> Value:
        """Return a mask (T, T), or one with axes for the batch and the heads before these."""
        return lambda _, ids: None if (mask := make(ids.shape[1])) is None else mask[axes]

    found = {text: value(make, ()) for text, make in MASKS.items()}
    found |= {f"{text}[None]": value(make, (None,)) for text, make in MASKS.items()}
    found |= {f"{text}[None, None]": value(make, (None, None)) for text, make in MASKS.items()}
    return {**found, "True": _yes, "ones": _ones}


class NoLogitsError(AdaptError):
    """A model that returns no logits, however it is called.

    Attributes:
        tried: The calls, each with its error.
    """

    def __init__(self, model: nn.Module, tried: list[str]) -> None:
        super().__init__(
            f"{type(model).__name__} returns no logits, but adapt() expected a float tensor "
            "(B, T, V) for ids (B, T). It was called as follows:\n  "
            + "\n  ".join(dict.fromkeys(tried))
            + "\nPass a function that returns the logits: "
            "adapt(model, source, forward=lambda model, ids: …)"
        )
        self.tried = tried


def find_signature(
    model: nn.Module,
    ids: Tensor,
    form: CallSignature = CallSignature(),
    most_seconds: float = MOST_SECONDS,
) -> CallSignature:
    """Return the first signature that returns logits for these ids, of all positions if possible.

    If none does, or if it returns hidden states, it is one that computes the loss from such logits.

    Of several masks, it is the first with which no token attends to a later one. Optional masks are
    passed only if every token attends to all others without them.

    Args:
        model: the user's model.
        ids: ids (B, T).
        form: in which form the ids are passed: its `rows`, `convert`, `time_first` and `setup`.
        most_seconds: the processor time after which, if a call has failed, no others are made.

    Raises:
        AdaptError: none returned logits, or a library is not installed.
    """
    tried: list[str] = []
    missing: ModuleNotFoundError | None = None
    end = process_time() + most_seconds
    fused = any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())
    usual, optional = _signatures(model, form), _with_optional_arguments(model, form)
    for signatures in (
        *((optional, usual) if form.setup else (usual, optional)),
        [(text, replace(signature, prefix=1)) for text, signature in usual if signature.arguments],
        _signatures(model, replace(form, last=True)),
        [(text, replace(signature, of_loss=True)) for text, signature in usual],
    ):
        found = []
        for text, signature in signatures:
            if tried and process_time() > end:
                break
            try:
                with eval_mode(model), plain_kernels():
                    signature(model, ids)
                if fused:  # their kernels may refuse a mask that the others do not read
                    with eval_mode(model):
                        signature(model, ids)
                found.append(signature)
            except Exception as error:
                if isinstance(error, ModuleNotFoundError):
                    missing = error
                if not (signature.last or signature.of_loss):
                    tried.append(f"{text}: {describe_error(error)}")
        if not found:
            continue
        if _returns_hidden_states(model, found[0], ids):
            return replace(found[0], of_loss=True)
        masked = _with_optional_masks(model, found[0])
        if masked and not _is_bidirectional(model, found[0], ids):
            masked = []  # a mask of the model's own, which may be wrong, is compared
        if len(found) == 1 and not masked:
            return found[0]
        causal = (s for s in [*found, *masked] if _is_causal(model, s, ids))
        return next(causal, found[0])
    if missing is not None:
        headline = f"{type(model).__name__} raises an exception when it runs"
        raise AdaptError(f"{headline}: {exception_report(missing)}") from missing
    raise NoLogitsError(model, tried)


def _returns_hidden_states(model: nn.Module, signature: CallSignature, ids: Tensor) -> bool:
    """Return whether a model returns hidden states, and computes its loss from wider logits."""
    if not any(name in TARGETS for name, _ in signature.arguments):
        return False
    with suppress(Exception), eval_mode(model), plain_kernels():
        returned, logits = (
            replace(signature, of_loss=of_loss)(model, ids).shape[2] for of_loss in (False, True)
        )
        return returned in _embedding_widths(model) and returned != logits
    return False


@dataclass(frozen=True)
class MethodCalls:
    """The call of a model that has no `forward`: one method on the result of the other.

    Args:
        names: the names of the methods, in the order of their calls.
    """

    names: tuple[str, ...]

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        value: Any = ids
        for name in self.names:
            value = getattr(model, name)(value)
        return find_logits(value, ids)

    def __str__(self) -> str:
        return reduce(lambda text, name: f"self.{name}({text})", self.names, "ids")


def method_calls(model: nn.Module, ids: Tensor) -> MethodCalls | None:
    """Return the calls of a model's methods that return logits, if its `forward` does not.

    An example is `model.project(model.decode(ids))` of a model without `forward`. A model whose
    `forward` returns hidden states may have a method `logits`.
    """
    without_forward = type(model).forward is nn.Module.forward
    pattern = FORWARD_PARTS if without_forward else LOGITS
    names = [name for name in _own_methods(model) if pattern.search(name)]
    width = 0 if without_forward or not names else _hidden_width(model, ids)
    if not without_forward and not width:
        return None
    for calls in map(MethodCalls, [*product(names, names), *product(names)]):
        with suppress(Exception), eval_mode(model), plain_kernels():
            if calls(model, ids).shape[2] > width:
                return calls
    return None


def head_methods(model: nn.Module) -> list[str]:
    """Return the names of the model's own methods that may make logits of hidden states."""
    return [name for name in _own_methods(model) if HEADS.search(name)]


def _own_methods(model: nn.Module) -> list[str]:
    classes = [cls for cls in reversed(type(model).__mro__) if is_users_class(cls)]
    own = {name: value for cls in classes for name, value in vars(cls).items()}
    return [name for name, value in own.items() if inspect.isfunction(value)]


def _hidden_width(model: nn.Module, ids: Tensor) -> int:
    """Return the width of the hidden states that a model returns; 0 if it returns others."""
    with suppress(Exception), eval_mode(model), plain_kernels():
        width = find_logits(model(ids), ids).shape[2]
        return width if width in _embedding_widths(model) else 0
    return 0


def _embedding_widths(model: nn.Module) -> set[int]:
    return {m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)}


def batch_sizes(model: nn.Module) -> list[int]:
    """Return numbers of sequences that a model may insist on: one, and its own batch sizes."""
    modules = list(model.modules())
    owners = (*user_modules(type(model)), *modules, *dict.fromkeys(map(type, modules)))
    named = [(n, v) for o in owners for n, v in list(vars(o).items()) if type(v) is int]
    found = {v for n, v in named if plain(n) in ("batchsize", "batch", "bs") and 1 < v <= 512}
    return [1, *sorted(found)]


def required_arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments that `forward` requires besides the ids."""
    own, parameters = _parameter_of_ids(model), inspect.signature(model.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p != own and p.default is p.empty and p.kind in named]


def _required_values(model: nn.Module) -> dict[str, Value]:
    return {name: _values(name)[0] for name in required_arguments(model)}


def _signatures(model: nn.Module, form: CallSignature) -> list[tuple[str, CallSignature]]:
    """Return signatures to try: ids and required arguments, then also targets or a flag."""
    required = _required_values(model)
    text = f"model({', '.join(['ids', *required])})"
    combinations = product(*map(_values, required))
    found = [
        (text, replace(form, arguments=tuple(zip(required, values, strict=True))))
        for values in islice(combinations, MOST_COMBINATIONS)
    ]
    parameters = inspect.signature(model.forward).parameters
    if (target := next((name for name in parameters if name in TARGETS), None)) is not None:
        arguments = tuple(({target: _ids} | required).items())
        text = f"model(ids, {target}=ids)"
        found.append((text, replace(form, arguments=arguments, targets=True)))
    for name, parameter in parameters.items():
        if "logits" in name and parameter.default in (False, None):
            arguments = (*required.items(), (name, _yes))
            found.append((f"model(ids, {name}=True)", replace(form, arguments=arguments)))
    found += [(text, replace(form, batch=batch)) for text, batch in _batches(model)]
    return found


def _batches(model: nn.Module) -> list[tuple[str, Batch]]:
    """Return what `forward` may take in place of the ids, as its source reads its first argument.

    It may read `batch["input_ids"]` or `batch.input_ids`, as tokenizers of transformers return
    them, or begin with `ids, targets = batch`.
    """
    source = source_of(model.forward)
    first = next(iter(inspect.signature(model.forward).parameters), "")
    names = re.findall(rf"""\b{first}(?:\[["']|\.get\(["']|\.)(\w+)\b(?!\s*\()""", source)
    keys = [name for name in dict.fromkeys(names) if re.search(r"id|tok|input|x$|text|seq", name)]
    found: list[tuple[str, Batch]] = []
    if first and keys:
        every = [*dict.fromkeys(names), "attention_mask"]
        text = ", ".join(f'"{name}": {"ones" if "mask" in name else "ids"}' for name in every)
        found.append((f"model({{{text}}})", partial(_dictionary, every)))
    unpacked = re.search(rf"^\s*\(?(\w+(?:\s*,\s*\w+)+)\)?\s*=\s*{first}\s*$", source, re.M)
    if first and unpacked:
        count = unpacked[1].count(",") + 1
        found.append((f"model(({', '.join(['ids'] * count)}))", partial(_repeated, count)))
    return found


def _dictionary(names: list[str], ids: Tensor) -> ReadableDict:
    """Return ids under these names, and masks without padding."""
    return ReadableDict({name: torch.ones_like(ids) if "mask" in name else ids for name in names})


def _repeated(count: int, ids: Tensor) -> tuple[Tensor, ...]:
    """Return the ids in the place of inputs and targets."""
    return (ids,) * count


def _with_optional_arguments(
    model: nn.Module, form: CallSignature
) -> list[tuple[str, CallSignature]]:
    """Return the call with a list of empty caches, with a mask without padding, or without a cache.

    Some code reads the first two although they are optional. A cache may need another version of a
    library than is installed.
    """
    required = _required_values(model).items()
    found = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        values: list[tuple[str, Value]] = []
        if name == "use_cache" and parameter.default in (None, True):
            values = [("False", _no)]
        elif parameter.default is not None:
            continue
        elif form.setup and "pos" in name:  # at which the masks are read
            values = [("positions", _positions)]
        elif _nothing_for_each_layer in _values(name):
            values = [("[None, …]", _nothing_for_each_layer)]
        elif "mask" in name:
            values = [("ones", _ones), ("zeros", _none_marked)]
            if _is_mask(name):  # some code masks with the mask that is passed only
                masks = [mask for text, mask in _masks().items() if not text.startswith("None")]
                values += [("a mask (T, T)", mask) for mask in masks]
        found += [
            (f"model(ids, {name}={text})", replace(form, arguments=(*required, (name, value))))
            for text, value in values
        ]
    return found


def _with_optional_masks(model: nn.Module, signature: CallSignature) -> list[CallSignature]:
    """Return the signature with each optional mask, or with a flag such as `causal=True`."""
    texts = re.findall(
        r"""mask\w*\s*(?:==|in\b)\s*[\[({]?\s*["'](\w*causal\w*)["']""", modules_text(type(model))
    )
    passed = {name for name, _ in signature.arguments}
    found = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if name in passed or parameter.default is parameter.empty:
            continue
        values: dict[str, Value] = {}
        if _is_mask(name):
            values = {repr(text): _always(text) for text in texts} | _masks()
        elif "causal" in name:
            values = {"True": _yes}
        found += [
            replace(
                signature, arguments=(*signature.arguments, (name, value)), mask=f"{name}={text}"
            )
            for text, value in values.items()
        ]
    return found


def _is_causal(model: nn.Module, signature: CallSignature, ids: Tensor) -> bool:
    """Return whether a change of the last token leaves all earlier logits unchanged."""
    changed = _changed_by(model, signature, ids, -1)
    return len(changed) > 1 and not changed[:-1].any()


def _is_bidirectional(model: nn.Module, signature: CallSignature, ids: Tensor) -> bool:
    """Return whether a change of the last or the first token changes the logits of all others."""
    changed = (_changed_by(model, signature, ids, place) for place in (-1, 0))
    return all(len(positions) > 1 and bool(positions.all()) for positions in changed)


def _changed_by(model: nn.Module, signature: CallSignature, ids: Tensor, place: int) -> Tensor:
    """Return whether the logits of each position change with one token.

    Of a model that returns the logits of one position, it is the last hidden states that change.
    Empty if the call fails, or if the change is not a number.
    """
    other = ids.clone()
    other[:, place] = ids[:, -1 - place]
    outputs = []
    for each in (ids, other):
        with torch.random.fork_rng([]), eval_mode(model), plain_kernels():
            torch.manual_seed(0)  # of dropout that is applied in eval mode too
            try:
                outputs.append(_of_every_position(model, signature, each))
            except Exception:
                return torch.empty(0, dtype=torch.bool)
    one, two = outputs
    change = torch.where(one == two, 0, (one - two).abs()).amax((0, 2))
    if not change.isfinite().all():
        return torch.empty(0, dtype=torch.bool)
    return change > 1e-5 * change.amax()  # less is rounding


def _of_every_position(model: nn.Module, signature: CallSignature, ids: Tensor) -> Tensor:
    """Return the logits, or the last hidden states (B, T, C) if the logits are of one position."""
    hidden: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 3 and output.is_floating_point():
            B_T = tuple(output.shape[:2])
            if B_T in (ids.shape, ids.mT.shape):
                hidden.append(output if B_T == ids.shape else output.transpose(0, 1))

    hooks = [module.register_forward_hook(keep) for module in model.modules() if signature.last]
    try:
        logits = signature(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return hidden[-1] if hidden and logits.shape[1] < ids.shape[1] else logits
