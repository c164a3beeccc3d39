"""Checks for two processes: tensor parallelism and FSDP2. See tests/test_sharding.py."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from threading import Event, Thread
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

from compat import (
    CheckpointError,
    ConfigError,
    Engine,
    GenerationError,
    PlainBlocks,
    Tap,
    distribute,
    generate,
    left_pad,
    load_block,
    load_into,
    load_pretrained,
    load_tokenizer,
    save_pretrained,
    to_hf_state_dict,
    trace,
)
from compat.cli import main
from compat.dialects import DIALECTS
from compat.parity.state import state_digests
from compat.parity.trace import record
from compat.sharding import whole
from scripts import finetune
from tests.own_gpt2 import MyGPT2, my_map
from tests.ranks import Check, Ranks

CHECKS: dict[str, Check] = {}
IDS = (torch.arange(24).view(2, 12) * 7) % 97


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def pair() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def tensor_parallel(ranks: Ranks, dialect: str = "linear") -> nn.Module:
    return load_pretrained(ranks.folder / "tiny", dialect, mesh=pair())


def fsdp(ranks: Ranks, dialect: str = "linear") -> nn.Module:
    """Return a model that is sharded on the meta device and then loaded."""
    return load_pretrained(ranks.folder / "tiny", dialect, mesh=pair(), parallel="fsdp")


def users_model(ranks: Ranks) -> nn.Module:
    model = MyGPT2()
    distribute(model, my_map(), pair())
    load_into(model, my_map(), ranks.folder / "tiny")
    return model


OWN_TAPS = (
    Tap("h.{i}.ln_1", "stack.{i}.before_attention"),
    Tap("h.{i}.heads", "stack.{i}.merge", at="input"),
    Tap("h.{i}.fc", "stack.{i}.wide"),
    Tap("h.{i}.out", "stack.{i}"),
    Tap("ln_f", "end"),
    Tap("logits", "head"),
)

# Models whose hidden states the test compares with those of the reference.


def broken(change: Callable[[nn.Module, int], None], dialect: str) -> Callable[[Ranks], nn.Module]:
    def make(ranks: Ranks) -> nn.Module:
        model = tensor_parallel(ranks, dialect)
        change(model, ranks.rank)
        return model

    return make


def wrong_split_factor(model: nn.Module, rank: int) -> None:
    """Each rank holds half of the columns, but treats them as halves of q, of k and of v."""
    layer = model.get_submodule("h.1.attn.c_attn")
    half = layer.weight.full_tensor().detach().chunk(2, dim=1)[rank].contiguous()
    share = DTensor.from_local(half, layer.weight.device_mesh, layer.weight.placements)
    layer.weight = nn.Parameter(share)


def heads_are_split(model: nn.Module, rank: int) -> None:
    """Each rank holds every second feature of the queries."""
    layer = model.get_submodule("trf_blocks.1.attention.W_query")
    every = layer.weight.full_tensor().detach()
    share = DTensor.from_local(every[rank::2].contiguous(), layer.weight.device_mesh, [Shard(0)])
    layer.weight = nn.Parameter(share)


def bias_on_every_rank(model: nn.Module, rank: int) -> None:
    """Each rank adds the bias of the output projection to its part of the sum."""
    layer = model.get_submodule("trf_blocks.1.attention.out_proj")
    bias = layer.bias.to_local().detach()
    layer.bias = nn.Parameter(DTensor.from_local(bias, layer.weight.device_mesh, [Partial()]))


MODELS: dict[str, tuple[Callable[[Ranks], nn.Module], tuple[Tap, ...]]] = {
    "tensor parallel, linear": (tensor_parallel, DIALECTS["linear"].taps),
    "tensor parallel, conv1d": (
        lambda ranks: tensor_parallel(ranks, "conv1d"),
        DIALECTS["conv1d"].taps,
    ),
    "tensor parallel, user's model": (users_model, OWN_TAPS),
    "FSDP2, linear": (fsdp, DIALECTS["linear"].taps),
    "FSDP2, conv1d": (lambda ranks: fsdp(ranks, "conv1d"), DIALECTS["conv1d"].taps),
}
BROKEN: dict[str, tuple[Callable[[Ranks], nn.Module], tuple[Tap, ...]]] = {
    "wrong split factor": (broken(wrong_split_factor, "conv1d"), DIALECTS["conv1d"].taps),
    "heads are split": (broken(heads_are_split, "linear"), DIALECTS["linear"].taps),
    "bias on every rank": (broken(bias_on_every_rank, "linear"), DIALECTS["linear"].taps),
}


@check
def every_model_can_be_traced(ranks: Ranks) -> None:
    expected = torch.load(ranks.folder / "expected.pt")
    for name, (make, taps) in {**MODELS, **BROKEN}.items():
        model = make(ranks)
        traces = record(model, taps, IDS), record(model, taps, IDS, forced=expected)
        if ranks.rank == 0:
            torch.save(traces, ranks.folder / f"{name}.pt")


@check
def a_sharded_model_can_be_patched(ranks: Ranks) -> None:
    """Hidden states and gradients after a patch equal those of a single process."""

    def logits_and_gradient(model: nn.Module) -> tuple[Tensor, Tensor]:
        states = trace(
            model, IDS, ["h.1.v", "logits"], patch={"h.0.mlp": lambda mlp: mlp.flip(-1)}, grad=True
        )
        loss = F.cross_entropy(states["logits"].flatten(0, 1), IDS.flatten())
        return states["logits"].detach(), torch.autograd.grad(loss, states["h.1.v"])[0]

    one = load_pretrained(ranks.folder / "tiny")
    logits, gradient = logits_and_gradient(one)
    assert (logits - one(IDS)).abs().max() > 0.1  # the patch changes them
    for many in (tensor_parallel(ranks), fsdp(ranks)):
        found, its_gradient = logits_and_gradient(many)
        assert (found - logits).abs().max() < 1e-5
        assert (its_gradient - gradient).norm() < 1e-4 * gradient.norm()


@check
def tied_embeddings_stay_tied(ranks: Ranks) -> None:
    for dialect, head, embedding in (
        ("linear", "out_head.weight", "tok_emb.weight"),
        ("conv1d", "lm_head.weight", "wte.weight"),
    ):
        model = tensor_parallel(ranks, dialect)
        assert model.get_parameter(head) is model.get_parameter(embedding)


@check
def each_rank_holds_half_of_the_weights(ranks: Ranks) -> None:
    for model in (tensor_parallel(ranks), tensor_parallel(ranks, "conv1d"), fsdp(ranks)):
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "pos" not in name]
        held = [p.to_local().numel() / p.numel() for p in matrices if p.shape[0] != 32]
        assert all(0.48 < part < 0.52 for part in held), held


@contextmanager
def peak_anonymous_memory() -> Iterator[list[int]]:
    """Yield a list with the peak of the memory, in bytes, that the block allocates additionally."""

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous() - before)

    done, peak, before = Event(), [0], anonymous()
    thread = Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


@check
def loading_allocates_little_more_than_the_shard(ranks: Ranks) -> None:
    """Each of two ranks allocates at most 0.65 of the weights, without memory-mapped files."""
    parallel: tuple[Literal["tensor", "fsdp"], ...] = ("tensor", "fsdp")
    with peak_anonymous_memory() as peak:
        model = load_pretrained(ranks.folder / "large", mmap=False)
    assert peak[0] > 0.95 * sum(p.nbytes for p in model.parameters())
    del model
    for dialect, mode, mmap in product(DIALECTS, parallel, (True, False)):
        with peak_anonymous_memory() as peak:
            model = load_pretrained(
                ranks.folder / "large", dialect, mmap=mmap, mesh=pair(), parallel=mode
            )
        share = peak[0] / sum(p.nbytes for p in model.parameters())
        assert (mmap or share > 0.45) and share < 0.65, (dialect, mode, mmap, share)
        del model


@check
def gradients_equal_those_of_one_process(ranks: Ranks) -> None:
    for dialect in DIALECTS:
        one, many = load_pretrained(ranks.folder / "tiny", dialect), tensor_parallel(ranks, dialect)
        for model in (one, many):
            F.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten()).backward()
        for (name, p), q in zip(many.named_parameters(), one.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            error = (whole(p.grad) - q.grad).norm() / q.grad.norm().clamp(min=1e-3)
            assert error < 1e-4, (dialect, name, error)


@check
def generated_ids_equal_those_of_one_process(ranks: Ranks) -> None:
    ids, mask = left_pad([[5, 17, 60], [9]])
    for dialect, temperature in (("linear", 0.0), ("conv1d", 1.0)):
        one = PlainBlocks(load_pretrained(ranks.folder / "tiny", dialect))
        found = [
            generate(
                model, ids, attention_mask=mask, max_new_tokens=3, temperature=temperature,
                generator=torch.Generator().manual_seed(3), stop_ids=(),
            )
            for model in (one, tensor_parallel(ranks, dialect))
        ]  # fmt: skip
        assert torch.equal(*found), dialect


@check
def different_tokens_on_the_ranks_raise_an_error(ranks: Ranks) -> None:
    """Each rank samples with its own generator."""
    generator = torch.Generator().manual_seed(ranks.rank)
    with pytest.raises(GenerationError, match=r"ranks .* different tokens"):
        generate(tensor_parallel(ranks), IDS, max_new_tokens=5, generator=generator, stop_ids=())


@check
def saved_tensors_equal_the_source(ranks: Ranks) -> None:
    source = load_hf(ranks.folder / "tiny")
    models = {
        "linear": tensor_parallel(ranks),
        "conv1d": tensor_parallel(ranks, "conv1d"),
        "fsdp": fsdp(ranks),
    }
    for name, model in models.items():
        files = save_pretrained(model, ranks.folder / "saved" / name, max_shard_size="20KB")
        torch.distributed.barrier()
        assert len(files) > 4 and all(file.exists() for file in files)
        saved = load_hf(ranks.folder / "saved" / name)
        assert saved.keys() == source.keys()
        assert all(torch.equal(saved[key], value) for key, value in source.items()), name
    mine = to_hf_state_dict(users_model(ranks), my_map())
    assert all(torch.equal(mine[key], value) for key, value in source.items())


def load_hf(folder: Path) -> dict[str, Tensor]:
    return to_hf_state_dict(load_pretrained(folder))


@check
def an_engine_accepts_a_sharded_model(ranks: Ranks) -> None:
    engine = Engine(tensor_parallel(ranks))
    expected = Engine(load_pretrained(ranks.folder / "tiny"))
    assert torch.equal(engine.score(IDS), expected.score(IDS))


@check
def an_error_of_the_writing_rank_is_raised_on_all_ranks(ranks: Ranks) -> None:
    path = ranks.folder / "a file"
    path.touch()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="is a file"):
        save_pretrained(tensor_parallel(ranks), path)


@check
def non_finite_weights_raise_an_error_on_all_ranks(ranks: Ranks) -> None:
    """The NaN is in the last row of the vocabulary, which the first rank does not read."""
    with pytest.raises(CheckpointError, match=r"wte.weight has 1 NaN"):
        load_pretrained(ranks.folder / "nan", mesh=pair())


@check
def a_sharded_model_is_loaded_in_place(ranks: Ranks) -> None:
    model = tensor_parallel(ranks)
    before = list(model.parameters())
    load_into(model, DIALECTS["linear"].name_map, ranks.folder / "other")
    expected = load_pretrained(ranks.folder / "other")
    for (name, p), old, q in zip(
        model.named_parameters(), before, expected.parameters(), strict=True
    ):
        assert p is old and torch.equal(whole(p), q), name


@check
def an_indivisible_number_of_heads_raises_an_error(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"n_head is 3, .* 2 ranks"):
        load_pretrained(ranks.folder / "three heads", mesh=pair())


class Stage(nn.Module):
    """Consecutive blocks, with the embeddings on the first rank and the head on the last one.

    A rank that is neither the first nor the last needs only `load_block`.
    """

    def __init__(self, folder: Path, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        whole_model = load_pretrained(folder)
        self.embeddings = nn.ModuleList([whole_model.tok_emb, whole_model.pos_emb][: 2 * first])
        self.blocks = nn.Sequential(*(load_block(folder, i) for i in layers))
        self.head = nn.Sequential(*[whole_model.final_norm, whole_model.out_head][: 2 * last])

    def forward(self, x: Tensor) -> Tensor:
        if self.embeddings:
            tokens, positions = self.embeddings
            x = tokens(x) + positions(torch.arange(x.shape[1]))
        return self.head(self.blocks(x))


@check
def a_pipeline_computes_the_same_logits(ranks: Ranks) -> None:
    folder, first = ranks.folder / "tiny", ranks.rank == 0
    module = Stage(folder, range(2) if first else range(2, 3), first, not first).eval()
    stage = PipelineStage(module, ranks.rank, ranks.size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    with torch.no_grad():
        found = schedule.step(*([IDS] if first else []))
        if not first:
            assert (found - load_pretrained(folder)(IDS)).abs().max() < 1e-5


@check
def active_dropout_raises_an_error(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match="dropout is active"):
        tensor_parallel(ranks).train()(IDS)


@check
def training_equals_that_of_one_process(ranks: Ranks) -> None:
    """FSDP2: each rank has half of the batch, and the mean of both gradients is that of the batch.

    In float64, because AdamW normalizes gradients by their size, which amplifies rounding errors.
    """
    folder, float64 = ranks.folder / "tiny", torch.float64
    one = load_pretrained(folder, dtype=float64)
    many = load_pretrained(folder, mesh=pair(), parallel="fsdp", dtype=float64)
    record(many, [Tap("logits", "out_head")], IDS)  # a forward pass without a backward pass
    start = to_hf_state_dict(one)
    start = {name: value.clone() for name, value in start.items()}
    losses: list[list[float]] = []
    for model, batch in ((one, IDS), (many, IDS[ranks.rank : ranks.rank + 1])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(5):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            if model is many:
                torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
            losses[-1].append(mean.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < 0.95 * losses[0][0]
    trained, ours = to_hf_state_dict(one), to_hf_state_dict(many)
    for name, value in trained.items():
        if name.endswith("c_attn.bias"):  # the gradient of the key's bias is only rounding error
            keep = torch.arange(72) // 24 != 1
        else:
            keep = torch.ones_like(value, dtype=torch.bool)
        update = (value - start[name])[keep].norm()
        error = (value - ours[name])[keep].norm()
        assert error < 1e-5 * update, (name, error, update)


def run_as_torchrun(
    ranks: Ranks, main: Callable[[], object], argv: list[str]
) -> tuple[object, str]:
    """Run a program as torchrun does, and return its exit code and what it prints on stdout."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "test")
        patch.setenv("WORLD_SIZE", str(ranks.size))
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks.size))
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "stdout", printed)
        try:
            main()
        except SystemExit as exited:
            return exited.code, printed.getvalue()
    return 0, printed.getvalue()


