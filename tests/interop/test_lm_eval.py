"""lm-eval with an engine yields the scores and texts of lm-eval's `hf` model."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compat import ConfigError, Engine, GenerationError, load_pretrained, load_tokenizer
from compat.demo import __path__ as demo_path

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from compat.evaluation import CompatLM

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
DEMO = Path(demo_path[0])  # its context of 256 tokens is shorter than LONG
QUESTION = "ROMEO:\nBut soft, what light through yonder window"
LONG = (ROOT / "scripts" / "benchmarks" / "held_out.txt").read_text()[:2000]


@pytest.fixture(scope="module")
def ours() -> CompatLM:
    return CompatLM("demo")


@pytest.fixture(scope="module")
def theirs() -> HFLM:
    return HFLM(pretrained=str(DEMO), dtype="float32", device="cpu")


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def pairs(ours: CompatLM) -> list[tuple[str, str]]:
    """Contexts and continuations: empty, shared, with a final space, too long, and likely ones."""
    engine, tokenizer = ours.engine, ours.tokens
    ids = torch.tensor([tokenizer.encode(QUESTION)])
    likely = engine.generate(ids, max_new_tokens=6, temperature=0)[0, ids.shape[1] :].tolist()
    return [
        ("", "The king"),
        *((QUESTION, choice) for choice in (" breaks", " breaks?\nIt is the east", " the", ",")),
        (QUESTION, tokenizer.decode(likely)),
        (QUESTION, tokenizer.decode(likely[:1])),
        (QUESTION + "  ", "breaks"),
        (LONG, " and so"),
        (LONG, " and so farewell"),
        ("<|endoftext|>" + QUESTION, " breaks<|endoftext|>"),
    ]


def test_scores_equal_those_of_hf(
    ours: CompatLM, theirs: HFLM, pairs: list[tuple[str, str]]
) -> None:
    found = ours.loglikelihood(requests("loglikelihood", pairs))
    expected = theirs.loglikelihood(requests("loglikelihood", pairs))
    for pair, mine, its in zip(pairs, found, expected, strict=True):
        assert mine == (pytest.approx(its[0], abs=1e-4), its[1]), pair
    assert [is_greedy for _, is_greedy in found].count(True) == 2


def test_a_wrong_engine_has_other_scores(theirs: HFLM, pairs: list[tuple[str, str]]) -> None:
    wrong = CompatLM("demo")
    wrong.engine.transformer.wpe.mul_(1.001)
    found = wrong.loglikelihood(requests("loglikelihood", pairs))
    expected = theirs.loglikelihood(requests("loglikelihood", pairs))
    assert found[0][0] != pytest.approx(expected[0][0], abs=1e-4)


def test_complete_texts_are_scored_as_by_hf(ours: CompatLM, theirs: HFLM) -> None:
    texts = [(LONG,), ("To be,",), ("",), (LONG[:700],)]
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    expected = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    for (text,), mine, its in zip(texts, found, expected, strict=True):
        assert mine == pytest.approx(its, abs=1e-5 * len(text.encode())), text


def test_generated_texts_equal_those_of_hf(ours: CompatLM, theirs: HFLM) -> None:
    short = {"until": ["\n", "."], "max_gen_toks": 24}
    long: dict[str, Any] = {"until": [], "max_gen_toks": 40, "do_sample": False}
    requested = [(QUESTION, short), ("First Citizen:\n", short), (LONG, short), (QUESTION, long)]
    found = ours.generate_until(requests("generate_until", requested))
    assert found == theirs.generate_until(requests("generate_until", requested))
    assert "\n" in found[3] and all(found)


def test_a_task_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is found by its registered name, as on the command line."""
    assert get_model("compat") is CompatLM
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [{"text": text} for text in LONG.split("\n\n")[:3]]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "texts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "texts.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    bits = {}
    for model, name in (("compat", "source"), ("hf", "pretrained")):
        found = simple_evaluate(
            model,
            {name: str(DEMO), "device": "cpu"},
            [dict(task)],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
        bits[model] = found["results"]["texts"]["bits_per_byte,none"]
    assert bits["compat"] == pytest.approx(bits["hf"], abs=1e-5)
    assert 1 < bits["hf"] < 3


def test_a_model_with_a_name_map_is_evaluated(ours: CompatLM) -> None:
    engine = Engine(load_pretrained("demo", "conv1d"))
    lm = CompatLM(engine, load_tokenizer("demo"), batch_size="3")
    requested = requests("loglikelihood", [(QUESTION, " the king"), (QUESTION, " a")])
    for found, expected in zip(
        lm.loglikelihood(requested), ours.loglikelihood(requested), strict=True
    ):
        assert found == (pytest.approx(expected[0], abs=1e-4), expected[1])


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({"batch_size": "many"}, {}, "batch_size is 'many'.*, but must be 1 or more"),
        ({"source": Engine(load_pretrained("demo"))}, {}, "an Engine has no tokenizer. Pass"),
        ({}, {"max_gen_toks": 256}, "max_gen_toks is 256, but the model has 256 positions"),
        ({}, {"num_beams": 4}, "generation_kwargs has num_beams, but compat knows until"),
    ],
)
def test_unsupported_requests_raise_an_error(
    arguments: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, GenerationError), match=message):
        lm = CompatLM(**{"source": "demo", **arguments})
        lm.generate_until(requests("generate_until", [(QUESTION, settings)]))


def test_the_benchmark_reports_equal_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bench.py evaluate runs in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    from benchmarks import evaluate

    def run(file: str, *arguments: str) -> Any:
        monkeypatch.setattr("sys.argv", [file, *arguments])
        runpy.run_path(file)
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(evaluate, "in_fresh_process", run)
    evaluate.evaluate_command("demo", runs=1, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [*rows] == ["hf 1", "hf 8", "compat 8"]
    for row in rows.values():
        assert row["largest_difference"] < 1e-5 and row["same_texts"] == 8
        assert all(seconds > 0 for seconds in row["seconds"].values())
