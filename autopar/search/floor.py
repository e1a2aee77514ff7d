"""A floor under the step time of a configuration, before anything is formulated.

On n devices an op takes at least its launch and one n-th of its FLOPs or bytes, whatever its sharding, and the slowest
of p stages at least one p-th of a microbatch. FLOPs and bytes are affine in the number of samples, so two microbatch
sizes give them for all.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel, is_view, op_bytes, op_flops
from autopar.formulate.fold import Folded
from autopar.formulate.options import whole_shapes
from autopar.ir.graph import Phase
from autopar.search.space import Configuration

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Floor:
    """Affine work per distinct op: work = base + slope * samples; arrays over ops that run once per microbatch."""

    counts: FloatArray
    flops: tuple[FloatArray, FloatArray]
    bytes: tuple[FloatArray, FloatArray]
    launch: float
    flops_per_second: float
    bytes_per_second: float

    def seconds(self, configuration: Configuration, global_batch: int) -> float:
        """Return a lower bound on the step seconds of any plan of a configuration."""
        samples = global_batch / configuration.num_microbatches
        devices = configuration.mesh.size
        flops = (self.flops[0] + self.flops[1] * samples) / devices
        moved = (self.bytes[0] + self.bytes[1] * samples) / devices
        per_op = self.launch + np.maximum(flops / self.flops_per_second, moved / self.bytes_per_second)
        microbatch = float(self.counts @ per_op)
        stages = configuration.num_stages
        return microbatch * (configuration.num_microbatches + stages - 1) / stages


def floor(small: Folded, large: Folded, samples: tuple[int, int], costs: CostModel) -> Floor:
    """Return the floor of a model from its graphs at two microbatch sizes; equal graphs if it has only one."""
    work, work_large = _work(small, costs), _work(large, costs)
    # An op that only one size has (an Expand that is none for one sample) adds nothing to a floor.
    common = [name for name, (count, *_) in work.items() if name in work_large and work_large[name][0] == count]
    counts, flops, moved = np.array([work[name] for name in common], dtype=np.float64).reshape(-1, 3).T
    _, flops_large, moved_large = np.array([work_large[name] for name in common], dtype=np.float64).reshape(-1, 3).T
    step = max(1, samples[1] - samples[0])
    slope_flops, slope_bytes = (flops_large - flops) / step, (moved_large - moved) / step
    device = costs.cluster.device
    # Every class of kernel is at most this fast.
    fastest = device.peak(costs.policy.numbers) * max(device.gemm_efficiency, device.attention_efficiency)
    return Floor(
        counts,
        (flops - slope_flops * samples[0], slope_flops),
        (moved - slope_bytes * samples[0], slope_bytes),
        device.launch,
        fastest,
        device.memory_bandwidth * device.bandwidth_efficiency,
    )


def _work(folded: Folded, costs: CostModel) -> dict[str, tuple[float, float, float]]:
    """Return count, FLOPs and bytes of every distinct op that is no view and no update, by name."""
    element_bytes = costs.policy.graph_read_bytes(folded.graph)
    work = {}
    for kind in folded.kinds:
        for op in kind.ops:
            if op.phase is Phase.UPDATE:
                continue
            inputs, outputs = whole_shapes(folded.graph, op)
            first = next((shape for shape in inputs if shape is not None), None)
            if is_view(op, 0 if first is None else first.shape[1]):
                continue
            flops = float(op_flops(op, inputs, outputs)[0])
            moved = float(op_bytes(op, inputs, outputs, element_bytes)[0])
            work[op.name] = (float(kind.count), flops, moved)
    return work
