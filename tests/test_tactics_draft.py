"""What tactics say when they cannot be applied, and what they report when they can."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from autopar.cli import main
from autopar.errors import AutoparError, TacticError
from autopar.models.builder import Builder
from autopar.partitioning import Partition, as_mesh, partition_steps
from autopar.plan import Plan, StagePlan
from autopar.report.partitioning import format_partition
from autopar.sharding import Mesh
from autopar.simulate.timeline import MemoryPeak, StageTimeline, Timeline
from autopar.tactics import (
    Automatic,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Megatron,
    Offload,
    Pipeline,
    Recompute,
    Replicate,
    SequenceParallel,
    Shard,
    Tactic,
    ZeRO,
    format_schedule,
)
from autopar.tactics.draft import Draft
from autopar.tactics.state import PINNED, Decided
from autopar.tactics.terms import passes_terms
from autopar.workload import Workload, open_workload
from tests.tactic_models import chain, decoder, draft

GOLDEN = Path(__file__).parent / "golden"
MESH = Mesh.of(b=4, m=2)
TINY = {"num_layers": 4, "hidden": 16, "heads": 4, "seq": 8, "vocab": 24}

GOLDEN_SCHEDULE: Sequence[Tactic] = [
    DataParallel("b"), Megatron("m"), SequenceParallel("m"), ZeRO(3, "b"), Shard({"embed.tokens.weight": 1}, "b"),
    Pipeline(2, microbatches=2), Recompute("full", (0,)),
]  # fmt: skip


def _draft(cache_dir: Path, mesh: Mesh = MESH) -> Draft:
    return draft(decoder(4), mesh, 16, cache_dir)


@pytest.mark.parametrize(
    ("mesh", "tactic", "message"),
    [
        (MESH, DataParallel("x"), "there is no mesh axis 'x'"),
        (MESH, Replicate("embed", "x"), "there is no mesh axis 'x'"),
        (MESH, Automatic(("x",)), "there is no mesh axis 'x'"),
        (Mesh.of(b=3), DataParallel("b"), "dim 0 of 'tokens' (16, 16) cannot be divided over b of 3"),
        (Mesh.of(b=3), ContextParallel("b"), "dim 1 of 'tokens' (16, 16) cannot be divided over b of 3"),
        (Mesh.of(b=3), Megatron("b"), "no pair of products can be split over b"),
        (Mesh.of(b=5), Shard({"embed": 0}, "b"), "dim 0 of 'embed' (128, 64) cannot be divided over b of 5"),
        (MESH, Shard({"nothing": 0}, "b"), "no value is called 'nothing'"),
        (MESH, Shard({lambda value: False: 0}, "b"), "no value satisfies the predicate"),
        (MESH, Shard({"embed": 2}, "b"), "'embed' has no dim 2"),
        (MESH, Shard({"embed": -3}, "b"), "'embed' has no dim -3"),
        (MESH, Shard({"layers.1.w1.weight": 0}, "b"), "but not of 'layers.0.w1.weight' of an equal block"),
        (MESH, Replicate("layers.[01].w1.weight"), "of an equal block"),
        (MESH, ZeRO(4, "b"), "ZeRO has no stage 4"),
        (MESH, ExpertParallel("m"), "no parameter holds one matrix per expert"),
        (MESH, Pipeline(9), "4 layers and 2 other blocks cannot be cut into 9 stages"),
        (MESH, Pipeline(0), "a pipeline without stages"),
        (MESH, Pipeline(()), "a pipeline without stages"),
        (MESH, Pipeline((1, 2)), "stages of 1, 2 blocks do not make the 6 blocks of the model"),
        (MESH, Pipeline((7, -1)), "stages of 7, -1 blocks do not make"),
        (MESH, Pipeline((1, 2, 3), "interleaved", chunks=2), "3 stages in chunks of 2"),
        (MESH, Pipeline(2, chunks=0), "a pipeline of 0 chunks"),
        (MESH, Pipeline(2, "2f2b"), "there is no schedule '2f2b'"),
        (MESH, Pipeline(2, "forward-only"), "schedule forward-only does not go with mode train"),
        (MESH, Pipeline(2, "1f1b", chunks=2), "schedule 1f1b runs one stage per group of devices, not 2"),
        (MESH, Pipeline(2, microbatches=3), "3 microbatches, after 1 were settled"),
        (MESH, Recompute("some"), "recompute 'some'"),
        (MESH, Recompute("full", (1,)), "there is no stage 1"),
        (MESH, Offload("parameters"), "offload 'parameters'"),
        (MESH, Offload("optimizer", (3,)), "there is no stage 3"),
        (MESH, Offload("optimizer=0"), "offload 'optimizer=0'"),
        (MESH, Offload("optimizer*2 none*1", (0,)), "offload 'optimizer*2 none*1' is for fewer blocks than the 6"),
        (MESH, Automatic(("b",), "memory"), "objective 'memory'"),
        (MESH, Automatic(("b",), method="guess"), "there is no solver 'guess'"),
    ],
)
def test_a_tactic_that_cannot_be_applied_says_why_and_changes_nothing(
    mesh: Mesh, tactic: Tactic, message: str, cache_dir: Path
) -> None:
    found = _draft(cache_dir, mesh)
    before = found.plan()

    with pytest.raises(AutoparError) as caught:
        found.apply(tactic)

    assert message in str(caught.value)
    assert caught.value.hint
    assert found.plan() == before
    assert not found.steps


def test_what_an_earlier_tactic_decided_is_refused_with_its_number(cache_dir: Path) -> None:
    found = _draft(cache_dir)
    for tactic in (Shard({"embed": 0}, "m"), Replicate("layers.*.wo")):
        found.apply(tactic)

    again = found.apply(Shard({"embed": 0}, "m"))
    other = found.apply(Shard({"embed": 1, "layers.*.wo": 0}, "m"))
    pinned = found.apply(Replicate("embed", "m"))

    assert again.refused == ()
    assert [str(refused) for refused in other.refused] == [
        "embed, along dim 1 over m: tactic 1 split it along dim 0",
        "layers.2.wo, along dim 0 over m: tactic 2 pinned it",
    ]
    assert [str(refused) for refused in pinned.refused] == ["embed, whole over m: tactic 1 split it along dim 0"]


def test_a_pattern_is_refused_where_it_cannot_be_divided(cache_dir: Path) -> None:
    step = _draft(cache_dir, Mesh.of(b=32)).apply(Shard({"*.w1.weight": 0, "tokens": 0}, "b"))

    assert [str(refused) for refused in step.refused] == ["tokens, along dim 0 over b: it cannot be divided"]


@pytest.mark.parametrize(
    ("schedule", "reasons"),
    [
        ((), {"embed": "no tactic reached it", "layers.2.w1.weight": "no tactic reached it"}),
        ((Replicate("embed"),), {"embed": "pinned"}),
        ((DataParallel("b"),), {"layers.2.w1.weight": "the ops that read it need all of it"}),
        ((Megatron("m"), DataParallel("b")), {"layers.2.norm1.bias": "the ops that read it need all of it"}),
    ],
)
def test_why_parameters_are_whole(schedule: Sequence[Tactic], reasons: dict[str, str], cache_dir: Path) -> None:
    found = _draft(cache_dir)
    for tactic in schedule or (Recompute("none"),):
        found.apply(tactic)

    said = {item.value: item.reason for item in found.steps[-1].unsplit if item.axis == "b"}

    assert {name: said.get(name) for name in reasons} == reasons


def test_dims_that_do_not_divide_are_a_reason(cache_dir: Path) -> None:
    found = _draft(cache_dir, Mesh.of(b=128))
    step = found.apply(Recompute("none"))

    said = {item.value: item.reason for item in step.unsplit}

    assert said["layers.2.wo"] == "no dim of (64, 64) can be divided by 128 more"
    assert said["embed"] == "no tactic reached it"


def test_a_conflict_names_both_decisions_and_the_earlier_one_wins(cache_dir: Path) -> None:
    """The columns of w2 come first, so the rows of h are gathered before the second product."""
    found = draft(chain(), MESH, 256, cache_dir)
    found.apply(Shard({"y": 1}, "b"))
    step = found.apply(Shard({"h": 0}, "b"))

    assert [str(conflict) for conflict in step.conflicts] == [
        "y: h is split along dim 0 over b, which does not go with dim 1 of y, split earlier"
    ]
    assert [(str(item.collective), item.count) for item in step.traffic] == [("all_gather", 1)]


def test_a_product_with_itself_keeps_the_rows_of_the_left(cache_dir: Path) -> None:
    """As Shardy does; PartIR stops there."""
    g = Builder("square")
    x = g.input("x", ("batch", 8))
    g.op("MatMul", x, g.op("Transpose", x, name="columns", perm=(1, 0)), name="y")
    model = Workload(g.name, g.model({"y": ("batch", "batch")}), "infer", {}, "auto", "adam")
    found = draft(model, MESH, 256, cache_dir)

    step = found.apply(DataParallel("b"))

    assert [str(conflict) for conflict in step.conflicts] == [
        "y: columns is split along dim 1 over b, which does not go with dim 0 of x, split earlier"
    ]
    assert [(str(item.collective), item.count) for item in step.traffic] == [("all_gather", 1)]
    pinned = draft(model, MESH, 256, cache_dir)
    pinned.apply(Replicate("columns"))
    assert pinned.apply(DataParallel("b")).conflicts == ()


def test_pipelines_cut_the_chain_and_deal_stages_to_groups(cache_dir: Path) -> None:
    def stages(tactic: Pipeline, samples: int = 16) -> list[StagePlan]:
        found = _draft(cache_dir)
        found.num_microbatches = 4
        found.apply(tactic)
        return list(found.plan().stages)

    # 4 layers between the embedding and the head
    assert [stage.blocks for stage in stages(Pipeline(2))] == [(0, 3), (3, 6)]
    assert [stage.blocks for stage in stages(Pipeline((1, 5)))] == [(0, 1), (1, 6)]
    interleaved = stages(Pipeline(2, "interleaved", chunks=2))
    assert [stage.devices for stage in interleaved] == [(0, 8), (8, 16), (0, 8), (8, 16)]
    v = stages(Pipeline(2, "zb-v", chunks=2))
    assert [stage.devices for stage in v] == [(0, 8), (8, 16), (8, 16), (0, 8)]


def test_stages_that_recompute_have_to_be_there(cache_dir: Path) -> None:
    found = _draft(cache_dir)
    found.apply(Pipeline(2))
    found.apply(Recompute("full", (1,)))

    with pytest.raises(TacticError, match="1 stages, after stage 1 was told what to recompute"):
        found.apply(Pipeline(1))
    assert [stage.recompute for stage in found.plan().stages] == ["none", "full*2 none*1"]


@pytest.mark.parametrize("mesh", ["", "b", "b=", "=2", "b=0", "b=2,b=2", "b=two", "b=-1", "1=2"])
def test_what_is_no_mesh(mesh: str) -> None:
    with pytest.raises(AutoparError, match="mesh"):
        as_mesh(mesh)


def test_inference_has_no_backward(cache_dir: Path) -> None:
    found = partition_steps(
        "zoo:gpt2", "b=2,m=2", [DataParallel("b"), Megatron("m"), Pipeline(2, microbatches=2)],
        mode="infer", dims=TINY, global_batch=8, cache_dir=cache_dir,
    )  # fmt: skip

    assert found.plan.schedule == "forward-only"
    # Two products a layer, 4 layers; the rest is split along the batch.
    assert [(str(t.collective), t.axis, t.count) for t in found.steps[1].traffic] == [("all_reduce", "m", 8)]
    with pytest.raises(TacticError, match="without a backward pass"):
        partition_steps("zoo:gpt2", "b=2", [Recompute()], mode="infer", dims=TINY, global_batch=8, cache_dir=cache_dir)


def test_three_axes(cache_dir: Path) -> None:
    schedule: list[Tactic] = [
        DataParallel("d"), ContextParallel("c"), Megatron("t", vocabulary=True), SequenceParallel("t"),
        ZeRO(1, "d"), ZeRO(1, "c"),
    ]  # fmt: skip
    found = partition_steps(
        "zoo:gpt2", Mesh.of(d=2, c=2, t=2), schedule, dims=TINY, global_batch=8, cache_dir=cache_dir
    )

    block = next(block for block in found.plan.blocks if len(block.instances) == 4)
    placed = {state.value.split(".", 2)[2]: state.placement for state in block.states}
    assert (placed["attn.q.weight"], placed["attn.out.weight"]) == ("RRS(1)", "RRS(0)")
    assert {arrival.placement for arrival in block.arrivals} >= {"S(0)S(1)S(1)"}


def _golden(cache_dir: Path) -> Partition:
    """Return a partition with times and bytes of its own, which no change of the simulator changes."""
    found = partition_steps(
        "zoo:gpt2", "b=2,m=2", GOLDEN_SCHEDULE, dims=TINY, global_batch=8, stack="ideal", cache_dir=cache_dir
    )
    memory = MemoryPeak(7e9, 0.5, "B0", ())
    stage = StageTimeline(0, 0.5, 0.08, 0.0, 0.2, 0.1, 0.05, 0.05, 0.02, 0.3, 0.2, memory)
    steps = [replace(step, seconds=1e-3 * n, peak_bytes=1e9 * n) for n, step in enumerate(found.steps, start=1)]
    return replace(found, steps=tuple(steps), timeline=Timeline(7e-3, (stage,)))


def test_the_report_is_the_golden_one(cache_dir: Path) -> None:
    """Compared whole: a change of the text is a change of the golden file."""
    assert format_partition(_golden(cache_dir)) == (GOLDEN / "partition.txt").read_text()


def test_the_command_prints_the_report_and_writes_the_plan(
    cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "schedule.yaml", tmp_path / "out"
    file.write_text(format_schedule(GOLDEN_SCHEDULE))
    dims = [word for name, size in TINY.items() for word in ("--set", f"{name}={size}")]
    command = ["partition", "zoo:gpt2", "--mesh", "b=2,m=2", "--tactics", str(file), "--global-batch", "8", *dims]

    code = main([*command, "--cache-dir", str(cache_dir), "-o", str(folder)])
    printed = capsys.readouterr().out
    main([*command, "--cache-dir", str(cache_dir), "--json"])

    assert code == 0
    found = partition_steps("zoo:gpt2", "b=2,m=2", GOLDEN_SCHEDULE, dims=TINY, global_batch=8, cache_dir=cache_dir)
    assert printed == format_partition(found)
    assert Plan.load(folder / "plan.json") == Plan.from_json(capsys.readouterr().out.encode())

    main(["explain", str(folder / "plan.json"), "--tactics", "--cache-dir", str(cache_dir)])
    file.write_text(capsys.readouterr().out)
    main([*command, "--cache-dir", str(cache_dir), "--json"])
    assert Plan.from_json(capsys.readouterr().out.encode()).blocks == found.plan.blocks


def test_the_command_has_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.yaml"
    file.write_text("- megatron: {axis: m, heads: 2}\n")

    code = main(["partition", "zoo:gpt2", "--mesh", "m=2", "--tactics", str(file)])

    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err == (
        f"error: {file}, tactic 1: megatron: Object contains unknown field `heads`\n"
        "hint: its fields are axis, vocabulary\n"
    )


@pytest.mark.parametrize("method", ["auto", "mcts"])
def test_automatic_keeps_what_was_decided_and_makes_steps_no_slower(method: str, cache_dir: Path) -> None:
    found = draft(decoder(4), MESH, 16, cache_dir)
    before = found.apply(Replicate("embed", "b"))
    tactic = Automatic(("b",), method=method, time_limit=3.0)

    after = found.apply(tactic)

    assert after.seconds <= before.seconds
    assert found.state.split("embed", 0) == Decided(PINNED, 0, 0)
    assert all(axis == "b" for _, axis, _ in after.split)


def test_the_tree_search_finds_something_better_and_the_same_every_time(cache_dir: Path) -> None:
    plans, seconds = [], []
    for _ in range(2):
        found = draft(chain(), Mesh.of(b=4), 1 << 16, cache_dir)
        seconds.append(found.apply(Pipeline(1)).seconds)
        seconds.append(found.apply(Automatic(("b",), method="mcts", seed=1)).seconds)
        plans.append(found.plan())

    assert seconds[1] < seconds[0]
    assert plans[0] == plans[1]


def test_sharding_parameters_does_not_ask_all_ops_each_time(cache_dir: Path) -> None:
    """What ops pass on would be found once for each of five parameters."""
    found = _draft(cache_dir)
    found.decide(DataParallel("b"))

    with patch("autopar.tactics.propagate.passes_terms", wraps=passes_terms) as asked:
        found.decide(ZeRO(3, "b"))

    assert asked.call_count <= 1


def test_pairs_across_borders_of_blocks_are_split(cache_dir: Path) -> None:
    """An MLP has one product a block: the first is split by columns, all others by rows, and shards cross borders.

    Products split by rows leave terms.
    """
    found = _mlp(5, Mesh.of(m=2), cache_dir)

    found.apply(Megatron("m"))

    splits = [found.state.split(f"layers.{index}.weight", 0) for index in range(5)]
    assert [split and split.dim for split in splits] == [1, 0, 0, 0, 0]
    lying = {op.op: op.outputs for block in found.plan().blocks for op in block.ops}
    assert lying["layers.0"] == ("S(1)",)
    assert lying["logits"] == ("P",)


@pytest.mark.parametrize(
    ("num_layers", "size", "message", "hint"),
    [
        (5, 3, "dim 1 of 'layers.0.weight' (16, 16) cannot be divided over m of 3", "divisible by 3"),
        (1, 2, "if 'layers.0.weight' is split by columns, no other product with a parameter sums up", "another tactic"),
    ],
)
def test_why_there_is_no_pair_is_said(num_layers: int, size: int, message: str, hint: str, cache_dir: Path) -> None:
    found = _mlp(num_layers, Mesh.of(m=size), cache_dir)

    with pytest.raises(TacticError, match=re.escape(message)) as caught:
        found.apply(Megatron("m"))

    assert hint in caught.value.hint


def test_matrices_that_earlier_tactics_decided_are_no_pair(cache_dir: Path) -> None:
    found = _mlp(2, Mesh.of(m=2), cache_dir)
    found.apply(Shard({"layers.*.weight": 0}, "m"))

    with pytest.raises(TacticError, match="earlier tactics decided how each matrix lies on it"):
        found.apply(Megatron("m"))


def _mlp(num_layers: int, mesh: Mesh, cache_dir: Path) -> Draft:
    workload = open_workload("zoo:mlp-xs", dims={"num_layers": num_layers, "hidden": 16})
    return draft(workload, mesh, 8, cache_dir)
