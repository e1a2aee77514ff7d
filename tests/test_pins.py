"""Pins: read as written, held against the job, followed by every plan, and never better than the whole space."""

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.api import plan_task
from autopar.cluster import load_cluster
from autopar.configuration import configurations
from autopar.describe.axis_roles import roles_of_axes
from autopar.errors import PinError
from autopar.formulate.data_major import is_data_major
from autopar.formulate.tables import Decision
from autopar.least_memory_plan import thriftiest
from autopar.pins import Choices, Pins, broken, load_pins, pins_from, pins_of, read_pins
from autopar.pins.levels import levels_of
from autopar.pins.space import Frame, pinned_space
from autopar.plan import Plan, SearchReport
from autopar.request import JobRequest
from autopar.search.settings import DEFAULT_SETTINGS
from autopar.sharding import Shard, parse_placements
from autopar.task import Effort, Task, pinned, prepare
from tests.formulations import DIMS
from tests.shares import one_in
from tests.sizes import short_task

CLOSE = 3e-6
"""Relative: placement problems are proven optimal to 1e-6 each, and a plan is compared with another one."""


@cache
def _task(name: str = "gpt2", gpus: int = 8, mode: str = "train") -> Task:
    return prepare(JobRequest(f"zoo:{name}", gpus=gpus, global_batch=16, mode=mode, dims=DIMS[name], stack="ideal"))


def _solve(pins: dict[str, Any], name: str = "gpt2", gpus: int = 8) -> tuple[Plan, Task]:
    task = pinned(_task(name, gpus), pins_from(pins))
    return plan_task(task, Effort(top_k=1)), task


@cache
def _free(name: str = "gpt2", gpus: int = 8) -> Plan:
    return plan_task(_task(name, gpus), Effort(top_k=1))


def _searched(plan: Plan) -> SearchReport:
    assert plan.search is not None
    return plan.search


FILES: list[dict[str, Any]] = [
    {"pin": {"stages": 2}},
    {"pin": {"stages": [2, 4], "microbatches": 8, "schedule": "1f1b"}, "forbid": {"recompute": "full"}},
    {"pin": {"mesh": "2x2", "zero": [0, 1]}},
    {"pin": {"mesh": {"dp": 2, "shard": 4}, "hybrid_zero": 3, "context": ["ring", "gather:window"]}},
    {"pin": {"mesh": {"dp": 2, "tp": 2}, "within_node": "tp"}},
    {"pin": {"tp": 4, "sequence_parallel": True}, "forbid": {"dp": [1, 2], "sequence_parallel": False}},
    {"pin": {"dp": 4, "tp": [1, 2], "recompute": {"0-1": "full", "2-5": ["none", "selective"]}}},
    {"pin": {"microbatch_size": [1, 2], "boundaries": [2, 4]}, "forbid": {"mesh": ["2x2", "4x1"], "zero": 3}},
    {"pin": {"tactics": [{"shard": {"inputs": {"*.weight": 0}, "axis": "inner"}}, {"replicate": {"pattern": "*.b"}}]}},
    {"forbid": {"tactics": [{"shard": {"inputs": {"w": 1}, "axis": "outer"}}], "boundaries": 3}},
]


def test_stages_with_meshes_of_their_own_are_left_out_or_alone() -> None:
    without, alone = (pinned(_task(), pins_from({"pin": {"unequal": each}})) for each in (False, True))

    assert _task().unequal is not None
    assert (without.unequal, without.space) == (None, _task().space)
    assert (alone.unequal, alone.space) == (_task().unequal, [])
    plan = plan_task(alone, Effort(top_k=1))
    assert plan.variants
    for content in ({"pin": {"unequal": False}}, {"forbid": {"unequal": True}}):
        said = broken(plan, pins_from(content), alone.workload.folded(plan.microbatch))
        assert said == ("stages have meshes of their own",)


@pytest.mark.parametrize("content", FILES)
def test_pins_read_as_they_were_written(content: dict[str, Any]) -> None:
    pins = pins_from(content)

    assert pins.to_mapping() == content
    assert pins_from(pins.to_mapping()) == pins


@pytest.mark.parametrize("content", FILES)
def test_a_pin_can_be_dropped_on_its_own(content: dict[str, Any]) -> None:
    """One item less each time, in any order; without all of them nothing is pinned."""
    pins = pins_from(content)

    for item in pins.items:
        assert [other.text for other in pins.without(item).items] == [
            other.text for other in pins.items if other != item
        ]
    assert not pins.without(*pins.items)


