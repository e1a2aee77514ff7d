"""Aceso's cost model: seconds of a step and bytes of a stage of a GPT, from measured ops.

With m microbatches and S the seconds a stage takes for one of them, a step takes `max S (m - 1) + sum S`;

    S     = sum of forward + backward + forward of ops that run again + transfer of its input and of its output
    bytes = 8 W + behind x kept + kept + fullest + max(W, largest forward + largest backward reserve)
    kept  = input + sum of activations - those dropped

W are its weights in half precision (with gradients, main parameters and two moments: 8 W), `behind` the stages after
it. A run of neighbouring ops that run again drops the activations of all but its last op; the fullest run is in memory
once. Attention's softmax shares its activation with the dropout after it, which counts half as much again. The last op
of a layer hands its output to the next layer, so it drops nothing there, and a run is made again layer by layer.
Source: microsoft/SuperScaler, search/aceso_cost_model.py, with its default options; Liu et al., "Aceso: Efficient
Parallel DNN Training through Iterative Bottleneck Alleviation", EuroSys 2024.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from autopar.aceso.profile_database import Bandwidth, Database, ModelProfile
from autopar.aceso.stage_loops import (
    BACKWARD,
    FORWARD,
    INPUTS,
    KEPT,
    OUTPUTS,
    RESERVED_BACKWARD,
    RESERVED_FORWARD,
    WEIGHTS,
)
from autopar.errors import DataError, JobError

Floats = NDArray[np.float64]

LAYER_START = "enc-1st-layernorm"
TAIL_START = "final-layernorm"
EMBEDDING = "encoder-embedding"
LOSS = "gpt-post-process"
SHARED = "enc-attention-softmax"  # its activation is the dropout's, too
WITH_MASK = "enc-attention-dropout"
MASK_SHARE = 1.5  # of the dropout's activation, half of which is its mask (Aceso's cost model)
STATE_COPIES = 8  # of half-precision weights: 1 weights, 1 gradients, 2 main parameters, 4 moments (Aceso's cost model)
LAYERS = {"350M": 24, "1_3B": 24, "2_6B": 32, "6_7B": 32, "13B": 40, "22B": 48, "40B": 48}
"""Layers of the GPTs by size; the first five from Aceso's settings, the others from published searches (Mist)."""
STAGE_DEVICES = (1, 2, 4, 8)
"""Devices that a stage may have: those that the public databases measured."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What runs on one stage.

    Attributes:
        first: Position of its first op in the model.
        ops: Number of its ops.
        tensor: Tensor-parallel degree.
        data: Data-parallel degree.
        again: Per op, whether it runs again in the backward.
    """

    first: int
    ops: int
    tensor: int
    data: int
    again: tuple[bool, ...]

    @property
    def devices(self) -> int:
        """Number of its devices."""
        return self.tensor * self.data


