"""The same step on one device, without a plan: what the ranks are held against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Graph, Op, Phase, Role
from autopar.ranks.assemble import Node, Port, assemble
from autopar.ranks.communicator import Memory, Tensor
from autopar.ranks.compiled_models import Compiled, Engine

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Unpartitioned:
    """Results of a step on one device.

    Attributes:
        outputs: Outputs of the graph, by microbatch and name.
        gradients: Sums over all microbatches by gradient buffer.
        parameters: The updated parameters, by the name under which they enter the next step.
    """

    outputs: Mapping[tuple[int, str], Array]
    gradients: Mapping[str, Array]
    parameters: Mapping[str, Array]


class OneDevice:
    """Runs steps of a graph on one device, each phase as one model.

    Args:
        graph: The graph of one microbatch.
        constants: Its constants, with the loss scaled to a mean over all microbatches.
        memory: Where tensors live.
        engine: Runs the models.

    Raises:
        ExecutionError: If the runtime does not take the graph.
    """

    def __init__(self, graph: Graph, constants: Mapping[str, Array], memory: Memory, engine: Engine) -> None:
        self._graph, self._constants, self._memory, self._engine = graph, constants, memory, engine
        self._sums = {state.input: state.output for state in graph.states if state.role is Role.GRADIENT}
        self._changed = {
            state.input: state.output
            for state in graph.states
            if state.role is Role.PARAMETER and state.output != state.input
        }
        update = [op for op in graph.ops if op.phase is Phase.UPDATE]
        self._micro = self._compile(
            [op for op in graph.ops if op.phase is not Phase.UPDATE], [*graph.outputs, *self._sums.values()]
        )
        self._update = self._compile(update, list(self._changed.values())) if update else None

    def _compile(self, ops: Sequence[Op], results: Sequence[str]) -> Compiled:
        graph = self._graph
        made = {name for op in ops for name in op.outputs}
        read = dict.fromkeys(name for op in ops for name in op.inputs if name and name not in made)
        known = {name: self._constants[name] for name in read if name in self._constants}

        def ports(names: Sequence[str]) -> list[Port]:
            return [Port(name, graph.values[name].shape, graph.values[name].dtype) for name in names]

        inputs, outputs = ports([name for name in read if name not in known]), ports(list(dict.fromkeys(results)))
        nodes = [Node(op.kind, op.attrs, op.inputs, op.outputs) for op in ops]
        return self._engine.compile(assemble(nodes, inputs, outputs, known, graph.opset), inputs, outputs)

    def step(self, microbatches: Sequence[Mapping[str, Array]], states: Mapping[str, Array]) -> Unpartitioned:
        """Run one step; gradient buffers start empty.

        Args:
            microbatches: Per microbatch, an array for each input of the graph.
            states: Parameters, buffers and moments by name.
        """
        read = {port.name for port in self._micro.inputs}
        held = {name: self._memory.load(array) for name, array in states.items() if name in read}
        values = self._graph.values
        sums: dict[str, Tensor] = {
            name: self._memory.zeros(values[name].shape, values[name].dtype) for name in self._sums
        }
        outputs: dict[tuple[int, str], Array] = {}
        for index, data in enumerate(microbatches):
            fed = {name: self._memory.load(array) for name, array in data.items()}
            results = self._engine.run(self._micro, held | fed | sums)
            sums = {name: results[total] for name, total in self._sums.items()}
            outputs.update(((index, name), self._memory.fetch(results[name])) for name in self._graph.outputs)
        held.clear()
        gradients = {name: self._memory.fetch(tensor) for name, tensor in sums.items()}
        after = self.update(microbatches[-1], states, gradients) if self._update is not None else {}
        return Unpartitioned(outputs, gradients, after)

    def update(
        self, data: Mapping[str, Array], states: Mapping[str, Array], gradients: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the parameters an optimizer makes of gradients.

        Args:
            data: Inputs of the graph, the number of the step among them.
            states: Parameters and moments before the step.
            gradients: Sums by gradient buffer.
        """
        assert self._update is not None, "only training steps have an update"
        totals = {self._sums[name]: array for name, array in gradients.items()}
        fed = {name: self._memory.load(np.asarray(array)) for name, array in {**states, **data, **totals}.items()}
        results = self._engine.run(self._update, fed)
        return {name: self._memory.fetch(results[new]) for name, new in self._changed.items()}
