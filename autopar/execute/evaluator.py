"""ONNX's reference evaluator, with what does not change from run to run looked up once.

`onnx.reference` reads names from protocol buffers and attributes by name, and formats messages that nobody sees, at
every node of every run, and discovery runs functions of thirty small kernels thousands of times.
"""

from collections.abc import Callable, Mapping
from typing import Any

from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Step = tuple[Callable[..., tuple[Any, ...]], tuple[str, ...], tuple[str, ...], bool]
"""What runs a node, the names of its inputs and outputs, and whether it takes attributes of the function it is in."""


class Evaluator(ReferenceEvaluator):  # type: ignore[misc]
    """Runs the nodes of a graph or function in order."""

    def run(
        self,
        output_names: Any,
        feed_inputs: Mapping[str, Any],
        attributes: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Any:
        """See `ReferenceEvaluator.run`; graphs with graphs inside are left to it."""
        steps = self._steps()
        if steps is None or output_names is not None or others:
            return super().run(output_names, feed_inputs, attributes, **others)
        values: dict[str, Any] = {"": None, **self.rt_inits_, **feed_inputs}
        for run, inputs, outputs, linked in steps:
            arguments = [values[name] for name in inputs]
            made = run(*arguments, linked_attributes=attributes) if linked and attributes else run(*arguments)
            values.update(zip(outputs, made, strict=False))
        return [values[name] for name in self.output_names]

    def _steps(self) -> tuple[Step, ...] | None:
        """Return how the nodes are run; None if one of them has to see all values."""
        if not hasattr(self, "_known"):
            plain = not any(node.need_context() or node.has_subgraph for node in self.rt_nodes_)
            self._known = tuple(map(_step, self.rt_nodes_)) if plain else None
        return self._known


def _step(node: OpRun) -> Step:
    linked = bool(node.has_linked_attribute)
    plain = type(node).run is OpRun.run and not linked  # else it does something before or after
    return _runner(node) if plain else node.run, tuple(node.input), tuple(node.output), linked


def _runner(node: OpRun) -> Callable[..., tuple[Any, ...]]:
    """Return what runs a node as `OpRun.run` does, its attributes looked up before."""
    attributes = {name: getattr(node, name) for name in node.attributes_names_}

    def run(*inputs: Any) -> tuple[Any, ...]:
        made: tuple[Any, ...] = node._check_and_fix_outputs(node._run(*inputs, **attributes))
        return made

    return run
