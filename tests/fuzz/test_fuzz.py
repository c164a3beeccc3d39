"""1,000 mutations are loaded as their files state or refused; wrong loaders are detected."""

from __future__ import annotations

import pytest

from tests.fuzz import harness
from tests.fuzz.harness import run
from tests.fuzz.mutations import KINDS, mutation, seed_files

CASES = 1000


def test_a_mutation_is_loaded_as_its_files_state_or_refused() -> None:
    report = run(CASES, seed=1)
    assert report.failures == [], "\n".join(report.lines())
    assert sum(report.counts.values()) == CASES
    for kind in KINDS:  # enough mutations of each kind must be loaded, and enough refused
        of_kind = {what: n for (k, what), n in report.counts.items() if k == kind}
        assert 3 <= of_kind.pop("loaded") <= CASES / len(KINDS) / 2
        assert sum(of_kind.values()) >= CASES / len(KINDS) / 2


def test_a_mutation_depends_only_on_its_seed_number_and_kind() -> None:
    kinds = list(KINDS)
    for index in range(2 * len(kinds)):
        kind, files = mutation(5, index, kinds)
        assert kind == kinds[index % len(kinds)]
        assert mutation(5, index, [kind]) == (kind, files)
    assert mutation(5, 0, ["bin"]) != mutation(6, 0, ["bin"]) != mutation(6, 1, ["bin"])


def test_almost_all_mutations_change_the_files() -> None:
    for kind in KINDS:
        same = sum(mutation(0, i, [kind])[1] == seed_files(kind) for i in range(100))
        assert same < 15


@pytest.mark.parametrize(
    ("mistake", "reported"),
    [
        ("lets_a_key_error_escape", "KeyError: 'wte.weight'"),
        ("returns_other_weights", "ln_f.bias is not what the file has"),
        ("returns_another_config", "config.n_head is 1, not 2"),
        ("returns_another_tokenizer", "tokenizer"),
        ("exits", "the process ended with code 3"),
        ("crashes", "killed by signal 11"),
        ("hangs", "no answer within 1 s"),
        ("takes_memory", " MB"),
        ("takes_too_much_memory", "MemoryError"),
        ("takes_long", "2.5 s"),
        ("prints", "something was printed"),
        ("warns", "a warning: loading"),
        ("does_not_say_where", "a message without the path: something is wrong"),
        ("sends_the_terminal_commands", "a message that is not fit to print"),
    ],
)
def test_a_loader_with_a_mistake_is_found(
    mistake: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake == "hangs":
        monkeypatch.setattr(harness, "ANSWERS_WITHIN", 1.0)
    n = 30 if mistake.startswith(("lets", "returns", "does")) else 1
    report = run(
        n,
        0,
        kind="vocab" if "tokenizer" in mistake else "config",
        target=f"tests.fuzz.broken:{mistake}",
    )
    assert report.failures, report.lines()
    assert any(reported in failure["fault"] for failure in report.failures), report.lines()
    assert "--n 1 --start " in report.lines()[-1]


def test_mutations_after_one_that_ends_the_process_are_tested() -> None:
    report = run(3, 0, kind="bin", target="tests.fuzz.broken:exits")
    assert [failure["index"] for failure in report.failures] == [0, 1, 2]
