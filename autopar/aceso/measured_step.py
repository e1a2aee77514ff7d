"""The step of a configuration from measured events, by our own pipeline rule: 1F1B with transfers that block.

Aceso's estimate takes the backward of an op as it was measured. In public databases that of a matrix product takes as
long as its forward: one product of the two that it consists of. The gradient of the weights, which has the same number
of operations, was not measured. So where the products of a layer take less than 1.5 times their forward in the
backward, each gets another product: the shorter of the two that were measured, without their all-reduces. The
classifier gets seconds by its weights, at the pace of the layer's products; the embedding's gradient is in its
backward.

Transfers between stages block both sides, as Megatron-LM's do: a pass takes its kernels and the transfer of its result.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.aceso.cost import EMBEDDING, Configuration, CostModel, Stage
from autopar.aceso.profile_database import MIB
from autopar.aceso.stage_loops import BACKWARD, FORWARD, INPUTS, OUTPUTS, WEIGHTS
from autopar.schedule import SCHEDULES
from autopar.schedule.timing import time_tasks

Floats = NDArray[np.float64]

ROW_SPLIT = ("enc-attention-dense", "enc-MLP-GEMM-2")
"""Products whose forward is summed over tensor-parallel devices; that of the others is in the backward."""
TWO_PRODUCTS = 1.5
"""Backward over forward of products from which on the backward has both of its products: between 1 and 2."""
PRODUCT_BYTES = MIB
"""Weights from which on an op of a layer is a matrix product; those of normalisations have some KiB."""


def weight_gradient_seconds(model: CostModel, stage: Stage, microbatch: int) -> float:
    """Return the seconds that gradients of weights take which were not measured; 0 if they were."""
    table = model.table(stage.tensor, microbatch // stage.data)
    products = [kind for kind in model.layer_kinds if table[kind, WEIGHTS] >= PRODUCT_BYTES]
    reduced = 0.0
    if stage.tensor > 1:
        size = round(table[model.layer_kinds.start, INPUTS] / MIB)
        reduced = model.profile.collectives.get(("all_reduce", stage.tensor), {}).get(size, 0.0)
    rows = np.array([model.profile.ops[kind] in ROW_SPLIT for kind in products])
    forward = table[products, FORWARD] - np.where(rows, reduced, 0.0)
    backward = table[products, BACKWARD] - np.where(rows, 0.0, reduced)
    if backward.sum() >= TWO_PRODUCTS * forward.sum():
        return 0.0
    pace = float(np.minimum(forward, backward).sum() / table[products, WEIGHTS].sum())
    own = table[model.kinds[stage.first : stage.first + stage.ops], WEIGHTS]
    names = model.names[stage.first : stage.first + stage.ops]
    return pace * float(sum(size for size, name in zip(own, names, strict=True) if name != EMBEDDING))


def step_seconds(model: CostModel, configuration: Configuration) -> float:
    """Return the seconds of a step of a configuration."""
    count = len(configuration.stages)
    passes, before = np.zeros((count, 3)), 0
    for index, stage in enumerate(configuration.stages):
        own = model.window(stage, configuration.microbatch)
        enters, leaves = model.crossings(before, stage.devices)
        again = own[list(stage.again), FORWARD].sum()
        backward = own[:, BACKWARD].sum() + again + weight_gradient_seconds(model, stage, configuration.microbatch)
        sent = model.transfer(own[-1, OUTPUTS], crosses=leaves) if index < count - 1 else 0.0
        returned = model.transfer(own[0, INPUTS], crosses=enters) if index else 0.0
        passes[index, :2] = own[:, FORWARD].sum() + sent, backward + returned
        before += stage.devices
    num = model.global_batch // configuration.microbatch
    none = np.zeros(count)
    return float(time_tasks(SCHEDULES["1f1b"], count, num, passes, none, none).ends.max())