def test_a_schedule_of_tactics_is_pinned_whole() -> None:
    """What it says of stages and recompute becomes pins of stages and recompute; the rest of it is placements."""
    schedule = [
        {"data_parallel": {"axis": "outer"}},
        {"pipeline": {"stages": [2, 4], "microbatches": 4}},
        {"recompute": {"what": "full*1 none*1", "stages": [0]}},
    ]

    pins = pins_from(schedule)

    assert pins.to_mapping() == {
        "pin": {
            "stages": 2,
            "microbatches": 4,
            "chunks": 1,
            "boundaries": 2,
            "recompute": {"0-0": "full", "1-1": "none", "2-5": "none"},
            "tactics": [{"data_parallel": {"axis": "outer"}}],
        }
    }


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("7", "not a mapping", "pin:"),
        ("layers: 4", "'layers' is neither pin nor forbid, nor a decision", "there are pin, forbid, stages"),
        ("{stages: 4, tpp: 8}", "'tpp' is neither", "did you mean tp?"),
        ("{stages: 4, tp: [2, 4], forbid: {zero: 3}}", "stages, tp beside forbid", "pin: {stages: 4, tp: [2, 4]}"),
        ("pins: {stages: 4}", "'pins' is neither", "did you mean pin?"),
        ("pin: {stage: 4}", "there is no decision 'stage'", "did you mean stages?"),
        ("pin: {stages: four}", "stages: 'four' is not a whole number from 1", "a number"),
        ("pin: {stages: []}", "stages has no value", "a list"),
        ("pin: {stages: 0}", "0 is not a whole number from 1", ""),
        ("pin: {schedule: 1f1p}", "there is no '1f1p'", "did you mean 1f1b?"),
        ("pin: {recompute: fully}", "there is no 'fully'", "did you mean full?"),
        ("pin: {recompute: {3-1: full}}", "'3-1' are no blocks", "first and last"),
        ("pin: {mesh: 8xx}", "'8xx' is no mesh", "8x8"),
        ("pin: {mesh: {outer: two}}", "is no mesh", "8x8"),
        ("pin: {mesh: 2x2x2x1}", "'2x2x2x1' has more than 3 axes", "dp, ep, cp, tp"),
        ("pin: {sequence_parallel: yes please}", "'yes please' is neither true nor false", "write true"),
        ("pin: {stages: 2, stages: 4}", "line 1: stages is given twice", "example"),
        ("forbid: {tactics: [{megatron: {axis: m}}]}", "only shard and replicate can be forbidden", "zero"),
        ("pin: {tactics: [{megatrom: {axis: m}}]}", "there is no tactic 'megatrom'", "megatron"),
        ("pin: {tactics: megatron}", "'megatron' is no list of tactics", "explain --tactics"),
        ("pin: {tactics: [{automatic: {axes: [m]}}]}", "automatic is what the solver does anyway", "leave it out"),
        ("pin: {stages: 2, tactics: [{pipeline: {stages: 4}}]}", "stages is pinned twice", "once"),
        ("pin: [", "line 2", "example"),
    ],
)
def test_a_bad_file_has_one_clear_error(text: str, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "pins.yaml"
    path.write_text(text + "\n")

    with pytest.raises(PinError) as caught:
        load_pins(path)

    assert message in caught.value.args[0]
    assert str(path) in caught.value.args[0]
    assert hint in caught.value.hint


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(PinError, match="No such file"):
        load_pins(tmp_path / "absent.yaml")
    with pytest.raises(PinError, match="not a text file"):
        load_pins(tmp_path / "binary")


@pytest.mark.parametrize(
    ("word", "decision"), [("pp", "stages"), ("interleave", "chunks"), ("microbatch", "microbatch_size")]
)
def test_words_of_degrees_lead_to_decisions(word: str, decision: str) -> None:
    """`predict` says pp where pins say stages: the hint knows it, though tp is nearer by its letters."""
    with pytest.raises(PinError, match=f"'{word}' is neither") as caught:
        pins_from({word: 2})

    assert caught.value.hint.startswith(f"did you mean {decision}? ")


def test_a_pin_in_place_of_its_file_is_told_where_it_goes() -> None:
    """Degrees are no option of a search; what was typed is in the hint as a file has it."""
    with pytest.raises(PinError, match="'tp=16' is no file of pins") as caught:
        load_pins("tp=16")

    assert caught.value.hint == "write 'tp: 16' into a YAML file and give that"


@pytest.mark.parametrize(
    ("pins", "message", "hint"),
    [
        ({"stages": 9}, "stages: 9 cannot occur: 8 GPUs", "there are 1, 2, 3, 4, 5"),
        ({"microbatches": 3}, "3 does not divide the batch of 16", "2 does"),
        ({"microbatch_size": 5}, "5 does not divide the batch of 16", "4 does"),
        ({"mesh": "3x2"}, "has 6 devices, a stage of 8 GPUs never has", "2, 4, 8"),
        ({"tp": 3}, "tp: 3 divides no stage", "2, 4, 8"),
        ({"schedule": "forward-only"}, "schedule: forward-only cannot occur", "1f1b"),
        ({"boundaries": 99}, "no stage can begin at block 99", "1 to "),
        ({"recompute": {"0-99": "full"}}, "there is no block 99", "0 to "),
        ({"zero": 4}, "there is no level 4", "0, 1, 2 and 3"),
        ({"ep": 2}, "the model has no experts", "leave it out"),
        ({"mesh": {"dp": 2, "ep": 4}}, "the model has no experts", "leave it out"),
        ({"sequence_parallel": True}, "no axis is named tp", "tp: [2, 4, 8]"),
        ({"tp": 4, "sequence_parallel": True}, "6 positions do not divide over tp of 4", "divides 6"),
        ({"mesh": {"cp": 2, "tp": 2}, "sequence_parallel": True}, "6 positions do not divide over tp of 2", "with cp"),
        ({"unequal": True, "tp": 2}, "'pin tp: 2' is about equal ones", "drop one"),
        ({"mesh": "2x2", "dp": 2}, "mesh and degrees are both given", "{dp: 4, tp: 2}"),
        ({"mesh": "2x2", "stages": 4}, "keeps to 'pin stages: 4' and 'pin mesh: 2x2'", "drop or change"),
        ({"mesh": "2x2", "within_node": "tp"}, "there is no mesh axis 'tp'", "inner, outer"),
        ({"tactics": [{"shard": {"inputs": {"layer.*.wight": 0}, "axis": "inner"}}]}, "no value is called", "nearest"),
        ({"tactics": [{"shard": {"inputs": {"*": 0}, "axis": "inner"}}]}, "has no dim 0", "dims count from 0"),
        ({"tactics": [{"data_parallel": {"axis": "batch"}}]}, "there is no mesh axis 'batch'", "axes are"),
    ],
)
def test_values_that_cannot_occur_are_refused(pins: dict[str, Any], message: str, hint: str) -> None:
    """With what can; pins that exclude each other are named, and no others."""
    with pytest.raises(PinError) as caught:
        pinned(_task(), pins_from({"pin": {"microbatches": 4, **pins} if "mesh" in pins else pins}))

    assert message in caught.value.args[0]
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ({"forbid": {"mesh": {"tp": 8}}}, "forbid mesh: there is no mesh axis 'tp'", "mesh: 8, or a degree"),
        (
            {"pin": {"tp": 2}, "forbid": {"tp": [2, 4]}},
            "keeps to 'pin tp: 2' and 'forbid tp: [2, 4]'",
            "drop or change",
        ),
        ({"forbid": {"dp": [1, 2, 4, 8], "stages": 2}}, "keeps to 'forbid dp: [1, 2, 4, 8]'", "drop or change it"),
        ({"forbid": {"tp": 2}, "pin": {"mesh": "2x2"}}, "mesh and degrees are both given", "{dp: 4, tp: 2}"),
        ({"forbid": {"ep": 1}}, "the model has no experts", "leave it out"),
        ({"forbid": {"sequence_parallel": [True, False]}}, "neither true nor false is left", "drop one"),
        (
            {"pin": {"recompute": "none", "stages": 2}, "forbid": {"recompute": "none"}},
            "'pin recompute: none' and 'forbid recompute: none' leave nothing for block 1",
            "drop one of them; what a block keeps is one of none, ",
        ),
        (
            {"pin": {"offload": "optimizer"}, "forbid": {"offload": ["optimizer"]}},
            "'pin offload: optimizer' and 'forbid offload: optimizer' leave nothing for block 0",
            "drop one of them",
        ),
    ],
)
def test_what_is_forbidden_is_held_against_the_job(content: dict[str, Any], message: str, hint: str) -> None:
    """Forbidding what there is not, or all there is, is no request that a plan could keep to."""
    with pytest.raises(PinError) as caught:
        pinned(_task(), pins_from(content))

    assert message in caught.value.args[0]
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "content", [{"pin": {"cp": [1, 2]}}, {"pin": {"mesh": {"cp": 2}, "stages": 1}}, {"forbid": {"cp": 1}}], ids=str
)
def test_where_there_is_no_sequence_none_is_split(content: dict[str, Any]) -> None:
    """Nothing is searched for a plan that cannot be: of samples and features alone, no axis has anything to do."""
    with pytest.raises(PinError, match="cp: the model has no sequence"):
        pinned(short_task("mlp-xs", 2), pins_from(content))

    assert pinned(short_task("mlp-xs", 2), pins_from({"pin": {"cp": 1}})).space
    assert pinned(short_task("gpt2", 2), pins_from(content)).space


