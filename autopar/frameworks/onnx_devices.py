"""ONNX: the plan written into the model with ONNX's own multi-device metadata (IR version 11)."""

from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path

import onnx

from autopar.folding.fold import Folded
from autopar.frameworks.facts import offloads_lost
from autopar.frameworks.placements import placed_ops, stage_of_block
from autopar.plan import Exported, Plan
from autopar.sharding import Mesh, Partial, Placements, Shard, parse_placements
from autopar.workload import HUGGING_FACE, ZOO

_IR_VERSION = 11
"""The first with device configurations (onnx.proto, IR_VERSION_2025_05_12)."""
CONFIGURATION = "autopar"
LOST = "autopar.not_expressed"
"""Metadata key of what the file cannot say."""


def export(plan: Plan, folded: Folded, model: onnx.ModelProto) -> Exported:
    """Return the model with a device configuration, and on every node the sharding of its tensors and its stage."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.ir_version = max(result.ir_version, _IR_VERSION)
    result.configuration.add(name=CONFIGURATION, num_devices=plan.job.gpus)
    stages, values = stage_of_block(plan), folded.graph.values
    meshes = [plan.variant_of(stage).device_mesh for stage in plan.stages]
    by_output = {name: entry for entry in placed_ops(plan, folded) for name in entry[0].outputs if name}
    unmatched: list[str] = []
    partial: list[str] = []
    for node in result.graph.node:
        entry = next((by_output[name] for name in node.output if name in by_output), None)
        if entry is None or len(entry[0].inputs) != len(node.input):
            if node.op_type != "Constant":
                unmatched.append(node.name or node.output[0])
            continue
        op, placed, block = entry
        stage = stages[block]
        first = plan.stages[stage].devices[0]
        device = node.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=stage)
        done: set[str] = set()
        outputs = dict(zip(op.outputs, placed.outputs, strict=True))
        tensors = [
            *zip(node.input, op.inputs, placed.inputs, strict=True),
            *((name, name, outputs[name]) for name in node.output if name in outputs),
        ]
        for name, value, text in tensors:
            if not name or not text or name in done:
                continue
            done.add(name)
            placements = parse_placements(text)
            if any(isinstance(placement, Partial) for placement in placements):
                partial.append(name)
                continue
            device.sharding_spec.append(sharding_spec(name, values[value].shape, placements, meshes[stage], first))
    lost = [*_lost(plan, unmatched, partial), *_weights(plan, model)]
    result.metadata_props.add(key="autopar.plan", value=plan.summary)
    result.metadata_props.add(key=LOST, value="\n".join(lost))
    name = f"{Path(plan.model.name).stem}.devices.onnx"
    return Exported(name, result.SerializeToString(deterministic=True), tuple(lost))


def sharding_spec(
    name: str, shape: Sequence[int], placements: Placements, mesh: Mesh, first: int = 0
) -> onnx.ShardingSpecProto:
    """Return ONNX's form of the placement of a tensor.

    Args:
        name: The tensor.
        shape: Its global shape.
        placements: `Shard` or `Replicate` per mesh axis.
        mesh: The devices.
        first: Number of the first device of the mesh.
    """
    by_dim: dict[int, list[int]] = {}
    chunks: dict[int, int] = {}
    for index, placement in enumerate(placements):
        if isinstance(placement, Shard):
            by_dim.setdefault(placement.dim, []).append(index)
            chunks[placement.dim] = placement.chunks
    spec = onnx.ShardingSpecProto(tensor_name=name)
    for dim in sorted(by_dim):
        parts = prod(mesh.axes[index].size for index in by_dim[dim])
        entry = spec.sharded_dim.add(axis=dim)
        if chunks[dim] > 1:  # equal chunks side by side, each of which is split
            entry.simple_sharding.add(dim_value=chunks[dim], num_shards=1)
        entry.simple_sharding.add(dim_value=shape[dim] // chunks[dim], num_shards=parts)
    split = [index for dim in sorted(by_dim) for index in by_dim[dim]]
    others = [index for index in range(len(mesh.axes)) if index not in split]
    strides = [axis.stride for axis in mesh.axes]
    for position, shard in enumerate(product(*(range(mesh.axes[index].size) for index in split))):
        start = first + sum(at * strides[index] for at, index in zip(shard, split, strict=True))
        holders = [
            start + sum(at * strides[index] for at, index in zip(copy, others, strict=True))
            for copy in product(*(range(mesh.axes[index].size) for index in others))
        ]
        if len(holders) == 1:
            spec.device.append(holders[0])
        else:  # a negative number stands for a group of devices that hold the same block
            spec.device.append(-1 - position)
            spec.index_to_device_group_map.add(key=-1 - position, value=holders)
    return spec


def _weights(plan: Plan, model: onnx.ModelProto) -> list[str]:
    """Return how the file is loaded if its weights are not in it."""
    places = [
        next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    ]
    if not places:
        return []
    load = "onnx.load(path, load_external_data=False)"
    if plan.model.source.startswith((ZOO, HUGGING_FACE)):
        return [f"weights: {len(places)} tensors have a shape and no data, so that plain onnx.load fails; use {load}"]
    files = ", ".join(dict.fromkeys(places))
    return [f"weights: {len(places)} tensors lie in {files}; keep the file beside, or read it with {load}"]


def _lost(plan: Plan, unmatched: Sequence[str], partial: Sequence[str]) -> list[str]:
    lost = []
    if plan.job.mode == "train":
        lost.append("the backward pass and the update: the file holds the forward pass only (ZeRO, gradients)")
    if partial:
        lost.append(f"{len(set(partial))} tensors that are terms still to be summed, such as {partial[0]}; no spec")
    if unmatched:
        lost.append(
            f"{len(unmatched)} nodes that the import folded into constants or rewrote, such as {unmatched[0]}; no spec"
        )
    if len(plan.stages) > 1:
        lost.append(f"the order of microbatches ({plan.schedule}, {plan.num_microbatches} of {plan.microbatch})")
    elif plan.num_microbatches > 1:
        counts = " or ".join(str(share.num_microbatches) for share in plan.shares) or plan.num_microbatches
        lost.append(f"{counts} microbatches of {plan.microbatch}")
    lost += offloads_lost(plan)
    if any(flavour not in ("none", "offload") for stage in plan.stages for flavour in stage.flavours):
        lost.append("recompute")
    return lost
