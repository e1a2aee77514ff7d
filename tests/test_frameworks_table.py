"""What frameworks do and can, as tables: of what the simulator assumes, and of what a search for one is kept to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import main
from autopar.cluster import PRESETS
from autopar.configuration import divisors
from autopar.context_parallelism import CONTEXT_KINDS
from autopar.cost import Stack
from autopar.degrees import Degrees
from autopar.describe.context_kinds import placed_contexts
from autopar.errors import ExportError
from autopar.frameworks import facts
from autopar.frameworks.abilities import ABILITIES, nearest
from autopar.frameworks.assumptions import (
    ASSUMPTIONS,
    COLUMN_OF,
    COLUMNS,
    Inherent,
    Otherwise,
    Told,
    answers_of,
    stack_run,
    taken_for_granted,
    told,
)
from autopar.frameworks.configurations import parse_configuration
from autopar.frameworks.facts import Facts
from autopar.frameworks.python_file import apply_function, read_fields
from autopar.frameworks.restriction import RESTRICTED, kept_to, kinds_of_recompute, runner, stack_kept_to
from autopar.pins import Choices, Pins
from autopar.pins.levels import levels_of
from autopar.plan import Plan
from autopar.workload import open_plan
from tests.executions import TINY

DOCS = Path(__file__).parent.parent / "docs" / "export.md"
SIZES = {"num_layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "seq": 64, "vocab": 256}
RICH = Stack("mine", dispatch="per-node", hides_dispatch=True, hides_tp=True, graphs="partial", attention="unfused")


@pytest.fixture(scope="module")
def plan(cache_dir: Path) -> Plan:
    """A small plan with data and tensor parallelism."""
    stated = Degrees(dp=2, tp=2, zero=1, sequence_parallel=True, global_batch=8)
    return autopar.predict("zoo:llama3-8b", stated, dims=SIZES, cache_dir=cache_dir).plan


def facts_of(plan: Plan, **changes: Any) -> Facts:
    """Return a plan in degrees, with some of them as stated."""
    found = facts.read(plan, open_plan(plan).folded(plan.microbatch))
    sizes = replace(found.sizes, **changes.pop("sizes", {})) if found.sizes is not None else None
    return replace(found, sizes=sizes, **changes)


@pytest.fixture(scope="module")
def everything(plan: Plan) -> Facts:
    """A plan of which everything is assumed: pipeline, experts, context parallelism, a stack with all it can have."""
    rich = replace(plan, job=replace(plan.job, stack=RICH.to_dict()))
    return facts_of(rich, pp=2, cp=2, cp_kinds=("gather",), ep=2, sizes={"experts": 8, "top_k": 2, "capacity": 1.25})


def test_every_framework_answers_every_assumption() -> None:
    for row in ASSUMPTIONS:
        assert row.answers.keys() >= set(COLUMNS), row.name
        assert row.answers.keys() <= {*COLUMNS, *COLUMN_OF}, row.name
    assert COLUMN_OF.keys() == ABILITIES.keys()


@pytest.mark.parametrize("target", COLUMN_OF)
def test_the_table_of_the_docs_has_the_rows_and_the_arguments(target: str, everything: Facts) -> None:
    """Every row by its name, and in it every argument that asks for it."""
    rows = {line.split("|")[1].strip(): line for line in DOCS.read_text().splitlines() if line.startswith("| ")}

    for row, answer in answers_of(everything, target):
        line = rows[row.name]
        for name in {} if isinstance(answer, Inherent) else answer.arguments:
            known = {"compile": "dynamo_backend", "parallelism.cp_comm_strategy": "cp_comm_strategy"}
            short = name.removeprefix("zero_optimization.")
            assert known.get(name, short) in line, (row.name, name)


def test_what_is_asked_for_is_not_taken_for_granted(everything: Facts) -> None:
    """Each assumption is asked for, done by itself, or listed with what the framework does."""
    for target in COLUMN_OF:
        answers = answers_of(everything, target)
        listed = taken_for_granted(everything, target)

        assert len(listed) == sum(isinstance(answer, Otherwise) for _, answer in answers)
        asked = {name for _, answer in answers if isinstance(answer, Told) for name in answer.arguments}
        assert asked <= told(everything, target).keys()


def test_a_plan_is_simulated_without_what_a_framework_cannot_do(everything: Facts) -> None:
    stack, missing = stack_run(everything, "torchtitan")

    assert (stack.dispatch, stack.hides_dispatch, stack.graphs, stack.hides_tp) == ("all-to-all", False, "none", True)
    assert len(missing) == 3
    assert stack_run(everything, "megatron")[0] == replace(RICH, loss="float32", dispatch="all-to-all")
    assert stack_run(everything, "deepspeed")[0].hides_tp is False


@pytest.mark.parametrize(("cluster", "backend"), [("h100", "deepep"), ("gb200", "hybridep")])
def test_megatron_is_asked_for_the_dispatcher_that_was_priced(everything: Facts, cluster: str, backend: str) -> None:
    """Once per node by the library of the cluster's nodes; by all-to-all where experts have places, as it demands."""
    rack = replace(everything.plan, job=replace(everything.plan.job, cluster=PRESETS[cluster].to_dict()))
    assert everything.sizes is not None
    dropless = replace(everything, plan=rack, sizes=replace(everything.sizes, capacity=0.0))

    asked = told(dropless, "megatron")

    assert asked["--moe-token-dispatcher-type"] == "flex"
    assert asked["--moe-flex-dispatcher-backend"] == backend
    assert told(everything, "megatron")["--moe-token-dispatcher-type"] == "alltoall"
    assert stack_run(dropless, "megatron")[0].dispatch == "per-node"