def test_a_record_takes_tuples_only() -> None:
    with pytest.raises(PinError, match="stages=2 is no tuple") as caught:
        Choices(stages=2)  # type: ignore[arg-type]

    assert "stages=(2,)" in caught.value.hint


def test_inference_has_no_update_to_pin() -> None:
    for pins in ({"zero": 1}, {"recompute": "full"}):
        with pytest.raises(PinError, match="inference has neither"):
            pinned(_task("mlp-xs", 4, "infer"), pins_from({"pin": pins}))


FOLLOWED: list[dict[str, Any]] = [
    {"pin": {"stages": 2}},
    {"pin": {"stages": 4, "boundaries": [1, 3, 4]}},
    {"pin": {"stages": [2, 4]}, "forbid": {"boundaries": [1, 2], "schedule": "1f1b"}},
    {"pin": {"mesh": "4x2"}},
    {"pin": {"mesh": {"dp": 2, "tp": 4}}},
    {"pin": {"dp": 2, "tp": 2}},
    {"pin": {"tp": 1}},
    {"pin": {"dp": 1, "tp": 8, "stages": 1}},
    {"pin": {"cp": 2, "dp": 4}},
    {"pin": {"dp": 2, "tp": 1, "cp": 1, "stages": 1}},
    {"pin": {"mesh": {"dp": 4, "tp": 2}}, "forbid": {"mesh": {"tp": 2, "dp": 4}}},
    {"pin": {"tp": [2, 4], "sequence_parallel": True}},  # of 6 positions
    {"pin": {"tp": 4, "sequence_parallel": False}},
    {"forbid": {"sequence_parallel": True, "dp": 8}},
    {"forbid": {"dp": [4, 8], "cp": [2, 4, 8]}},
    {"forbid": {"tp": [2, 4, 8], "mesh": "8"}},
    {"pin": {"stages": 2, "schedule": "interleaved", "chunks": 2}},
    {"pin": {"mesh": {"dp": 2, "tp": 4}, "within_node": ["tp", "dp"]}},
    {"pin": {"unequal": False, "stages": [2, 4]}},
    {"forbid": {"unequal": False}},
    {"pin": {"microbatches": 16}},
    {"pin": {"microbatch_size": 8, "stages": [1, 2]}},
    {"pin": {"recompute": "full"}},
    {"pin": {"recompute": "selective", "stages": 2}},
    {"pin": {"stages": 2, "boundaries": 3, "recompute": {"0-2": "full", "3-5": "none"}}},
    {"forbid": {"recompute": ["none", "selective"]}},
    {"pin": {"zero": 0}},
    {"pin": {"zero": 1, "dp": 4}},
    {"pin": {"zero": 2, "dp": 8}},
    {"pin": {"zero": 3, "dp": 8}},
    {"pin": {"zero": [0, 3]}},
    {"forbid": {"zero": [2, 3], "stages": 8}},
    {"forbid": {"mesh": ["8", "4x2", "2x4"], "microbatches": [1, 2]}},
]


