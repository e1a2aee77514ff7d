"""Models as the planner sees them: any number of samples, unless the file insists on one."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from autopar import models
from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.errors import JobError, ModelError
from autopar.plan import DimSize, Plan
from autopar.prediction import predict
from autopar.workload import default_batch, open_plan, open_workload
from tests.formulations import DIMS, workload
from tests.test_api import exported


@pytest.mark.parametrize("name", DIMS)
def test_any_number_of_samples(name: str) -> None:
    """Ops, blocks and parameters do not depend on it."""
    found = workload(name, "infer")

    small, large = found.folded(2), found.folded(6)

    assert found.fixed_batch is None
    assert small.chain == large.chain
    assert [op.kind for op in small.graph.ops] == [op.kind for op in large.graph.ops]
    assert small.graph.num_parameters == large.graph.num_parameters


def test_graphs_are_built_once() -> None:
    """The same number of samples gives the same object."""
    found = workload("mlp-xs")

    assert found.folded(4) is found.folded(4)


def test_a_baked_in_batch_is_found(tmp_path: Path) -> None:
    """A file with one constant row per sample takes that number of samples only, and defaults are its multiples."""
    found = open_workload(exported(tmp_path, batch=4), mode="infer")

    assert found.fixed_batch == 4
    assert default_batch(found, gpus=2) == 8


def test_default_batches() -> None:
    """The published batch to train a zoo model, one sample per GPU to run it."""
    assert default_batch(open_workload("zoo:gpt2"), gpus=64) == models.spec("gpt2").global_batch
    assert default_batch(open_workload("zoo:gpt2", mode="infer"), gpus=64) == 64


def test_rules_are_looked_for_at_a_batch_no_other_dim_has() -> None:
    """So that no dim is taken for the batch by chance."""
    found = workload("mlp-xs")

    batch = found.probe.values[found.probe.inputs[0]].shape[0]

    assert batch not in {size for value in workload("mlp-xs").graph(1).values.values() for size in value.shape}
    assert batch % 2 == 0


@pytest.mark.parametrize(("name", "layers"), [("gpt2", 4), ("gpt2", 24), ("mlp-xs", 24)])
def test_rules_of_one_block_are_those_of_all_that_are_like_it(name: str, layers: int) -> None:
    """Every op has the rule that it has when all are looked at, as they are where few blocks are alike."""
    found = open_workload(f"zoo:{name}", dims=DIMS[name] | {"num_layers": layers})

    found.folded(8)  # of which other sizes are made
    rules = found.rules()

    assert (found._probed[1] is None) is (layers == 4)
    assert rules.by_op == discover(found.probe).by_op
    assert [*rules.by_op] == [op.name for op in found.probe.ops]


def test_graphs_are_sent_whole() -> None:
    """To processes, by what they are pickled to."""
    graph = workload("mlp-xs").graph(2)

    sent = pickle.loads(pickle.dumps(graph))

    assert (sent.ops, sent.values, sent.states) == (graph.ops, graph.values, graph.states)


def test_a_plan_records_the_model() -> None:
    """Name, parameters and what the user set; the hash does not depend on the microbatch."""
    first, second = (open_workload("zoo:mlp-xs", dims=DIMS["mlp-xs"]) for _ in range(2))
    first.folded(2)
    second.folded(8)

    assert first.info() == second.info()
    assert first.info().num_parameters == 5 * 16 * 16
    assert first.info().dims == (("hidden", 16), ("num_layers", 5))


def test_modes_are_two() -> None:
    """Anything else is refused with the choice."""
    with pytest.raises(JobError, match="unknown mode 'test'"):
        open_workload("zoo:mlp-xs", mode="test")


RESNET: dict[str, DimSize] = {"blocks": (1, 1), "channels": 4, "image_size": 16, "classes": 8}


def test_a_plan_keeps_fields_of_several_sizes(cache_dir: Path) -> None:
    """They are a list in its file, and the model is built again from it."""
    degrees = Degrees(dp=2, microbatch=1, global_batch=2)
    plan = predict("zoo:resnet50", degrees, dims=RESNET, cache_dir=cache_dir).plan

    read = Plan.from_json(plan.to_json())
    opened = open_plan(read)

    assert dict(read.model.dims) == RESNET
    assert b'"blocks",[1,1]' in b"".join(plan.to_json().split())
    assert read == plan
    assert opened.info() == plan.model


def test_a_list_is_a_field_of_several_sizes() -> None:
    """JSON and YAML have no tuples."""
    workload = open_workload("zoo:resnet50", dims=RESNET | {"blocks": [1, 1]})

    workload.folded(2)

    assert dict(workload.info().dims) == RESNET


@pytest.mark.parametrize(
    ("source", "dims", "message"),
    [
        ("zoo:resnet50", {"blocks": (1, 1.5)}, "is not made of int alone"),
        ("zoo:resnet50", {"blocks": (1, "2")}, "is not made of int alone"),
        ("zoo:resnet50", {"blocks": (1, 0)}, "is not positive"),
        ("zoo:resnet50", {"channels": (1, 2)}, "is not of type int"),
    ],
)
def test_fields_of_several_sizes_are_checked(source: str, dims: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_workload(source, dims=dims)


def test_no_dim_of_a_file_has_several_sizes(tmp_path: Path) -> None:
    path = tmp_path / "mlp.onnx"
    models.save(models.build("mlp-xs", num_layers=2, hidden=16), path)

    with pytest.raises(ModelError, match=r"dim 'batch' is set to \(2, 2\)"):
        open_workload(path, dims={"batch": (2, 2)}).forward(None)
