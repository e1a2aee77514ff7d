"""A floor under the step time of a configuration, before anything is formulated.

On n devices an op takes at least its launch and one n-th of its FLOPs or bytes at the rate of its class, whatever its
sharding, and the slowest of p stages at least one p-th of a microbatch. FLOPs and bytes are affine in the number of
samples, so two microbatch sizes give them for all.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost import ALONE, DEFAULT, CostModel, is_view, op_bytes
from autopar.formulate.fold import Folded
from autopar.formulate.options import whole_shapes
from autopar.ir.graph import Phase
from autopar.search.space import Configuration

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Floor:
    """Affine seconds of one device per distinct op: base + slope * samples; arrays over ops run once per microbatch."""

    counts: FloatArray
    launches: FloatArray
    compute: tuple[FloatArray, FloatArray]
    memory: tuple[FloatArray, FloatArray]

    def seconds(self, configuration: Configuration, global_batch: int) -> float:
        """Return a lower bound on the step seconds of any plan of a configuration."""
        samples = global_batch / configuration.num_microbatches
        devices = configuration.mesh.size
        compute, memory = (base + slope * samples for base, slope in (self.compute, self.memory))
        per_op = self.launches + np.maximum(compute, memory) / devices
        microbatch = float(self.counts @ per_op)
        return microbatch * configuration.pipeline(DEFAULT).rounds / configuration.num_stages


def floor(small: Folded, large: Folded, samples: tuple[int, int], costs: CostModel) -> Floor:
    """Return the floor of a model from its graphs at two microbatch sizes; equal graphs if it has only one."""
    work, work_large = _work(small, costs), _work(large, costs)
    # An op that only one size has (an Expand that is none for one sample) adds nothing to a floor.
    common = [name for name, (count, *_) in work.items() if name in work_large and work_large[name][0] == count]
    counts, launches, *times = np.array([work[name] for name in common], dtype=np.float64).reshape(-1, 4).T
    _, _, *times_large = np.array([work_large[name] for name in common], dtype=np.float64).reshape(-1, 4).T
    step = max(1, samples[1] - samples[0])
    slopes = [(many - few) / step for few, many in zip(times, times_large, strict=True)]
    compute, memory = ((few - slope * samples[0], slope) for few, slope in zip(times, slopes, strict=True))
    return Floor(counts, launches, compute, memory)


def _work(folded: Folded, costs: CostModel) -> dict[str, tuple[float, float, float, float]]:
    """Return count and seconds of launch, compute and memory of every distinct op but views and updates, by name."""
    element_bytes = costs.policy.graph_read_bytes(folded.graph)
    work = {}
    ranks = {name: len(value.shape) for name, value in folded.graph.values.items()}
    for kind in folded.kinds:
        fused = costs.fuse(kind.ops, ranks)
        for op in kind.ops:
            part = fused.get(op.name, ALONE)
            if op.phase is Phase.UPDATE or not part.launches:
                continue
            inputs, outputs = whole_shapes(folded.graph, op)
            first = next((shape for shape in inputs if shape is not None), None)
            if is_view(op, 0 if first is None else first.shape[1]):
                continue
            compute = float(costs.least_compute_seconds(op, inputs, outputs)[0])
            moved = float(op_bytes(op, inputs, outputs, element_bytes, part.unread, part.unwritten)[0])
            work[op.name] = (
                float(kind.count),
                costs.launch_seconds(op, part),
                compute,
                moved / costs.bytes_per_second(op),
            )
    return work
