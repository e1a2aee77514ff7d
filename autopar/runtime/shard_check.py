"""Values computed on shards, held against those of the unpartitioned graph, one by one as they are computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ProgramError
from autopar.execute import Executor, run_graph
from autopar.ir.graph import Graph, Role
from autopar.program.records import Operand
from autopar.runtime.blocks import Blocks, gather
from autopar.sharding import Mesh, format_placements

Array = NDArray[Any]

_SMALLEST = 1e-3  # what should cancel leaves the rounding of its terms: smaller tensors are held to this scale


class Check:
    """What every value of a step should be, and the comparison with it.

    The sums of gradients are those so far, for microbatches that come in order, as they do in every schedule.
    """

    def __init__(
        self,
        graph: Graph,
        microbatches: Sequence[Mapping[str, Array]],
        feeds: Mapping[str, Array],
        tolerance: float,
        executor: Executor,
    ) -> None:
        """Prepare to run each microbatch when it is first asked for.

        Args:
            graph: The unpartitioned graph.
            microbatches: Per microbatch, an array for each input.
            feeds: The states before the step, and constants that are other ones in it.
            tolerance: Largest deviation of a float, relative to the largest element of its tensor.
            executor: Runs the graph.
        """
        self._graph = graph
        self._data = microbatches
        self._feeds = dict(feeds)
        self._tolerance = tolerance
        self._executor = executor
        self._values: list[dict[str, Array]] = []
        self._sums = {state.input: state.output for state in graph.states if state.role is Role.GRADIENT}

    def expected(self, microbatch: int, tensor: str) -> Array:
        """Return what a tensor of the graph is for a microbatch."""
        while len(self._values) <= microbatch:
            feeds = {**self._feeds, **self._data[len(self._values)]}
            values = run_graph(self._graph, feeds, self._executor)
            self._values.append(values)
            self._feeds.update((buffer, values[total]) for buffer, total in self._sums.items())
        return self._values[microbatch][tensor]

    def total(self, tensor: str) -> str:
        """Return the name of the sum of gradients that a buffer holds after the last backward, or the tensor itself."""
        return self._sums.get(tensor, tensor)

    def problem(self, operand: Operand, blocks: Blocks, mesh: Mesh, microbatch: int, tensor: str) -> str:
        """Return what is wrong with the blocks of a value; "" if nothing is.

        Args:
            operand: The value.
            blocks: What each device holds.
            mesh: The devices.
            microbatch: Which one it was computed for.
            tensor: What it is in the graph.
        """
        name = f"{tensor!r} at {format_placements(operand.placements)}"
        if len(operand.placements) != len(mesh.axes):
            return f"{tensor!r} does not say how it lies on mesh {mesh}"
        try:
            found = gather(blocks, operand.placements, mesh)
        except ProgramError as error:
            return f"{name}: {error.args[0]}"
        wanted = self.expected(microbatch, tensor)
        if found.shape != wanted.shape:
            return f"{name} is {list(found.shape)} put together, {list(wanted.shape)} in the unpartitioned model"
        off = _deviation(found, wanted)
        largest = float(np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted)))
        allowed = self._tolerance * max(largest, _SMALLEST) if wanted.dtype.kind == "f" else 0.0
        if off <= allowed:
            return ""
        return f"{name} is off by {off:.2g}; its largest element in the unpartitioned model is {largest:.2g}"


def _deviation(found: Array, wanted: Array) -> float:
    """Return the largest difference of two elements; infinities and NaNs have to be the same."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0))
