"""What a plan is for: the model, and what was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DimSize = int | float | tuple[int, ...]
"""What a dynamic dim, or a field of a zoo model's configuration, is set to; only fields are fractions or tuples."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Which model a plan is for.

    Attributes:
        name: Name of the model.
        source: File path or `zoo:NAME`, as the user gave it.
        sha256: Hash of the model file; for zoo models of the serialised graph.
        num_parameters: Elements of all parameters; weights of a few bits count one each, their scales nothing.
        dims: Dynamic dims, or fields of a zoo model's configuration, that were set by the user.
        tokens: Tokens of one sample; 0 if the model does not read tokens.
        trained: Elements of the parameters that are not frozen; 0 if none is.
    """

    name: str
    source: str
    sha256: str
    num_parameters: int
    dims: tuple[tuple[str, DimSize], ...] = ()
    tokens: int = 0
    trained: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for.

    Attributes:
        mode: "train" (forward, loss, backward, update) or "infer" (forward).
        gpus: Number of devices.
        global_batch: Samples per step.
        memory_limit: Bytes per device that a plan may use.
        cluster: Description of the cluster, as `autopar.cluster` writes it.
        loss: Loss of the training step.
        optimizer: Optimizer of the training step.
        stack: Software stack, as `autopar.cost.stack` writes it; empty for the default one.
        precision: What is stored in which precision, a key of `autopar.cost.POLICIES`.
        pins: What the user pinned or forbade, as a file of pins has it.
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it; plans that do not
            say were made so. True where nothing is normalised over the batch.
        lora: Adapters that are trained in place of the model, as `--lora` takes them; "" without.
    """

    mode: str
    gpus: int
    global_batch: int
    memory_limit: float
    cluster: Mapping[str, Any]
    loss: str = "auto"
    optimizer: str = "adam"
    stack: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "mixed"
    pins: Mapping[str, Any] = field(default_factory=dict)
    sync_batchnorm: bool = True
    lora: str = ""