@pytest.mark.parametrize("content", one_in(5, FOLLOWED), ids=str)
def test_a_pinned_plan_keeps_to_its_pins(content: dict[str, Any]) -> None:
    """Read off the plan; it is never better than the bound of the whole space, nor than its own."""
    plan, task = _solve(content)
    assert plan.search is not None
    free = _free().search
    assert free is not None

    assert broken(plan, task.pins, task.workload.folded(plan.microbatch)) == ()
    assert plan.search.bound <= plan.objective
    assert free.bound <= plan.objective * (1 + CLOSE)
    assert plan.job.pins == content
    assert any(line.startswith(("pinned: ", "forbidden: ")) for line in plan.search.space)
    unequal = plan.search.configurations - len(task.space)  # of stages with meshes of their own
    assert 0 <= unequal <= DEFAULT_SETTINGS.unequal.most_counts


@pytest.mark.parametrize(
    "content",
    [
        {"pin": {"stages": 4}},
        {"pin": {"mesh": "2x2"}},
        {"pin": {"microbatches": 16}},
        {"pin": {"recompute": "full"}},
        {"pin": {"zero": 3, "dp": 8}},
        {"pin": {"tp": 8}},
        {"forbid": {"dp": 8}},
        {"forbid": {"mesh": {"dp": 8}}},
        {"forbid": {"mesh": "8"}},
    ],
    ids=str,
)
def test_the_check_sees_plans_that_do_not_keep_to_them(content: dict[str, Any]) -> None:
    """A plan that was solved under the opposite: the check is no formality."""
    plan, task = _solve({"pin": {"stages": 1, "microbatches": 2, "dp": 8, "recompute": "none", "zero": 0}})

    assert broken(plan, pins_from(content), task.workload.folded(plan.microbatch)) != ()


