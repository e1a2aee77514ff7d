"""PyTorch's FSDP2 alone: a plan as a script whose `fully_shard` calls say what is shared, and gathered when."""

from autopar.cost import load_policy
from autopar.frameworks.abilities import ABILITIES, nearest
from autopar.frameworks.assumptions import taken_for_granted
from autopar.frameworks.facts import Facts
from autopar.frameworks.fsdp import lost_by
from autopar.frameworks.header import Remarks, header
from autopar.fusion.rules import MIB
from autopar.plan import Exported
from autopar.recompute import Recompute

_TYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_SCRIPT = '''from functools import partial

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

REPLICAS, SHARDS = {replicas}, {shards}  # copies, and devices that share the parameters of each
LAYERS = {layers}  # modules that are gathered one after the other
GROUPS = {groups}  # layers of each group, which are gathered and reduced together
BUCKET_MB = {bucket}  # of gradients, where nothing is sharded; None for PyTorch's default
RESHARD_AFTER_FORWARD = {reshards}  # whether the backward gathers parameters again
GATHER_AGAIN = {again}  # whether each of the microbatches of a step does
MICROBATCHES = {microbatches}
SHARES = {shares}  # devices, and microbatches of each, where these have different numbers of them
RECOMPUTED = {recomputed}  # layers, by number, whose forward runs again
OFFLOADS = {offloads}  # whether parameters, gradients and the optimizer lie in host memory
PRECISION = {precision}


def microbatches(rank):
    """Return the microbatches of a process: those of its share."""
    for devices, count in SHARES:
        if rank < devices:
            return count
        rank -= devices
    return MICROBATCHES


def mesh(device_type="cuda"):
    """Return the devices: all share, or groups of neighbours do and hold copies (HSDP)."""
    if REPLICAS == 1:
        return init_device_mesh(device_type, (SHARDS,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))


def wrap(model, device_mesh):
    """Return a model whose layers share their parameters; the model itself is changed."""
    for number in RECOMPUTED:
        owner, _, last = LAYERS[number].rpartition(".")
        setattr(model.get_submodule(owner), last, checkpoint_wrapper(model.get_submodule(LAYERS[number])))
    if SHARDS == 1:
        return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB) if REPLICAS > 1 else model
    share = partial(
        fully_shard,
        mesh=device_mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=PRECISION, reduce_dtype=torch.float32 if PRECISION else None),
        offload_policy=CPUOffloadPolicy() if OFFLOADS else OffloadPolicy(),
    )
    layers = [model.get_submodule(name) for name in LAYERS]
    for count in GROUPS:
        group, layers = layers[:count], layers[count:]
        share(group if len(group) > 1 else group[0], reshard_after_forward=RESHARD_AFTER_FORWARD)
    return share(model, reshard_after_forward=False)  # what is around the layers is read at both ends of a pass


def step(model, microbatches, loss, optimizer):
    """Run a step on (data, target) pairs, one per microbatch, and return the loss of this process.

    Its mean over all processes is the mean over all samples: each has the microbatches of its share, and a loss that is
    divided by the microbatches of a process on the mean of all.
    """
    devices = sum(devices for devices, _ in SHARES)
    mean = sum(devices * count for devices, count in SHARES) / devices if SHARES else MICROBATCHES
    total = 0.0
    for number, (data, target) in enumerate(microbatches):
        is_last = number + 1 == len(microbatches)
        if SHARDS > 1:
            model.set_reshard_after_backward(GATHER_AGAIN or is_last)
            if SHARES:
                model.set_requires_all_reduce(is_last)  # copies meet once per step
        elif REPLICAS > 1:
            model.require_backward_grad_sync = is_last
        value = loss(model(data), target) / mean
        value.backward()
        total += value.item()
    optimizer.step()
    optimizer.zero_grad()
    return total
'''


def export(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as a script for FSDP2.

    Args:
        facts: The plan.
        outcome: What the script comes to, for its header.
    """
    degrees, _ = nearest(facts, ABILITIES["fsdp"])
    lost = lost_by(facts, "fsdp")
    if facts.shares and facts.zero and facts.axes[0].zero:
        lost.append("ZeRO-1 between groups of devices: FSDP2 copies what these hold")
    shards = (degrees.shard or degrees.data) if degrees.zero else 1
    layers = facts.modules
    if degrees.zero and not layers:
        lost.append("layers that are gathered one after the other: no module has the parameters of one alone")
    counts = (1,) * len(layers) if facts.units is None or sum(facts.units.counts) != len(layers) else facts.units.counts
    lost += [own.lost for own in (facts.units, facts.bucket) if own is not None]
    recomputed = range(len(layers)) if degrees.recompute == Recompute.FULL else ()
    half = load_policy(facts.plan.job.precision).half
    granted = taken_for_granted(facts, "fsdp")
    remarks = Remarks(lost, granted, "Names are those of PyTorch 2.13 (torch.distributed.fsdp).", outcome)
    text = header(facts.plan, "FSDP2 for PyTorch", remarks) + _SCRIPT.format(
        replicas=facts.dp // shards,
        shards=shards,
        layers=list(layers),
        groups=list(counts),
        bucket=None if facts.bucket is None else f"{facts.bucket.nbytes / MIB:.4g}",
        reshards=facts.zero == 3,
        again=facts.zero == 3,
        microbatches=facts.num_microbatches,
        shares=list(facts.shares),
        recomputed=list(recomputed),
        offloads=bool(facts.hosted) and bool(degrees.zero),
        precision=_TYPES.get(half, "None"),
    )
    return Exported("fsdp.py", text.encode(), tuple(lost), granted, outcome)
