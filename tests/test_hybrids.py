"""Plans of decoders with scans: heads or channels split over devices, layers over stages, nothing taken for experts."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from autopar import models
from autopar.configuration import Configuration
from autopar.degrees import Degrees
from autopar.errors import ModelError
from autopar.folding.expert_parameters import experts_of
from autopar.folding.fold import fold
from autopar.prediction import predict
from autopar.sharding import Mesh, Placement, Shard
from tests.executions import TINY, Execution, model_graph, model_rules
from tests.named_plans import Task, Tensor, check_kind, named_plan
from tests.shares import some

HYBRIDS = ("mamba2-2.7b", "mamba-2.8b", "jamba-v0.1", "nemotron-h-8b", "qwen3-next-80b-a3b")
SAMPLES = 4
_DATA = {"autopar::StateSpaceScan": 0, "autopar::SelectiveScan": 0, "autopar::GatedDeltaRule": 2}
"""Input of a scan that holds the data of its heads or channels."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Scans split by their heads or channels."""

    def __str__(self) -> str:
        return "heads"

    def wants(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Return the heads or channels of the data of a scan and of its results."""
        if tensor.op is None or tensor.op.kind not in _DATA:
            return ()
        is_data = tensor.output or tensor.name == tensor.op.inputs[_DATA[tensor.op.kind]]
        return (Shard(2),) if is_data else ()

    def insists(self, tensor: Tensor) -> bool:
        """Insist on all of it."""
        return bool(self.wants(tensor))


@pytest.mark.parametrize("model", some(HYBRIDS, lambda name: name.startswith("mamba")))
@pytest.mark.parametrize("stages", [1, 2])
def test_scans_split_by_heads_train_like_the_model(model: str, stages: int, cache_dir: Path) -> None:
    """In one stage, and in two whose layers have four devices each."""
    configuration = Configuration(stages, Mesh.of(inner=4), 2, "1f1b")
    execution = Execution.of(model, SAMPLES, configuration.num_microbatches, steps=2)
    tasks: tuple[Task, ...] = (Heads(),)

    plan = named_plan(model, execution.folded, model_rules(model, cache_dir), configuration, tasks, SAMPLES)

    check_kind(plan, model, execution.folded, tasks, SAMPLES)
    execution.check(plan)


@pytest.mark.parametrize("model", HYBRIDS)
def test_parameters_of_scans_are_no_experts(model: str) -> None:
    """The kernel of a convolution has three dims, and is no matrix per expert."""
    found = experts_of(fold(model_graph(model, 10)))

    expected = {"experts.gate_up_proj", "experts.down_proj"} if model.startswith(("qwen", "jamba")) else set()
    assert {".".join(name.split(".")[4:6]) for name in found} == expected


@pytest.mark.parametrize("model", ["mamba2-2.7b", "mamba-2.8b"])
@pytest.mark.parametrize(
    ("degrees", "split"),
    [
        (Degrees(dp=2, zero=1, global_batch=8), "S(0)"),
        (Degrees(tp=4, global_batch=8), "S(2)"),
        (Degrees(tp=2, pp=2, global_batch=8), "S(2)"),
        (Degrees(pp=2, global_batch=8), "R"),
    ],
    ids=str,
)
def test_mamba_is_predicted_by_degrees(model: str, degrees: Degrees, split: str, cache_dir: Path) -> None:
    """Data, tensor and pipeline parallelism; tensor parallelism splits the scans of all layers by heads or channels."""
    prediction = predict(f"zoo:{model}", degrees, dims=dict(TINY[model]), cache_dir=cache_dir)

    scans = [op for block in prediction.plan.blocks for op in block.ops if op.op.endswith("scan.core")]
    assert scans
    assert {op.outputs[0] for op in scans} == {split}


def test_documents_are_not_packed_into_the_sequences_of_a_scan() -> None:
    """The state of a scan would pass from one to the next."""
    with pytest.raises(ModelError, match="cannot be kept apart by a scan"):
        models.build("bamba-9b", docs_per_sequence=4)


def test_blocks_that_add_once_hand_on_reduced_values(tmp_path: Path, cache_dir: Path) -> None:
    """As blocks of attention and MLP do: the norm of the next block needs the sum over tensor-parallel devices."""
    config = {
        "model_type": "nemotron_h", "hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
        "intermediate_size": 64, "mlp_hidden_act": "relu2", "hybrid_override_pattern": "MM*MM*MM",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = predict(
        f"hf:{tmp_path}", Degrees(tp=2, dp=2, microbatch=2, global_batch=8), mode="infer", stack="ideal",
        dims={"seq": 8}, cache_dir=cache_dir,
    )  # fmt: skip

    sums = [op for block in found.plan.blocks for op in block.ops if op.op.endswith("_residual")]
    assert sums
    assert {text for op in sums for text in (*op.inputs, *op.outputs)} == {"S(0)R"}