def test_the_check_tells_what_splits_the_sequence() -> None:
    """Context parallelism beside what is pinned, and sequence parallelism where it is forbidden."""
    cp, _ = _solve({"pin": {"stages": 1, "mesh": {"dp": 4, "cp": 2}}})
    renamed = replace(cp, mesh=(cp.mesh[0], replace(cp.mesh[1], name="inner")))
    tp, task = _solve({"pin": {"stages": 1, "mesh": {"dp": 4, "tp": 2}, "sequence_parallel": True}})

    def said(plan: Plan, content: dict[str, Any]) -> tuple[str, ...]:
        return broken(plan, pins_from(content), task.workload.folded(plan.microbatch))

    assert said(renamed, {"pin": {"cp": 1}}) == ("cp is 1, and axis inner is cp too",)
    assert said(renamed, {"forbid": {"cp": 2}}) == ("cp is 2",)
    assert said(tp, {"pin": {"sequence_parallel": True}}) == ()
    assert said(tp, {"pin": {"sequence_parallel": False}}) == ("axis tp splits the sequence between blocks",)
    assert said(tp, {"forbid": {"sequence_parallel": True}}) == ("axis tp splits the sequence between blocks",)
    whole, _ = _solve({"pin": {"stages": 1, "mesh": {"dp": 4, "tp": 2}, "sequence_parallel": False}})
    assert said(whole, {"pin": {"sequence_parallel": True}}) == ("axis tp does not split the sequence between blocks",)


@pytest.mark.parametrize(
    "content",
    [{"pin": {"cp": 1}}, {"pin": {"sequence_parallel": False}}, {"forbid": {"cp": [2, 4]}}],
    ids=str,
)
def test_the_sequence_is_whole_where_it_would_be_split(content: dict[str, Any]) -> None:
    """Of layers large enough that doing all on each device is slower."""
    task = prepare(JobRequest("zoo:gpt2", gpus=4, global_batch=8, dims={"num_layers": 2}))
    base = {"stages": 1, "dp": 1, "tp": 1}
    split = plan_task(pinned(task, pins_from({"pin": base})), Effort(top_k=1))
    assert any(own.role == "cp" for own in roles_of_axes(split.mesh, split.blocks, task.workload.folded(8)))

    own = pinned(task, pins_from({**content, "pin": {**content.get("pin", {}), **base}}))
    plan = plan_task(own, Effort(top_k=1))

    assert broken(split, own.pins, own.workload.folded(split.microbatch)) != ()
    assert broken(plan, own.pins, own.workload.folded(plan.microbatch)) == ()
    assert _searched(plan).least == plan.objective, "no better one was put aside"


@pytest.mark.parametrize(("content", "degree"), [({"pin": {"ep": 2}}, 2), ({"pin": {"ep": 1}}, 1)], ids=str)
def test_experts_are_split_as_pinned(content: dict[str, Any], degree: int) -> None:
    plan, task = _solve(content, "mixtral-8x7b", 4)
    folded = task.workload.folded(plan.microbatch)

    assert broken(plan, task.pins, folded) == ()
    assert prod(own.axis.size for own in roles_of_axes(plan.mesh, plan.blocks, folded) if own.experts) == degree
    assert broken(plan, pins_from({"forbid": {"ep": degree}}), folded) == (f"ep is {degree}",)


