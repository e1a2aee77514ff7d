"""The main path as a library call: plans that round-trip, simulations that agree, errors that help."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import autopar
from autopar import api
from autopar.cost import Stack
from autopar.errors import (
    AutoparError,
    ClusterError,
    InfeasibleError,
    JobError,
    ModelError,
    PlanError,
    ProgramError,
    SolverError,
    StackError,
)
from autopar.plan import OpPlacement, Plan
from tests.formulations import DIMS
from tests.plans import two_stage_plan

MLP: dict[str, Any] = {"dims": DIMS["mlp-xs"], "global_batch": 8}
AT_ONCE = autopar.Pins(autopar.Choices(microbatches=(1,)))
"""What is tested of a plan for many samples does not depend on their microbatches."""
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Return a training plan for two devices."""
    return autopar.solve("zoo:mlp-xs", gpus=2, stack="ideal", **MLP)


@pytest.mark.parametrize(
    ("changes", "error", "message", "hint"),
    [
        ({"gpus": 0}, JobError, "0 GPUs", "from 1 on"),
        ({"gpus": 12}, JobError, "12 GPUs do not fill nodes of 8", "use 8 or 16"),
        ({"global_batch": 0}, JobError, "global batch of 0", "from 1 on"),
        ({"top_k": 0}, JobError, "top 0 plans", "from 1 on"),
        ({"time_limit": 0.0}, JobError, "time limit of 0 s", "above 0"),
        ({"memory_limit": 1e15}, JobError, "memory limit of 1e.06 GB", "at most the device's memory"),
        ({"mode": "guess"}, JobError, "unknown mode 'guess'", "train or infer"),
        ({"cluster": "abacus"}, ClusterError, "abacus", "h100"),
        ({"solver": "oracle"}, SolverError, "oracle", "use "),
    ],
)
def test_bad_requests_are_told_what_to_do(
    changes: dict[str, Any], error: type[AutoparError], message: str, hint: str
) -> None:
    """Before anything expensive starts."""
    with pytest.raises(error, match=message) as caught:
        autopar.solve("zoo:mlp-xs", **{"gpus": 2, **MLP, **changes})

    assert hint in caught.value.hint


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    """In the zoo and on disk."""
    with pytest.raises(ModelError, match="gpt9"):
        autopar.solve("zoo:gpt9", gpus=1)
    with pytest.raises(ModelError, match="absent"):
        autopar.solve(tmp_path / "absent.onnx", gpus=1)


def test_a_batch_that_the_model_does_not_divide_is_refused(tmp_path: Path) -> None:
    """A model that works on 4 samples at a time cannot make 6; 8 it can."""
    path = exported(tmp_path, batch=4)

    with pytest.raises(JobError, match=r"4 samples at a time.* 6") as caught:
        autopar.solve(path, gpus=1, global_batch=6)

    assert caught.value.hint == "--global-batch 8"


def exported(folder: Path, *, batch: int) -> Path:
    """Write a model that adds one row to each of so many samples."""
    from onnx import TensorProto, helper

    names = ("rows", "w")
    shapes = ([batch, 6], [6, 8])
    data = [
        helper.make_tensor(name, TensorProto.FLOAT, shape, [0.1 * i for i in range(shape[0] * shape[1])])
        for name, shape in zip(names, shapes, strict=True)
    ]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "rows"], ["sum"]), helper.make_node("MatMul", ["sum", "w"], ["y"])],
        "baked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 8])],
        data,
    )
    path = folder / "baked.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), path)
    return path


def test_too_little_memory_is_explained() -> None:
    """What is missing, on which stage, and a way out."""
    with pytest.raises(InfeasibleError, match=r"needs .* on stage \d+, .* more than the limit of") as caught:
        autopar.solve("zoo:mlp-xs", gpus=2, memory_limit=4000.0, dims=MLP["dims"] | {"num_layers": 2}, global_batch=8)

    assert re.search(r"--gpus|--memory-limit|devices with", caught.value.hint)  # what is simulated in time


def test_seven_devices_of_a_node_are_planned() -> None:
    """A number nothing divides is no mistake: a pipeline can have seven stages, or devices can stay idle."""
    found = autopar.solve("zoo:mlp-xs", gpus=7, dims={"num_layers": 8, "hidden": 16}, global_batch=8)

    assert len(found.stages) * found.device_mesh.size == 7
    assert found.stages[-1].devices[1] == 7


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    """Written and read, it is equal."""
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan


def test_simulating_a_file_gives_what_solving_gave(plan: Plan, tmp_path: Path) -> None:
    """To the last bit: the same program, the same costs."""
    plan.save(tmp_path / "plan.json")

    timeline = api.simulate_plan(Plan.load(tmp_path / "plan.json"))

    assert plan.simulated is not None
    assert timeline.step_seconds == plan.simulated.step_seconds
    assert [stage.memory.bytes for stage in timeline.stages] == [stage.peak for stage in plan.simulated.stages]


def test_the_parts_of_a_plan_are_its_step(plan: Plan) -> None:
    assert plan.simulated is not None

    assert sum(seconds for _, seconds in plan.simulated.parts) == pytest.approx(plan.simulated.step_seconds)
    assert {"compute", "optimizer"} <= dict(plan.simulated.parts).keys()