@pytest.mark.parametrize(
    ("framework", "model", "left", "limited"),
    [
        ("megatron", "llama3-8b", {"ring", "gather", "ulysses"}, {"gather", "ulysses"}),
        ("megatron", "gemma3-12b", {"gather", "ulysses"}, {"gather", "ulysses"}),
        ("nemo", "gpt-oss-20b", {"ulysses"}, {"ulysses"}),
        ("torchtitan", "gemma3-12b", {"gather"}, {"gather"}),
        ("maxtext", "llama3-8b", {"ring", "gather", "ulysses"}, {"gather", "ulysses"}),
        ("accelerate", "llama3-8b", {"ring", "gather"}, set()),
    ],
)
def test_only_context_parallelism_that_a_framework_has_is_searched(
    framework: str, model: str, left: set[str], limited: set[str]
) -> None:
    """Of a model with windows or sinks what it has for these, as a configuration names one kind for all layers."""
    pins = kept_to(framework, Pins(), model=f"zoo:{model}", gpus=8, cluster="h100", dims={"seq": 65536})

    assert pins.contexts() == left
    assert pins.contexts(["window"]) == limited
    stack = stack_kept_to(framework, "megatron-h100", "h100", model=f"zoo:{model}")
    assert stack.context in left
    assert any(dict(mesh).get("cp", 1) > 1 for mesh in pins.pin.mesh)
    for kind in CONTEXT_KINDS:
        degrees = Degrees(cp=8, cp_kind=kind, global_batch=8, zero=3, recompute="full")
        assert runner(framework, f"zoo:{model}")(degrees) == (kind in left)


@pytest.mark.parametrize(
    ("framework", "groups", "level"),
    [
        ("torchtitan", {2, 4, 8}, (3,)),
        ("fsdp", {2, 4, 8}, (3,)),
        ("megatron", {2, 4, 8}, (1,)),
        ("deepspeed", {2, 4, 8}, (3,)),
        ("trainer", set(), ()),
    ],
)
def test_groups_that_share_what_zero_splits_are_searched(
    framework: str, groups: set[int], level: tuple[int, ...]
) -> None:
    """Of any size, where a framework has copies of groups, at the level it has for them."""
    pins = kept_to(framework, Pins(), model="zoo:llama3-8b", gpus=16, cluster="h100")

    found = [dict(mesh) for mesh in pins.pin.mesh if "shard" in dict(mesh)]
    assert {mesh["shard"] for mesh in found if mesh.keys() == {"dp", "shard"}} == groups
    assert pins.pin.hybrid_zero == level
    assert all(len(mesh) <= 3 for mesh in found)