def test_axes_lie_within_nodes_where_pinned() -> None:
    """On 16 GPUs in nodes of 8 the major one of two axes does not, unless a stage has no more than a node."""
    task = prepare(JobRequest("zoo:gpt2", gpus=16, global_batch=16, dims=DIMS["gpt2"]))

    def meshes(content: dict[str, Any]) -> set[tuple[int, ...]]:
        return {own.mesh.shape for own in pinned(task, pins_from(content)).space}

    wanted = {"mesh": ["2x8", "2x4"]}

    assert meshes({"pin": wanted}) == {(2, 8), (2, 4)}
    assert meshes({"pin": {**wanted, "within_node": "outer"}}) == {(2, 4)}
    assert meshes({"pin": {**wanted, "within_node": "inner"}}) == {(2, 8), (2, 4)}
    assert meshes({"pin": wanted, "forbid": {"within_node": "outer"}}) == {(2, 8)}


def test_tensor_parallelism_splits_all_blocks_where_none_repeats() -> None:
    """Two layers, of which the first and the last are kinds of their own: the pinned axis has matrices to split."""
    task = prepare(JobRequest("zoo:mlp-xs", gpus=4, global_batch=16, dims={"num_layers": 2, "hidden": 64}))
    pins = pins_from({"pin": {"stages": 2, "tp": 2}})

    plan = plan_task(pinned(task, pins), Effort(top_k=1))

    folded = task.workload.folded(plan.microbatch)
    assert {kind.count for kind in folded.kinds} == {1}
    assert broken(plan, pins, folded) == ()
    assert [(own.axis.name, own.role) for own in roles_of_axes(plan.mesh, plan.blocks, folded)] == [("tp", "tp")]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stages", 1),
        ("schedule", "1f1b"),
        pytest.param("mesh", "4x2", marks=pytest.mark.slow),
        pytest.param("microbatches", 1, marks=pytest.mark.slow),
    ],
)
def test_what_is_pinned_and_what_is_forbidden_make_the_whole(key: str, value: object) -> None:
    """The least objective is in one of the two parts, as far as the searches have proven."""
    whole = _task().space
    inside, outside = (pinned(_task(), pins_from({section: {key: value}})) for section in ("pin", "forbid"))

    parts = [_searched(plan_task(task, Effort(top_k=1))) for task in (inside, outside)]

    assert {*inside.space, *outside.space} == set(whole)
    assert set(inside.space).isdisjoint(outside.space)
    free = _searched(_free())
    assert min(part.least for part in parts) >= free.bound * (1 - DEFAULT_SETTINGS.node.memory_gap)
    assert min(part.bound for part in parts) <= free.least * (1 + DEFAULT_SETTINGS.node.memory_gap)


def test_every_divisor_of_the_batch_can_be_pinned() -> None:
    """The space lists them all."""
    task = prepare(JobRequest("zoo:mlp-xs", gpus=2, global_batch=18, dims=DIMS["mlp-xs"]))
    assert {configuration.num_microbatches for configuration in task.space} == {1, 2, 3, 6, 9, 18}

    found = pinned(task, pins_from({"pin": {"microbatches": 3}}))

    assert {configuration.num_microbatches for configuration in found.space} == {3}


def test_every_number_of_virtual_stages_can_be_pinned() -> None:
    """The space lists some of them; more than one per block cannot be pinned."""
    space = configurations(gpus=8, devices_per_node=8, num_blocks=34, global_batch=8, batch_of_model=None, mode="train")
    frame = Frame(load_cluster("h100"), gpus=8, global_batch=8, fixed_batch=None, num_blocks=34)
    assert {c.num_chunks for c in space if c.num_stages == 2} == {1, 2, 4, 8, 17}

    found = pinned_space(space, pins_from({"pin": {"chunks": 7}}), frame)

    assert {(c.num_stages, c.num_chunks, c.schedule) for c in found} == {(2, 7, "interleaved"), (4, 7, "interleaved")}
    with pytest.raises(PinError, match="chunks: 18 cannot occur"):
        pinned_space(space, pins_from({"pin": {"chunks": 18}}), frame)


