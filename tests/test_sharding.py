"""Models that are sharded among processes: placements, and the checks of two and four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from compat import ConfigError, Fused, GPT2Config, NameMap, Part, Rearrange, Row, distribute
from compat.checkpoint import open_checkpoint
from compat.dialects import DIALECTS
from compat.ops import Op, Rows
from compat.parity.compare import TapResult, compare
from compat.parity.reference import Reference
from compat.parity.trace import Trace
from compat.parity.trace import record as trace
from compat.sharding import check_heads, placements, strided_shard
from tests import sharding_four, sharding_pair
from tests.conftest import MakeCheckpoint
from tests.own_gpt2 import MyGPT2, my_map
from tests.ranks import Outcomes, run_ranks

# Placements, which can be computed without processes


def placements_of(dialect: str, ranks: int) -> dict[str, Placement]:
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=24, n_layer=2, n_head=4)
    kind = DIALECTS[dialect]
    with torch.device("meta"):
        model = kind.model_class(config)
    return placements(kind.name_map, dict(model.named_parameters(remove_duplicate=False)), ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_linear_dialect_is_split_by_features(ranks: int) -> None:
    found, block = placements_of("linear", ranks), "trf_blocks.1."
    assert found["tok_emb.weight"] == found["out_head.weight"] == Shard(0)
    for name in ("attention.W_query", "attention.W_value", "feedforward.layers.0"):
        assert found[f"{block}{name}.weight"] == found[f"{block}{name}.bias"] == Shard(0)
    for name in ("attention.out_proj", "feedforward.layers.2"):
        assert found[f"{block}{name}.weight"] == Shard(1)
        assert found[f"{block}{name}.bias"] == Replicate()
    assert found["pos_emb.weight"] == found[f"{block}norm1.scale"] == Replicate()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_conv1d_dialect_is_split_by_features(ranks: int) -> None:
    found = placements_of("conv1d", ranks)
    assert found["h.1.attn.c_attn.weight"] == strided_shard(1, 3)
    assert found["h.1.attn.c_attn.bias"] == Replicate()
    assert found["h.1.mlp.c_fc.weight"] == Shard(1)
    assert found["h.1.attn.c_proj.weight"] == found["h.1.mlp.c_proj.weight"] == Shard(0)


FUSED = "h.{i}.attn.c_attn.weight"


@pytest.mark.parametrize(
    ("op", "shape", "expected"),
    [
        (Fused(4, (Part("qkv", "(h q d) c"),)), (72, 24), Shard(0)),  # Megatron's order
        (Fused(4, (Part("qkv", "(q h d) c"),)), (72, 24), strided_shard(0, 3)),
        (Fused(4, (Part("kvq", "q h d c"),)), (3, 4, 6, 24), Shard(1)),
        (Fused(4, (Part("qkv", "c (q d h)"),)), (24, 72), Replicate()),  # heads are interleaved
        (Rearrange("c m -> m c 1"), (72, 24, 1), strided_shard(0, 3)),
    ],
    ids=str,
)
def test_placements_follow_the_operation(
    op: Op, shape: tuple[int, ...], expected: Placement
) -> None:
    name_map = NameMap((Row(FUSED, ("layers.{i}.qkv",), op),))
    parameters = {"layers.0.qkv": nn.Parameter(torch.empty(shape))}
    assert placements(name_map, parameters, 2) == {"layers.0.qkv": expected}


def test_a_parameter_with_two_of_q_k_and_v_is_sharded_in_strides() -> None:
    found = placements(my_map(), dict(MyGPT2().named_parameters(remove_duplicate=False)), 2)
    assert found["stack.2.query_key.weight"] == strided_shard(0, 2)
    assert found["stack.2.value.weight"] == Shard(0)


def test_a_padded_vocabulary_is_replicated() -> None:
    name_map = NameMap((Row("wte.weight", ("tokens",), Rows(97, 128)),))
    parameters = {"tokens": nn.Parameter(torch.empty(128, 24))}
    assert placements(name_map, parameters, 2) == {"tokens": Replicate()}


@pytest.mark.parametrize(
    ("fields", "ranks", "message"),
    [
        ({"n_head": 12, "n_embd": 768}, 5, "n_head is 12, .* 5 ranks.* 1, 2, 3, 4, 6, 12"),
        ({"n_head": 4, "n_embd": 24, "n_inner": 50}, 4, "d_inner is 50, .* 4 ranks"),
    ],
)
def test_indivisible_sizes_are_refused(fields: dict[str, int], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_heads(GPT2Config(**fields), ranks)


def test_a_mesh_that_is_not_a_device_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh is .*2.*, but must be a DeviceMesh"):
        distribute(MyGPT2(), my_map(), 2)  # type: ignore[arg-type]


def test_torch_still_has_its_private_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """compat imports the private class `_StridedShard` in one place."""
    assert strided_shard(1, 3).split_factor == 3, "torch has changed _StridedShard"
    monkeypatch.delattr("torch.distributed.tensor.placement_types._StridedShard")
    with pytest.raises(ConfigError, match="has no _StridedShard"):
        strided_shard(1, 3)


# Results of two processes


@pytest.fixture(scope="module")
def folder(
    tiny: Path, make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the files that the processes need, and to which they write their traces."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "tiny").symlink_to(tiny)
    (folder / "other").symlink_to(make_checkpoint(seed=1))
    wide = {"vocab_size": 16384, "n_positions": 64, "n_embd": 512, "n_head": 8, "n_layer": 6}
    (folder / "large").symlink_to(make_checkpoint(**wide))
    (folder / "three heads").symlink_to(make_checkpoint(n_head=3))
    (folder / "nan").mkdir()
    state = load_file(tiny / "model.safetensors")
    state["transformer.wte.weight"][96, 3] = torch.nan
    save_file(state, folder / "nan/model.safetensors")
    (folder / "nan/config.json").write_text((tiny / "config.json").read_text())
    return folder


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return Reference(open_checkpoint(tiny), torch.float32)


@pytest.fixture(scope="module")
def outcomes(folder: Path, reference: Reference) -> Outcomes:
    torch.save(reference.trace(sharding_pair.IDS)[0], folder / "expected.pt")
    return run_ranks("tests.sharding_pair", 2, folder)


@pytest.mark.parametrize("name", sharding_pair.CHECKS)
def test_the_checks_of_two_processes_pass(outcomes: Outcomes, name: str) -> None:
    if outcomes[name]:
        pytest.fail(outcomes[name], pytrace=False)


@pytest.fixture(scope="module")
def exact(reference: Reference) -> tuple[Trace, Trace, Trace]:
    """The trace of the reference, in float64, and in float64 with its own float32 inputs."""
    expected, exact = reference.trace(sharding_pair.IDS)
    assert exact is not None
    local = trace(reference.exact, reference.taps, sharding_pair.IDS, forced=expected)
    return expected, exact, local


def taps_of(name: str, folder: Path, exact: tuple[Trace, Trace, Trace]) -> list[TapResult]:
    accumulated, local = torch.load(folder / f"{name}.pt")
    expected, far, near = exact
    return compare(expected, accumulated, local, far, near)


@pytest.mark.parametrize("name", sharding_pair.MODELS)
def test_sharded_models_have_parity_at_every_tap(
    name: str, folder: Path, outcomes: Outcomes, exact: tuple[Trace, Trace, Trace]
) -> None:
    taps = taps_of(name, folder, exact)
    assert len(taps) >= 14
    assert [tap.tap for tap in taps if not tap.passed] == []


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("wrong split factor", "h.1.q"),
        ("heads are split", "h.1.q"),
        ("bias on every rank", "h.1.attn"),
    ],
)
def test_wrong_sharding_breaks_parity(
    name: str, first: str, folder: Path, outcomes: Outcomes, exact: tuple[Trace, Trace, Trace]
) -> None:
    failed = [tap.tap for tap in taps_of(name, folder, exact) if not tap.passed]
    assert failed[0] == first


# Results of four processes


@pytest.fixture(scope="module")
def outcomes_of_four(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    folder = tmp_path_factory.mktemp("four")
    (folder / "tiny").symlink_to(make_checkpoint(n_layer=1))
    return run_ranks("tests.sharding_four", 4, folder)


@pytest.mark.parametrize("name", sharding_four.CHECKS)
def test_the_checks_of_four_processes_pass(outcomes_of_four: Outcomes, name: str) -> None:
    if outcomes_of_four[name]:
        pytest.fail(outcomes_of_four[name], pytrace=False)