def test_a_framework_that_runs_no_plan_of_a_job_is_named(cache_dir: Path) -> None:
    """Not the pins that the search for it is kept to, which the user has not written."""
    with pytest.raises(ExportError, match=r"^deepspeed runs no plan on 8 GPUs with 4 samples a step: ") as caught:
        autopar.solve("zoo:mlp-xs", gpus=8, global_batch=4, framework="deepspeed", cache_dir=cache_dir)

    assert "that 8 divides" in str(caught.value.hint)


@pytest.mark.slow
def test_torchtitan_gets_replicas_of_shards(cache_dir: Path) -> None:
    """Over 32 nodes: the faster size of groups is exported, read back and as fast."""
    meshes = [{"dp": 32, "shard": 8}, {"dp": 8, "shard": 32}]

    plan = autopar.solve(
        "zoo:llama3-8b", gpus=256, cluster="h100", global_batch=256, dims={"num_layers": 4}, precision="fsdp",
        memory_limit=24e9, framework="torchtitan", fusion="off", cache_dir=cache_dir,
        pins={"stages": 1, "mesh": meshes, "recompute": "none"},
    )  # fmt: skip

    folded = open_plan(plan).folded(plan.microbatch)
    assert [(axis.name, axis.size) for axis in plan.mesh] == [("dp", 8), ("shard", 32)]
    assert {(axis, tuple(levels)) for _, axis, levels in levels_of(plan, folded)} == {("dp", (0,)), ("shard", (3,))}
    exported = plan.export("torchtitan", cache_dir=cache_dir)
    assert "data_parallel_replicate_degree = 8\n" in exported.text
    assert "data_parallel_shard_degree = 32\n" in exported.text
    assert "Under torchtitan" not in exported.outcome
    read = parse_configuration(exported.text, "torchtitan", gpus=256, model="zoo:llama3-8b")
    assert (read.degrees.dp, read.degrees.shard, read.degrees.zero) == (256, 32, 3)
    again = autopar.predict(
        "zoo:llama3-8b", replace(read.degrees, microbatch=1, global_batch=256, recompute="none"), cluster="h100",
        dims={"num_layers": 4}, precision="fsdp", stack=stack_kept_to("torchtitan", "default", "h100"),
        cache_dir=cache_dir,
    )  # fmt: skip
    assert plan.simulated is not None
    assert again.timeline.step_seconds == pytest.approx(plan.simulated.step_seconds, rel=0.01)


def test_no_context_parallelism_is_searched_where_a_framework_has_none_for_the_model() -> None:
    pins = kept_to("accelerate", Pins(), model="zoo:gemma3-12b", gpus=8, cluster="h100", dims={"seq": 65536})

    assert not any("cp" in dict(mesh) for mesh in pins.pin.mesh)


@pytest.mark.slow
def test_a_plan_for_megatron_gathers_keys_of_windows_where_a_ring_is_faster(cache_dir: Path) -> None:
    """And is written as it was searched."""
    dims = {"num_layers": 6, "hidden": 1024, "heads": 8, "kv_heads": 2, "head": 128, "ffn": 2048, "vocab": 8192}
    job: dict[str, Any] = {
        "gpus": 8, "cluster": "h100", "global_batch": 2, "dims": dims | {"seq": 32768}, "cache_dir": cache_dir,
        "pins": {"mesh": {"cp": 8}, "stages": 1},
    }  # fmt: skip

    free, kept = (autopar.solve("zoo:gemma3-12b", framework=own, **job) for own in (None, "megatron"))

    found = [placed_contexts(plan.mesh, plan.blocks, open_plan(plan).folded(plan.microbatch)) for plan in (free, kept)]
    windows = [{kind for _, kind, limits, _ in each if limits} for each in found]
    assert windows == [{"ring"}, {"gather"}]
    assert "--cp-comm-type all_gather" in kept.export("megatron", cache_dir=cache_dir).text
    ringed = free.export("megatron", cache_dir=cache_dir)
    assert "--cp-comm-type all_gather" in ringed.text
    assert any("in rings" in sentence for sentence in ringed.lost)