@pytest.mark.parametrize(("name", "gpus"), [("gpt2", 4), ("mixtral-8x7b", 2), ("mlp-xs", 4)])
def test_the_own_plan_pinned_is_found_again(name: str, gpus: int) -> None:
    """With the same objective, and again if only a part of it is pinned."""
    plan, task = _free(name, gpus), _task(name, gpus)
    folded = task.workload.folded(plan.microbatch)
    pins = pins_of(plan, folded, task.rules_of(folded), task.workload.batch_dims(plan.microbatch))

    again = plan_task(pinned(task, pins_from(pins.to_mapping())), Effort(top_k=1))
    part = replace(pins.pin, mesh=(), microbatches=(), boundaries=())
    free = pinned(task, Pins(part))
    looser = plan_task(free, Effort(top_k=1))
    assert thriftiest(free).candidate is not None, "also where the smallest microbatches leave no plan"

    assert again.objective == pytest.approx(plan.objective, rel=CLOSE)
    assert (again.stages, again.mesh, again.num_microbatches) == (plan.stages, plan.mesh, plan.num_microbatches)
    assert [block.states for block in again.blocks] == [block.states for block in plan.blocks]
    assert looser.objective <= plan.objective * (1 + DEFAULT_SETTINGS.node.memory_gap)


def test_tensors_are_where_patterns_say() -> None:
    """Pinned to a dim, pinned whole, or kept from a dim that they had."""
    task = _task("mlp-xs", 4)
    name = next(p.value.name for p in task.workload.folded(8).parameters if len(p.value.shape) == 2)
    pattern = name.replace("0", "*")
    mesh = {"stages": 1, "mesh": {"outer": 2, "inner": 2}}

    def stored(content: dict[str, Any]) -> list[tuple[object, ...]]:
        plan = plan_task(pinned(task, pins_from(content)), Effort(top_k=1))
        return [
            parse_placements(state.placement)
            for block in plan.blocks
            for state in block.states
            if state.value.rpartition(".")[2] == name.rpartition(".")[2]
        ]

    for dim in (0, 1):
        split = stored({"pin": {**mesh, "tactics": [{"shard": {"inputs": {pattern: dim}, "axis": "inner"}}]}})
        kept = stored({"pin": mesh, "forbid": {"tactics": [{"shard": {"inputs": {pattern: dim}, "axis": "inner"}}]}})
        assert all(placements[1] == Shard(dim) for placements in split)
        assert all(placements[1] != Shard(dim) for placements in kept)
    whole = stored({"pin": {**mesh, "tactics": [{"replicate": {"pattern": pattern}}]}})
    assert all(not isinstance(placement, Shard) for placements in whole for placement in placements)


@pytest.mark.parametrize(
    ("pin", "restricts"),
    [
        ({"recompute": ["none", "selective"]}, False),
        ({"schedule": "1f1b"}, False),
        ({"zero": 1}, False),
        ({"tp": 2}, True),
        ({"mesh": {"dp": 2, "tp": 4}}, True),
    ],
)
def test_placements_are_restricted_by_what_is_said_of_them(pin: dict[str, Any], *, restricts: bool) -> None:
    """Not by the major axis of meshes of three, which is named for data parallelism in any case."""
    task = pinned(_task(), pins_from({"pin": pin}))

    assert (task.constraints.restrict is not None) is restricts
    assert restricts or any(len(configuration.mesh.axes) == 3 for configuration in task.space)