@dataclass(frozen=True, slots=True)
class Configuration:
    """A plan in Aceso's words.

    Attributes:
        microbatch: Samples that all data-parallel devices of a stage take together.
        stages: In the order of the pipeline.
    """

    microbatch: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model says of a configuration.

    Attributes:
        seconds: Of the step.
        stage_seconds: Of one microbatch, stage by stage.
        stage_bytes: Of a device, stage by stage.
    """

    seconds: float
    stage_seconds: tuple[float, ...]
    stage_bytes: tuple[float, ...]


class CostModel:
    """One GPT on one cluster of equal nodes.

    Args:
        profile: Measurements.
        layers: Transformer layers.
        devices: Number of devices.
        node: Devices per node.
        global_batch: Samples of a step.
        inside: Bandwidth inside a node.
        between: Bandwidth between nodes.

    Raises:
        DataError: If the ops of the profile are not those of a GPT.
        JobError: If the nodes are not full.
    """

    def __init__(
        self,
        profile: ModelProfile,
        *,
        layers: int,
        devices: int,
        node: int,
        global_batch: int,
        inside: Bandwidth,
        between: Bandwidth,
    ) -> None:
        names = profile.ops
        if LAYER_START not in names or TAIL_START not in names or names.index(LAYER_START) > names.index(TAIL_START):
            raise DataError(
                f"{profile.model} has no ops {LAYER_START} and {TAIL_START}: only GPTs can be planned",
                hint="take a model whose name begins with gpt",
            )
        if devices > node and devices % node:
            raise JobError(f"{devices} GPUs do not fill nodes of {node}", hint=f"take a multiple of {node} GPUs")
        start, end = names.index(LAYER_START), names.index(TAIL_START)
        order = [*range(start), *(list(range(start, end)) * layers), *range(end, len(names))]
        self.profile = profile
        self.layers = layers
        self.devices = devices
        self.node = min(node, devices)
        self.global_batch = global_batch
        self.kinds = np.array(order)
        self.layer_kinds = range(start, end)
        self.names = tuple(names[kind] for kind in order)
        self._inside, self._between = inside, between

    @classmethod
    def of(
        cls, database: Database, model: str, *, devices: int, node: int, global_batch: int, layers: int | None = None
    ) -> Self:
        """Return the model of a GPT of a database; its layers are known from its name, or have to be given.

        Raises:
            DataError: If the database has no such model, or a file of it is malformed.
            JobError: If nothing says how many layers it has, or nodes are not full.
        """
        name = database.find(model)
        size = name.partition("_")[2]
        depth = layers or LAYERS.get(size)
        if depth is None:
            raise JobError(f"nothing says how many layers {name} has", hint="give --layers")
        return cls(
            database.profile(name),
            layers=depth,
            devices=devices,
            node=node,
            global_batch=global_batch,
            inside=database.bandwidth(between_nodes=False),
            between=database.bandwidth(between_nodes=True),
        )

    @cached_property
    def starts_layer(self) -> NDArray[np.bool_]:
        """Per op, whether it is the first one of a layer."""
        return np.array([name == LAYER_START for name in self.names])

    @cached_property
    def may_start_run(self) -> NDArray[np.bool_]:
        """Per op, whether ops that run again may begin with it: Aceso begins with none of these three."""
        return np.array([name not in (LAYER_START, EMBEDDING, LOSS) for name in self.names])

    def microbatches(self) -> tuple[int, ...]:
        """Return the sizes of microbatches that divide the global batch and were measured."""
        return tuple(size for size in self.profile.microbatches if self.global_batch % size == 0)

    def degrees(self, devices: int, microbatch: int) -> tuple[tuple[int, int], ...]:
        """Return the (tensor, data) degrees of a stage that were measured."""
        return tuple(
            (tensor, devices // tensor)
            for tensor in self.profile.degrees
            if tensor <= self.node
            and devices % tensor == 0
            and microbatch % (devices // tensor) == 0
            and microbatch // (devices // tensor) in self.profile.microbatches
        )

    def table(self, tensor: int, samples: int) -> Floats:
        """Return the columns of every kind of op: seconds, then bytes; see the constants of `aceso.kernel`.

        Ops are sharded as in Megatron-LM, by columns and then by rows, which is algorithm 0 of the profile.
        """
        own = self.profile
        place = (slice(None), own.microbatches.index(samples), own.degrees.index(tensor), own.algorithms.index(0))
        share = np.array([0.0 if name == SHARED else MASK_SHARE if name == WITH_MASK else 1.0 for name in own.ops])
        columns = (
            own.forward, own.backward, own.activations, own.weights, own.inputs,
            own.reserved_forward, own.reserved_backward, own.outputs,
        )  # fmt: skip
        found = np.stack([column[place] for column in columns], axis=1)
        found[share == 0, KEPT] = 0.0
        found[share > 0, KEPT] *= share[share > 0]
        return found

    def crossings(self, before: int, devices: int) -> tuple[bool, bool]:
        """Return whether input and output of a stage come from and go to another node."""
        return before > 0 and before % self.node == 0, (before + devices) % self.node == 0

    def transfer(self, size: float, *, crosses: bool) -> float:
        """Return the seconds of a transfer of so many bytes."""
        return (self._between if crosses else self._inside).seconds(size)

    def stage_seconds(self, stage: Stage, microbatch: int, before: int) -> float:
        """Return the seconds of one microbatch on a stage that has `before` devices ahead of it."""
        own = self.window(stage, microbatch)
        crosses = self.crossings(before, stage.devices)
        moved = self.transfer(own[0, INPUTS], crosses=crosses[0]) + self.transfer(own[-1, OUTPUTS], crosses=crosses[1])
        return float(own[:, [FORWARD, BACKWARD]].sum() + own[list(stage.again), FORWARD].sum() + moved)

    def stage_bytes(self, stage: Stage, microbatch: int, behind: int) -> float:
        """Return the bytes of a device of a stage that `behind` stages follow."""
        own = self.window(stage, microbatch)
        weights, kept = own[:, WEIGHTS].sum(), own[:, KEPT]
        reserved = own[:-1, RESERVED_FORWARD].max(initial=0.0) + own[:-1, RESERVED_BACKWARD].max(initial=0.0)
        dropped, fullest = self.runs(stage, kept)
        rest = own[0, INPUTS] + kept.sum() - dropped
        return float(STATE_COPIES * weights + rest * (behind + 1) + fullest + max(weights, reserved))

    def window(self, stage: Stage, microbatch: int) -> Floats:
        """Return the columns of every op of a stage."""
        kinds = self.kinds[stage.first : stage.first + stage.ops]
        return np.asarray(self.table(stage.tensor, microbatch // stage.data)[kinds])

    def runs(self, stage: Stage, kept: Floats) -> tuple[float, float]:
        """Return the bytes that runs of a stage drop, and those of the fullest run."""
        dropped = fullest = running = 0.0
        for place in range(stage.ops - 1):
            ends_layer = self.starts_layer[stage.first + place + 1]
            if stage.again[place] and stage.again[place + 1]:
                dropped += 0.0 if ends_layer else kept[place]
                running += kept[place]
            if ends_layer or not (stage.again[place] and stage.again[place + 1]) or place == stage.ops - 2:
                fullest, running = max(fullest, running), 0.0
        return dropped, fullest

    def estimate(self, configuration: Configuration) -> Estimate:
        """Return what a configuration takes."""
        seconds, bytes_, before = [], [], 0
        for index, stage in enumerate(configuration.stages):
            seconds.append(self.stage_seconds(stage, configuration.microbatch, before))
            bytes_.append(self.stage_bytes(stage, configuration.microbatch, len(configuration.stages) - 1 - index))
            before += stage.devices
        num = self.global_batch // configuration.microbatch
        return Estimate(max(seconds) * (num - 1) + sum(seconds), tuple(seconds), tuple(bytes_))