def test_levels_that_differ_by_parameter_are_said(plan: Plan) -> None:
    """All parameters have level 1 here: of another level, which a configuration states for all, none has."""
    folded = open_plan(plan).folded(plan.microbatch)

    assert facts._mixed_levels(plan, folded, {"dp": 1}) == []
    (sentence,) = facts._mixed_levels(plan, folded, {"dp": 3})
    assert sentence == "ZeRO levels that differ by parameter (axis 'dp': not 3 in 100%); 3 is exported for all"


def test_what_differs_is_said_with_the_step_time(plan: Plan, cache_dir: Path) -> None:
    """MaxText shares parameters, too, and torchtitan gradients."""
    slower = replace(plan, simulated=replace(plan.simulated, step_seconds=plan.simulated.step_seconds / 2))  # type: ignore[type-var, union-attr]

    outcome = slower.export("maxtext", cache_dir=cache_dir).outcome

    assert "Under MaxText this plan takes " in outcome
    assert "% more: ZeRO 3 in place of ZeRO 1" in outcome


def test_the_nearest_plan_is_the_plan_where_it_can_be_run(plan: Plan) -> None:
    found = facts_of(plan)

    assert nearest(found, ABILITIES["megatron"])[0].in_mode("train") == Degrees(
        dp=2, tp=2, zero=1, sequence_parallel=True, global_batch=8, schedule="1f1b"
    )
    deepspeed = nearest(found, ABILITIES["deepspeed"])[0]
    assert (deepspeed.zero, deepspeed.sequence_parallel) == (1, False)
    assert nearest(found, ABILITIES["accelerate"])[0].zero == 2


@pytest.mark.parametrize("framework", RESTRICTED)
def test_a_search_is_kept_to_what_a_framework_runs(framework: str) -> None:
    """Meshes with an axis per degree whose sizes are the devices of a stage; heads divide where they must."""
    pins = kept_to(framework, Pins(), model="zoo:qwen3-30b-a3b", gpus=16, cluster="h100")

    assert all({name for name, _ in mesh} <= {"dp", "shard", "ep", "cp", "tp"} for mesh in pins.pin.mesh)
    tps = {dict(mesh).get("tp", 1) for mesh in pins.pin.mesh}
    widest = {"megatron": 8, "nemo": 8, "torchtitan": 4, "accelerate": 4}.get(framework, 1)
    assert max(tps) == (4 if framework == "maxtext" else widest)
    assert set(pins.pin.stages) == (set(divisors(16)) if framework in ("megatron", "nemo", "torchtitan") else {1})
    assert "zb-h1" in pins.forbid.schedule
    assert "1f1b" not in pins.forbid.schedule


def test_pins_of_the_user_take_the_place_of_those_of_the_framework() -> None:
    own = Pins(Choices(tp=(2,), zero=(3,)))

    pins = kept_to("torchtitan", own, model="zoo:llama3-8b", gpus=8, cluster="h100")

    assert (pins.pin.mesh, pins.pin.tp, pins.pin.zero) == ((), (2,), (3,))
    assert pins.pin.recompute
    with pytest.raises(ExportError, match="no search is kept to 'keras'"):
        kept_to("keras", own, model="zoo:llama3-8b", gpus=8, cluster="h100")
    with pytest.raises(ExportError, match="the job is inference; torchtitan takes training jobs"):
        kept_to("torchtitan", own, model="zoo:llama3-8b", gpus=8, cluster="h100", mode="infer")