@pytest.mark.parametrize(
    ("gpus", "pin", "expected"),
    [
        (32, {"tp": 8}, {"dp=2×outer=2×tp=8"}),
        (32, {"tp": 4}, {"dp=2×outer=4×tp=4"}),
        (8, {"tp": 2}, set()),  # two free axes beside it do more
        (8, {"cp": 1}, {"dp=2×outer=2×inner=2"}),
        (32, {"tp": 4, "cp": 2}, set()),
        (32, {"tp": 8, "dp": 2}, set()),
    ],
)
def test_a_degree_leaves_meshes_of_three_axes(gpus: int, pin: dict[str, Any], expected: set[str]) -> None:
    """As without pins, where nothing is said of data parallelism; with samples for all that split them."""
    task = pinned(_task(gpus=gpus), pins_from({"pin": {**pin, "stages": 1}}))

    three = [each for each in task.space if len(each.mesh.axes) == 3 and is_data_major(each.mesh)]

    assert {str(each.mesh) for each in three} == expected
    assert all(16 // each.num_microbatches % each.mesh.shape[0] == 0 for each in three)


@pytest.mark.parametrize("minor", ["tp", "inner"])
def test_a_mesh_of_three_axes_is_searched(minor: str) -> None:
    """Alone, too, and where microbatches have fewer samples than the major axis devices, which is data parallel."""
    task = pinned(_task(), pins_from({"pin": {"mesh": {"dp": 2, "outer": 2, minor: 2}, "stages": 1}}))

    plan = plan_task(task, Effort(top_k=1))

    folded = task.workload.folded(plan.microbatch)
    roles = {found.axis.name: found.role for found in roles_of_axes(plan.mesh, plan.blocks, folded)}
    assert roles["dp"] == "dp"
    assert minor != "tp" or roles["tp"] == "tp"
    assert broken(plan, task.pins, folded) == ()
    assert any(own.num_microbatches == 16 for own in task.space)


@pytest.mark.parametrize(("levels", "zero"), [((), {1, 2, 3}), ((1,), {1}), ((3,), {3})])
def test_devices_that_share_are_apart_from_those_that_hold_copies(levels: tuple[int, ...], zero: set[int]) -> None:
    """On the axes `shard` and `dp`, whatever levels are pinned for those that share."""
    pins = Pins(Choices(stages=(1,), mesh=((("dp", 2), ("shard", 4)),), hybrid_zero=levels))

    plan = plan_task(pinned(_task(), pins), Effort(top_k=1))

    folded = _task().workload.folded(plan.microbatch)
    found: dict[str, set[int]] = {}
    for _, axis, own in levels_of(plan, folded):
        found.setdefault(axis, set()).update(own)
    assert found["dp"] == {0}
    assert found["shard"] <= zero
    assert not broken(plan, pins, folded)
    other = replace(pins, pin=replace(pins.pin, hybrid_zero=tuple({1, 2, 3} - found["shard"])))
    assert any("on axis shard" in sentence for sentence in broken(plan, other, folded))


def test_forbidden_levels_leave_tensor_parallelism_alone() -> None:
    """Without ZeRO parameters may still be split where they are used: no pair of the tables forbids that."""
    task = pinned(_task(), pins_from({"pin": {"zero": 0, "mesh": {"tp": 8}}}))
    folded = task.workload.folded(16)

    tables = task.constraints.tables(folded, task.rules_of(folded), task.space[0].mesh, task.costs)

    assert tables is not None
    assert tables.forbidden
    assert any(node.decision is Decision.PARAMETER and node.count > 1 for node in tables.nodes)
    plan = plan_task(task, Effort(top_k=1))
    split = [state for block in plan.blocks for state in block.states if "S(" in state.placement]
    assert split


def test_decisions_at_the_top_level_are_pinned(tmp_path: Path) -> None:
    """As the README has it; in Python the mapping of a file does, with lists or tuples."""
    pins = Pins(Choices(stages=(4,), tp=(8,), zero=(0, 1)))
    file = tmp_path / "pins.yaml"
    file.write_text("stages: 4\ntp: 8\nzero: [0, 1]\n")

    assert load_pins(file) == pins
    assert read_pins(file) == read_pins({"pin": {"stages": 4, "tp": 8, "zero": (0, 1)}}) == pins
    assert read_pins({"stages": 4, "tp": 8, "zero": [0, 1]}) == read_pins(pins) == pins
    assert read_pins(None) == Pins()


def test_a_mapping_pins_from_python() -> None:
    """`autopar.solve` takes it as it is."""
    plan = autopar.solve("zoo:mlp-xs", gpus=2, global_batch=4, dims={"num_layers": 2, "hidden": 16}, pins={"stages": 2})

    assert len(plan.stages) == 2
    with pytest.raises(PinError, match="'stage' is neither"):
        autopar.solve("zoo:mlp-xs", gpus=2, pins={"stage": 2})


def test_many_meshes_are_listed_once_each_and_leave_samples_for_their_axes() -> None:
    """120 meshes of a search for Megatron-LM, on which the space has 2,640 configurations, not 8,462 times 120."""
    meshes = [{"dp": dp, "ep": ep, "tp": 256 // (dp * ep)} for dp in (2, 4, 8, 16, 32) for ep in (2, 4, 8)]
    pins = pins_from({"pin": {"mesh": meshes}})
    space = configurations(
        gpus=256, devices_per_node=8, num_blocks=63, global_batch=1920, batch_of_model=None, mode="train"
    )

    found = pinned_space(space, pins, Frame(load_cluster("h100"), 256, 1920, None, 63))

    assert len(found) == len(set(found))
    assert {own.num_stages for own in found} == {1}
    for own in found:
        sizes = {axis.name: axis.size for axis in own.mesh.axes}
        assert 1920 // own.num_microbatches % (sizes["dp"] * sizes["ep"]) == 0
