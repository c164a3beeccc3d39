"""A model of EleutherAI's lm-evaluation-harness that scores and generates with an `Engine`.

Importing this module registers it as "compat". lm-eval does not search other packages for models,
so `python -m compat.evaluation` is lm-eval's own command line after that import:

    python -m compat.evaluation --model compat --model_args source=gpt2 --tasks lambada_openai
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from compat.checkpoint import Checkpoint, open_checkpoint
from compat.engine import Engine
from compat.errors import ConfigError, GenerationError, TokenizerError, described, listed
from compat.generation import Sampling, generate_text
from compat.tokenizer import Tokenizer, load_tokenizer

Ids = list[int]
Score = tuple[float, bool]

BATCH = 8  # number of texts that are generated together, unless batch_size states it
NEW_TOKENS = 256  # tokens of a text whose task sets no limit, as in lm-eval's `hf`
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


@register_model("compat")
class CompatLM(TemplateLM):
    """lm-eval's interface to an engine, with the results of lm-eval's `hf`.

    A context that several requests share, such as a question with several choices, is processed
    once.

    Args:
        source: a checkpoint's source, as in `load_pretrained`; or an `Engine`, for example of a
            module with a name map.
        tokenizer: a Tokenizer, or the source of one. None means the checkpoint's.
        revision, n_head: as in `Engine.from_pretrained`, for a checkpoint.
        dtype, device: as in `Engine`, for a checkpoint.
        batch_size: number of texts that are generated together; "auto" is 8.
        max_batch_size: has no effect; lm-eval passes it.

    Raises:
        ConfigError: an engine was passed without a tokenizer, or the batch size is not a number.
        CompatError: the checkpoint or its tokenizer cannot be loaded.
    """

    def __init__(
        self,
        source: str | Path | Checkpoint | Engine,
        tokenizer: str | Path | Checkpoint | Tokenizer | None = None,
        *,
        revision: str | None = None,
        n_head: int | None = None,
        dtype: Any = "float32",
        device: str = "cpu",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(source, Engine):
            self.engine = source
        else:
            source = open_checkpoint(source, revision=revision, n_head=n_head)
            self.engine = Engine.from_pretrained(source, dtype=dtype, device=device)
            tokenizer = source if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ConfigError("an Engine has no tokenizer. Pass `tokenizer`, for example 'gpt2'.")
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = load_tokenizer(tokenizer)
        self.tokens = tokenizer
        self.batch_size = _as_batch_size(batch_size)

    @property
    def max_length(self) -> int:
        """The number of positions."""
        return self.engine.config.n_positions

    @property
    def eot_token_id(self) -> int:
        """The id from which a text without a context starts.

        Raises:
            TokenizerError: the vocabulary has no end-of-text token, nor does the config name one.
        """
        if self.tokens.end_of_text is not None:
            return self.tokens.end_of_text
        for token_id in self.engine.config.stop_ids:
            return token_id
        raise TokenizerError(
            "the vocabulary has no <|endoftext|>, which lm-eval puts before a text without a "
            "context. Set eos_token_id in config.json."
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Ids:
        """Return the ids of a text; names of special tokens are encoded as these tokens."""
        return self.tokens.encode(string, allow_special=True)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], Ids, Ids]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[Score]:
        """Return each continuation's log-probability, and whether greedy decoding chooses it."""
        found = self._scores([(context, ids) for _, context, ids in requests], disable_tqdm)
        for (texts, _, _), score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each whole text, read in windows of the full context."""
        windows: list[tuple[Ids, Ids]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [make_disjoint_window(pair) for pair in pairs]
            windows += found
            owners += [number] * len(found)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._scores(windows, disable_tqdm), strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each text, up to its stop strings."""
        by_settings = defaultdict(list)  # texts that are generated with the same settings
        for number, request in enumerate(requests):
            by_settings[json.dumps(request.args[1], sort_keys=True)].append(number)
        texts = [""] * len(requests)
        bar = tqdm(total=len(requests), desc="compat: generating", disable=disable_tqdm)
        for numbers in by_settings.values():
            contexts = [requests[number].args[0] for number in numbers]
            found = self._continuations(contexts, requests[numbers[0]].args[1])
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update()
        return texts

    def _continuations(self, contexts: Sequence[str], settings: dict[str, Any]) -> Iterator[str]:
        """Yield a continuation of each text. A text that is too long loses its beginning."""
        wanted = dict(normalize_gen_kwargs(settings, NEW_TOKENS))
        until, limit = wanted.pop("until"), wanted.pop("max_gen_toks")
        sampled = wanted.pop("do_sample")
        if unknown := sorted(wanted.keys() - SAMPLING):
            raise GenerationError(
                f"generation_kwargs has {listed(unknown)}, but compat knows until, max_gen_toks, "
                f"do_sample, {', '.join(sorted(SAMPLING))}. Remove it from the task."
            )
        room = self.max_length - limit
        if room < 1:
            raise GenerationError(
                f"max_gen_toks is {limit}, but the model has {self.max_length} positions, and "
                "the context needs one. Set max_gen_toks in the task's generation_kwargs."
            )
        for completion in generate_text(
            self.engine,
            self.tokens,
            [(self.tok_encode(text) or [self.eot_token_id])[-room:] for text in contexts],
            batch_size=self.batch_size,
            max_new_tokens=limit,
            sampling=Sampling(**(wanted if sampled else {"temperature": 0.0})),
            stop=[text for text in until if text],
            stop_ids=(self.eot_token_id, *self.engine.config.stop_ids),
        ):
            yield completion.new_text

    def _scores(self, pairs: Sequence[tuple[Ids, Ids]], disable_tqdm: bool) -> list[Score]:
        """Return scores of continuations of contexts, in this order."""
        by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (context, ids) in enumerate(pairs):
            if not 0 < len(ids) <= self.max_length:
                raise GenerationError(
                    f"a continuation has {len(ids):,} tokens, but must have 1 to "
                    f"{self.max_length:,}, the number of positions of the model. Leave its request "
                    "out of the task."
                )
            whole = [*context, *ids][-(self.max_length + 1) :]  # the last id is only predicted
            by_context[tuple(whole[: -len(ids)])].append(number)
        found: dict[int, Score] = {}
        contexts = list(by_context.items())
        requests = [(context, [pairs[i][1] for i in numbers]) for context, numbers in contexts]
        bar = tqdm(total=len(pairs), desc="compat: scoring", disable=disable_tqdm)
        for (request, i), (logprobs, is_greedy) in self.engine.score_requests(requests):
            found[contexts[request][1][i]] = float(logprobs.sum()), bool(is_greedy.all())
            bar.update()
        return [found[number] for number in range(len(pairs))]


def _as_batch_size(batch_size: int | str | None) -> int:
    """Return the number in lm-eval's batch_size, such as 4, "4", "auto" or "auto:2"."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return BATCH
    try:
        size = int(batch_size)
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(
            f"batch_size is {described(batch_size)}, but must be 1 or more, or 'auto'."
        )
    return size


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