def test_a_plan_is_simulated_under_the_stack_it_was_made_for(tmp_path: Path) -> None:
    """And under another one if asked; a plan for the default stack remembers none."""
    slow = Stack("slow", scalars=(("gemm_efficiency", 0.5), ("memory_traffic", 3.0)))
    plan = autopar.solve("zoo:mlp-xs", gpus=2, global_batch=65536, top_k=1, stack=slow, pins=AT_ONCE)
    plan.save(tmp_path / "plan.json")
    saved = Plan.load(tmp_path / "plan.json")

    again, fast = api.simulate_plan(saved), api.simulate_plan(saved, stack="ideal")

    assert saved.job.stack == slow.to_dict()
    assert plan.simulated is not None
    assert again.step_seconds == plan.simulated.step_seconds
    assert fast.step_seconds < 0.7 * again.step_seconds
    with pytest.raises(StackError, match="no stack 'fast'"):
        api.simulate_plan(saved, stack="fast")


def test_a_plan_that_leaves_a_reduction_out_is_refused() -> None:
    """Terms of a gradient that a hand-edited plan calls copies make a faster plan that computes something else."""
    plan = autopar.solve("zoo:mlp-xs", gpus=2, global_batch=65536, top_k=1, stack="ideal", pins=AT_ONCE)

    def copies(op: OpPlacement) -> OpPlacement:
        return replace(op, outputs=tuple(text.replace("P", "R") for text in op.outputs)) if ".vjp." in op.op else op

    blocks = tuple(replace(block, ops=tuple(map(copies, block.ops))) for block in plan.blocks)
    edited = replace(plan, blocks=blocks)
    assert edited != plan

    with pytest.raises(ProgramError, match="vjp"):
        api.simulate_plan(edited)


def test_another_model_is_refused(plan: Plan) -> None:
    """A plan knows the hash of its model."""
    other = replace(plan, model=replace(plan.model, sha256="0" * 64))

    with pytest.raises(PlanError, match="not the model the plan was made for"):
        api.simulate_plan(other)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", ["mlp-xs", "gpt2"])
def test_on_one_device_the_simulator_agrees_with_the_formula(name: str, mode: str) -> None:
    """No communication and nothing to overlap: to 1e-4, as the program knows every value in one precision only."""
    found = autopar.solve(f"zoo:{name}", gpus=1, mode=mode, dims=DIMS[name], global_batch=4)

    assert found.simulated is not None
    assert found.simulated.step_seconds == pytest.approx(found.objective, rel=1e-4)


def test_plans_are_ranked_by_simulated_time(plan: Plan) -> None:
    """The best one first; runners-up carry no runners-up of their own."""
    assert plan.simulated is not None
    times = [other.simulated.step_seconds for other in (plan, *plan.alternatives) if other.simulated is not None]

    assert times == sorted(times)
    assert len(times) == 1 + len(plan.alternatives) <= 3
    assert not any(other.alternatives for other in plan.alternatives)


def test_the_report_adds_up(plan: Plan) -> None:
    """Solved and pruned configurations are the space, the bound is below the objective, phases took time."""
    assert plan.search is not None
    assert plan.search.solved + plan.search.pruned == plan.search.configurations
    assert plan.search.bound <= plan.search.objective
    assert [phase.name for phase in plan.search.phases] == ["import", "discover", "search", "simulate"]


def test_inference_has_no_training_in_it() -> None:
    """Only forward ops are placed; nothing is recomputed; no memory for gradients or the optimizer."""
    found = autopar.solve("zoo:mlp-xs", gpus=2, mode="infer", **MLP)

    assert found.schedule == "forward-only"
    assert {stage.recompute for stage in found.stages} == {"none"}
    assert found.simulated is not None
    assert not {"gradients", "optimizer"} & {name for stage in found.simulated.stages for name in stage.breakdown}


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", ["light_resnet50", "light_squeezenet"])
@pytest.mark.slow
def test_shipped_networks_are_planned(name: str, mode: str) -> None:
    """Real files from the `onnx` package, on eight devices."""
    found = autopar.solve(LIGHT / f"{name}.onnx", gpus=8, mode=mode, top_k=1)

    assert found.simulated is not None
    assert found.search is not None
    assert found.search.bound <= found.objective


@pytest.mark.parametrize(
    ("batch", "count", "message"),
    [
        (64, 0, "num_microbatches is 0"),
        (64, 5, "a batch of 64 cannot be 5 equal microbatches"),
        (0, 4, "job.global_batch is 0"),
        (-4, 4, "job.global_batch is -4"),
    ],
)
def test_a_plan_whose_microbatches_do_not_make_its_batch_is_refused(batch: int, count: int, message: str) -> None:
    """Else samples would be left out without a word."""
    plan = two_stage_plan()
    edited = replace(plan, num_microbatches=count, job=replace(plan.job, global_batch=batch))

    with pytest.raises(PlanError, match=message):
        Plan.from_json(edited.to_json())
