"""NeMo: a plan as values of a recipe, in the form its command line takes them."""

from collections import Counter

from autopar.cluster import cluster_from_dict
from autopar.frameworks.facts import ON_CPU, Facts
from autopar.frameworks.granted import hides_tp, taken_for_granted
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.known import NEMO_SOURCE
from autopar.plan import Exported
from autopar.recompute import Recompute

_NAMES = (
    f"Names are those of {NEMO_SOURCE}. NeMo 3 has no such recipes: Megatron-Bridge takes their place, with names of "
    "its own."
)


def export(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as `name=value` lines for a recipe of NeMo 2.

    Args:
        facts: The plan.
        outcome: What the file comes to, for its header.
    """
    lost = list(facts.lost)
    if facts.mtp:
        lost.append(f"multi-token prediction of depth {facts.mtp}: set mtp_num_layers of the recipe's model")
    per_node = min(facts.gpus, cluster_from_dict(facts.plan.job.cluster).by_node.devices_per_node)
    values: dict[str, object] = {
        "trainer.num_nodes": facts.gpus // per_node,
        "trainer.devices": per_node,
        "trainer.strategy.tensor_model_parallel_size": facts.tp,
        "trainer.strategy.pipeline_model_parallel_size": facts.pp,
        "trainer.strategy.virtual_pipeline_model_parallel_size": facts.interleave if facts.interleave > 1 else None,
        **({"trainer.strategy.use_tp_pp_dp_mapping": True} if facts.pp_inside else {}),
        "trainer.strategy.context_parallel_size": facts.cp,
        "trainer.strategy.expert_model_parallel_size": facts.ep,
        **({"trainer.strategy.expert_tensor_parallel_size": facts.etp} if facts.etp and facts.ep > 1 else {}),
        "trainer.strategy.sequence_parallel": facts.sequence_parallel,
        "trainer.strategy.ddp.use_distributed_optimizer": facts.zero > 0,
        **({} if facts.bucket is None else {"trainer.strategy.ddp.bucket_size": facts.bucket.elements}),
        "data.micro_batch_size": facts.microbatch,
        "data.global_batch_size": facts.plan.job.global_batch,
    }
    if facts.bucket is not None:
        lost.append(facts.bucket.lost)
    if facts.sizes is not None:
        values["data.seq_length"] = facts.sizes.seq
    if hides_tp(facts):
        lost.append(
            "MegatronCommOverlapCallback(tp_comm_overlap=True) among trainer.callbacks, which the stack asks for"
        )
    if facts.zero > 1:
        lost.append(f"ZeRO {facts.zero}; the distributed optimizer is ZeRO 1")
    elif facts.zero and facts.sharded < facts.dp:
        lost.append(f"ZeRO over {facts.sharded} of {facts.dp} data-parallel devices")
    if facts.pp > 1 and facts.plan.schedule not in ("1f1b", "interleaved"):
        lost.append(f"schedule {facts.plan.schedule!r}; NeMo runs 1F1B, interleaved where stages take turns")
    values |= _stages(facts, lost)
    values |= _recompute(facts, lost)
    values |= _offload(facts, lost)
    lines = "".join(f"{name}={value}\n" for name, value in values.items())
    granted = taken_for_granted(facts)
    text = header(facts.plan, "Values for a recipe of NeMo 2", Remarks(lost, granted, _NAMES, outcome)) + lines
    return Exported("nemo.values", text.encode(), tuple(lost), granted, outcome)


def _stages(facts: Facts, lost: list[str]) -> dict[str, object]:
    if facts.is_even or facts.pp == 1:
        return {}
    if facts.interleave == 1 and len(Counter(facts.layers[1:-1])) <= 1:
        return {
            "model.config.num_layers_in_first_pipeline_stage": facts.layers[0],
            "model.config.num_layers_in_last_pipeline_stage": facts.layers[-1],
        }
    lost.append(f"layers per stage {', '.join(map(str, facts.layers))}; stages between the first and the last are even")
    return {}


def _recompute(facts: Facts, lost: list[str]) -> dict[str, object]:
    found = facts.flavours
    if set(found) == {Recompute.NONE}:
        return {}
    if not found[Recompute.FULL]:
        if found[Recompute.NONE]:
            lost.append(f"selective recompute in {found[Recompute.SELECTIVE]} of {found.total()} layers only")
        lost.append("selective recompute by op: NeMo recomputes its core attention")
        return {"model.config.recompute_granularity": "selective"}
    if len(found) == 1:
        return {
            "model.config.recompute_granularity": "full",
            "model.config.recompute_method": "uniform",
            "model.config.recompute_num_layers": 1,
        }
    most = max(sum(flavour is Recompute.FULL for flavour in stage) for stage in facts.recompute)
    lost.append(f"recompute by layer; the first {most} layers of every stage are recomputed")
    return {
        "model.config.recompute_granularity": "full",
        "model.config.recompute_method": "block",
        "model.config.recompute_num_layers": most,
    }


def _offload(facts: Facts, lost: list[str]) -> dict[str, object]:
    values: dict[str, object] = {}
    if any(facts.offloaded):
        if facts.pp > 1:
            lost.append(f"activations of {sum(facts.offloaded)} layers in host memory: NeMo offloads without pp only")
        else:
            values |= {
                "model.config.cpu_offloading": True,
                # It keeps the last layer on the device.
                "model.config.cpu_offloading_num_layers": min(facts.offloaded[0], facts.layers[0] - 1),
                "model.config.cpu_offloading_activations": True,
                "model.config.cpu_offloading_weights": False,
            }
    if facts.hosted:
        values["optim.config.optimizer_cpu_offload"] = True
        lost.append(ON_CPU)
        if len(facts.hosted) < len(facts.plan.stages):
            lost.append("which stages offload the optimizer: NeMo does on all of them")
    return values