@pytest.mark.slow
def test_a_plan_for_one_framework_is_one_that_it_runs(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Solved for FSDP2 alone, it is exported without a difference."""
    job = ["zoo:mlp-xs", "--gpus", "4", "--global-batch", "64", "--for", "fsdp", "--grid", "0"]

    assert main(["solve", *job, "--cache-dir", str(cache_dir), "-o", str(tmp_path)]) == 0

    capsys.readouterr()
    found = Plan.load(tmp_path / "plan.json")
    assert (len(found.stages), [axis.name for axis in found.mesh]) == (1, ["dp"])
    assert main(["export", str(tmp_path / "plan.json"), "--to", "accelerate", "--cache-dir", str(cache_dir)]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\n", "no function 'apply' sets fields"),
        ("def apply(config):\n    os.system('x')\n    other.a = 1\n", "sets no field of config"),
        ("def apply(config:\n", "no Python"),
        ("def apply(config):\n    config.a = 1\n    config.a.b = 2\n", "set inside a value"),
    ],
)
def test_python_that_sets_no_fields_is_refused(text: str, message: str) -> None:
    """Nothing of it is run."""
    with pytest.raises(ExportError, match=message):
        read_fields(text)


@pytest.mark.parametrize("name", ["'", '"""', "\\", "a\nb", "$(touch x)", "`x`", "é\u202e"])
def test_texts_come_back_from_python_as_they_were(name: str) -> None:
    fields = {"a.name": name, "a.names": [name, name], "b": 0.5}

    assert read_fields(apply_function(fields, "Set fields.")) == {"a": {"name": name, "names": [name, name]}, "b": 0.5}


def test_layers_that_no_stage_has_are_refused() -> None:
    """What is listed is built; its tensor parallelism splits key-value heads, which Megatron-LM copies."""
    parts = "def apply(config):\n    config.parallelism.pipeline_parallel_degree = 2\n"
    parts += "    config.parallelism.data_parallel_shard_degree = 1\n"

    for names, message in (
        ([["layers.0"], ["layers.2"]], "has no layers.1: torchtitan builds"),
        ([["layers.0"], ["layers.0"]], "has layers.0 twice"),
    ):
        text = f"{parts}    config.parallelism.module_fqns_per_model_part = {names}\n    return config\n"
        with pytest.raises(ExportError, match=message):
            parse_configuration(text, "torchtitan", gpus=2, model="zoo:llama3-8b")
    heads = "def apply(config):\n    config.parallelism.tensor_parallel_degree = 8\n    return config\n"
    with pytest.raises(ExportError, match="4 key-value heads do not divide over tensor_parallel_degree 8"):
        parse_configuration(heads, "torchtitan", gpus=8, model="zoo:qwen3-30b-a3b")


@pytest.mark.parametrize(("framework", "kinds"), [("megatron", 3), ("torchtitan", 3), ("fsdp", 2), ("deepspeed", 0)])
def test_layers_recompute_alike_where_a_configuration_says_so(framework: str, kinds: int) -> None:
    """One search per kind, the fastest first; DeepSpeed's layers do it in code."""
    pins = kept_to(framework, Pins(), model="zoo:llama3-8b", gpus=8, cluster="h100")

    apart = kinds_of_recompute(framework, pins)

    assert len(apart) == kinds
    flavours = [own.pin.recompute[0].flavours for own in apart]
    assert flavours == [own for own in (("none",), ("selective",), ("full",)) if own in flavours]
    assert all(own.forbid == pins.forbid and own.pin.mesh == pins.pin.mesh for own in apart)
    assert kinds_of_recompute(framework, Pins(Choices(tp=(2,)))) == ()


@pytest.mark.slow
def test_a_plan_for_megatron_has_layers_that_recompute_alike(cache_dir: Path) -> None:
    """Where some layers have to recompute, all do, and the arguments say all of the plan."""
    dims = {**TINY["llama3-8b"], "num_layers": 4, "seq": 64}

    found = autopar.solve(
        "zoo:llama3-8b", gpus=4, global_batch=8, dims=dims, framework="megatron", memory_limit=260e3, top_k=1,
        cache_dir=cache_dir,
    )  # fmt: skip

    assert found.simulated is not None
    assert found.search is not None
    assert found.search.bound <= found.search.objective
    kept = {flavour for stage in found.stages for flavour in stage.flavours[1:-1]}
    assert len(kept) == 1
    assert found.export("megatron", cache_dir=cache_dir).lost == ()