@check
def gathered_fsdp_parameters_do_not_count_as_state(ranks: Ranks) -> None:
    model = fsdp(ranks)
    before = state_digests(model)
    with torch.no_grad():
        model(IDS)
    assert state_digests(model) == before


@check
def the_parity_command_supports_sharded_models(ranks: Ranks) -> None:
    argv = ["parity", str(ranks.folder / "tiny"), "--parallel", "fsdp", "--quiet"]
    code, printed = run_as_torchrun(ranks, lambda: main(argv), argv)
    assert code in (0, None)
    assert ("linear computes what transformers computes" in printed) == (ranks.rank == 0)


@check
def finetuning_writes_a_checkpoint_and_resumes(ranks: Ranks) -> None:
    corpus, out = ranks.folder / f"corpus-{ranks.rank}.txt", ranks.folder / "finetuned"
    corpus.write_text("ROMEO: But, soft! what light through yonder window breaks?\n" * 40)
    argv = ["", str(corpus), "--model", "demo", "--out", str(out), "--parallel", "fsdp"]
    argv += ["--length", "16", "--batch", "4", "--every", "2"]
    for more in (["--steps", "2"], ["--steps", "4", "--resume"]):
        code, printed = run_as_torchrun(ranks, finetune.main, [*argv, *more])
        assert code == 0 and (printed != "") == (ranks.rank == 0)
    torch.distributed.barrier()
    losses = torch.load(out / "finetune.pt", weights_only=True)["losses"]
    assert [step for step, *_ in losses] == [2, 4] and losses[1][2] < losses[0][2]
    assert (out / "loss.svg").read_text().startswith("<svg")
    ids = torch.tensor([load_tokenizer(out).encode(corpus.read_text())])[:, :64]
    before, after = (Engine.from_pretrained(source).score(ids).mean() for source in ("demo", out))
    assert after > before
