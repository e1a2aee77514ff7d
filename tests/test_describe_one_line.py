"""Roles of mesh axes."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

import autopar
from autopar.degrees import Degrees
from autopar.describe.axis_roles import AxisRole, AxisTallies
from autopar.describe.one_line import summarise_roles
from autopar.folding.expert_parameters import experts_of
from autopar.models.builder import Builder
from autopar.sharding import Axis, Partial, Placement, Replicate, Shard
from autopar.workload import open_workload
from tests.formulations import DIMS, folded
from tests.plans import two_stage_plan


def tallies(**fields: tuple[Placement, float]) -> AxisTallies:
    """Return the tallies of an axis that splits the given shares and replicates the rest."""
    result = AxisTallies.empty()
    for name, (placement, share) in fields.items():
        getattr(result, name).add(placement, share, 4)
        getattr(result, name).add(Replicate(), 1 - share, 4)
    return result


@pytest.mark.parametrize(
    ("axis", "role"),
    [
        (tallies(activations=(Shard(0), 0.9)), "dp"),
        (tallies(activations=(Shard(0), 0.9), used=(Shard(1), 0.9)), "dp"),
        (tallies(activations=(Shard(2), 0.4), used=(Shard(1), 0.9)), "tp"),
        (tallies(activations=(Shard(1), 0.9), used=(Shard(0), 0.2)), "cp"),
        (tallies(activations=(Shard(2), 0.9)), "spatial"),
        (tallies(experts=(Shard(0), 0.9), used=(Shard(0), 0.4)), "ep"),
        (tallies(activations=(Shard(2), 0.4), used=(Shard(1), 0.2)), "tp"),
        (tallies(activations=(Shard(2), 0.4), used=(Shard(1), 0.01)), "idle"),
    ],
)
def test_the_role_of_an_axis_is_that_of_most_elements(axis: AxisTallies, role: str) -> None:
    """An axis that splits a fifth of the parameters is not idle, one that splits a hundredth is."""
    assert axis.role == role


def test_a_tied_head_is_no_activation(cache_dir: Path) -> None:
    """Its transposed embedding is larger than all activations of a short sequence, and split by no data axis."""
    dims = {"num_layers": 2, "seq": 32}

    plan = autopar.predict("zoo:gpt2", Degrees(dp=2, tp=2, global_batch=8), dims=dims, cache_dir=cache_dir).plan

    assert plan.summary.startswith("dp=2 × tp=2")


@pytest.mark.parametrize("halves", [(Shard(1), Shard(2)), (Shard(1), Partial("sum"))])
def test_an_axis_that_shares_all_work_is_not_idle(halves: tuple[Placement, Placement]) -> None:
    """The logits of a head are split by the vocabulary (dim 2 or, transposed for the loss, 1) or are partial."""
    axis = AxisTallies.empty()
    for placement in halves:
        axis.activations.add(placement, 0.5, 3)
    axis.used.add(Replicate(), 1.0, 2)  # the embedding, whose transpose is split

    assert axis.role == "tp"


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (Degrees(dp=4, ep=2, zero=1, global_batch=16), "dp=4 (zero-1, ep=2) × pp=1"),
        (Degrees(dp=4, zero=1, global_batch=16), "dp=4 (zero-1) × pp=1"),
        (
            Degrees(dp=4, ep=2, tp=2, sequence_parallel=True, global_batch=16),
            "dp=4 (ep=2) × tp=2 (sequence parallel) × pp=1",
        ),
    ],
)
def test_expert_groups_are_data_parallel(degrees: Degrees, words: str, cache_dir: Path) -> None:
    """Rows of experts are split by expert and by place; what experts have of their own is not shared by ZeRO.

    Waiting for tokens on their way to experts is communication of experts, not of data parallelism.
    """
    plan = autopar.predict("zoo:mixtral-8x7b", degrees, dims={"num_layers": 2}, cache_dir=cache_dir).plan

    assert plan.summary.startswith(words)
    assert plan.simulated is not None
    assert ("ep communication" in dict(plan.simulated.parts)) == (degrees.ep > 1)


def test_what_the_busiest_stage_computes_beyond_the_mean_is_imbalance(cache_dir: Path) -> None:
    """The last of two stages has the logits, too; with one stage there is none, and the parts add up to the step."""
    found = [
        autopar.predict("zoo:gpt2", degrees, dims=DIMS["gpt2"], cache_dir=cache_dir)
        for degrees in (Degrees(pp=2, global_batch=4), Degrees(dp=2, global_batch=4))
    ]

    cut, whole = (dict(each.plan.simulated.parts) for each in found if each.plan.simulated is not None)

    compute = [stage.compute_seconds for stage in found[0].timeline.stages]
    assert cut["compute"] == pytest.approx(fmean(compute))
    assert cut["imbalance"] == pytest.approx(max(compute) - fmean(compute))
    assert sum(cut.values()) == pytest.approx(found[0].timeline.step_seconds)
    assert "imbalance" not in whole


def _role(name: str, size: int, role: str, *, experts: bool) -> AxisRole:
    return AxisRole(Axis(name, size, 1), role, 1, in_part=False, sequence_parallel=True, experts=experts)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ([_role("a", 4, "dp", experts=True), _role("b", 2, "dp", experts=True)], "dp=8 (zero-1, ep=8) × pp=2"),
        ([_role("a", 4, "dp", experts=False), _role("b", 2, "dp", experts=True)], "dp=8 (zero-1, ep=2) × pp=2"),
        (
            [_role("a", 4, "dp", experts=True), _role("b", 2, "tp", experts=True)],
            "dp=4 (zero-1, ep=4) × tp=2 (sequence parallel, ep=2) × pp=2",
        ),
        ([_role("a", 4, "cp", experts=True)], "dp=1 × cp=4 (zero-1, ep=4) × pp=2"),
        ([replace(_role("a", 4, "cp", experts=False), context="ring")], "dp=1 × cp=4 (ring, zero-1) × pp=2"),
        ([_role("a", 4, "ep", experts=True)], "dp=1 × ep=4 × pp=2"),
    ],
)
def test_axes_of_any_role_may_divide_experts(roles: list[AxisRole], words: str) -> None:
    """Of each role the axes that do count; those that do nothing else have the word for themselves."""
    assert summarise_roles(two_stage_plan(), roles).summary.startswith(f"{words}, ")


def test_expert_parameters_are_recognised_by_their_ops(tmp_path: Path) -> None:
    """A kernel over time (also written as products and sums), a position table and per-head matrices are none."""
    g = Builder("speech")
    x = g.input("x", ("batch", 6, 8))
    scores = g.op("MatMul", x, g.parameter("router.weight", (8, 5)), name="scores")
    chosen, _ = g.ops("TopK", scores, g.constant((2,)), names=("chosen", "expert"), axis=-1)
    total = g.op("ReduceSum", chosen, g.constant((2,)), name="total")
    x = g.op("Mul", x, total, name="weighted")
    x = g.op("Conv", x, g.parameter("conv.weight", (6, 6, 3)), name="conv", pads=(1, 1))
    x = g.op("Add", x, g.parameter("positions.weight", (1, 6, 8)), name="add")
    x = g.op("Unsqueeze", x, g.constant((1,)), name="rows")
    x = g.op("MatMul", x, g.parameter("heads.weight", (4, 8, 8)), name="heads")
    x = g.op("ReduceSum", x, g.constant((1,)), name="merged", keepdims=1)
    turned = g.op("Transpose", g.parameter("experts.weight", (5, 2, 8)), name="turned", perm=(0, 2, 1))
    x = g.op("MatMul", x, turned, name="y")
    path = tmp_path / "speech.onnx"
    path.write_bytes(g.model({x: ("batch", 5, 6, 2)}).SerializeToString())

    found = experts_of(open_workload(path, mode="infer").folded(6))

    assert found == {"experts.weight"}
    assert experts_of(folded("mixtral-8x7b")) == {
        f"layers.{layer}.moe.{name}.weight" for layer in (0, 1) for name in ("gate", "up", "down")
    }
    assert not experts_of(folded("gpt2"))


def test_a_depthwise_kernel_is_no_expert(tmp_path: Path) -> None:
    """A state-space layer has a kernel [channels, 1, taps], which exporters turn before they convolve with it."""
    g = Builder("mamba")
    x = g.input("x", ("batch", 8, 16))
    taps = g.op("Unsqueeze", g.parameter("conv.weight", (8, 1, 4)), g.constant((0,)), name="taps")
    windows = g.op("Reshape", x, g.constant((0, 8, 4, 4)), name="windows")
    mixed = g.op("ReduceSum", g.op("Mul", windows, taps, name="weighted"), g.constant((3,)), name="mixed", keepdims=0)
    x = g.op("MatMul", mixed, g.parameter("out.weight", (4, 16)), name="y")
    path = tmp_path / "mamba.onnx"
    path.write_bytes(g.model({x: ("batch", 8, 16)}).SerializeToString())

    assert experts_of(open_workload(path, mode="infer").folded(6)) == frozenset()


@pytest.mark.parametrize("layer", ["MatMul", "GRU"])
def test_the_batch_may_be_another_dim_than_the_first(layer: str, tmp_path: Path, cache_dir: Path) -> None:
    """Data parallelism of a time-major model splits dim 1 of activations, of the result [T, 1, B, H] of a GRU dim 2."""
    g = Builder("time-major")
    x = g.input("x", (6, "batch", 8))
    if layer == "GRU":
        weights = [g.parameter(f"gru.{name}", (1, 24, 8)) for name in ("w", "r")]
        x, _ = g.ops("GRU", x, *weights, names=("y", "last"), hidden_size=8)
        shape: tuple[int | str, ...] = (6, 1, "batch", 8)
    else:
        x = g.op("Relu", g.op("MatMul", x, g.parameter("w", (8, 8)), name="h"), name="y")
        shape = (6, "batch", 8)
    path = tmp_path / "model.onnx"
    path.write_bytes(g.model({x: shape}).SerializeToString())

    plan = autopar.predict(path, Degrees(dp=2, global_batch=4), mode="infer", cache_dir=cache_dir).plan

    assert plan.summary.startswith("dp=2 × pp=1")
