"""Data for training steps, and the law their gradients must keep."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.execute import Executor, run_graph
from autopar.ir.graph import Graph, Phase, Role
from autopar.training import STEP

Array = NDArray[Any]
EXECUTOR = Executor()


def as_float64(graph: Graph) -> Graph:
    """Return a float32 model in float64: its values, constants and casts."""
    values = {
        name: replace(value, dtype="float64") if value.dtype == "float32" else value
        for name, value in graph.values.items()
    }
    constants = {
        name: array.astype(np.float64) if array.dtype == np.float32 else array
        for name, array in graph.constants.items()
    }
    ops = tuple(replace(op, attrs=(("to", 11),)) if op.attrs == (("to", 1),) else op for op in graph.ops)
    return replace(graph, values=values, constants=constants, ops=ops)


def feeds_of(step: Graph, given: Mapping[str, Array]) -> dict[str, Array]:
    """Return float64 data for every input and state: what is given, fresh moments, step 1, otherwise random numbers."""
    feeds: dict[str, Array] = {}
    for index, name in enumerate((*step.inputs, *(state.input for state in step.states))):
        value = step.values[name]
        assert name in given or value.is_float, f"no data for {value}"
        feeds[name] = given[name] if name in given else np.random.default_rng(index).uniform(-2, 2, value.shape)
    feeds |= {state.input: np.zeros_like(feeds[state.input]) for state in step.states if state.role is Role.MOMENT}
    return feeds | ({STEP: np.asarray(1.0, np.float32)} if STEP in step.inputs else {})


def check_types(graph: Graph, values: Mapping[str, Array]) -> None:
    """Assert that every value has the shape and dtype the graph says."""
    for name, value in graph.values.items():
        assert (values[name].shape, str(values[name].dtype)) == (value.shape, value.dtype), f"{value} is computed"


def gradients(step: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the gradient of every trained parameter, by running the step, whose feeds have its dtypes."""
    values = run_graph(step, feeds, EXECUTOR)
    check_types(step, values)
    owners = [state.owner for state in step.states if state.role is Role.GRADIENT]
    return {name: values[f"{name}.grad.sum"] - feeds[f"{name}.grad"] for name in owners}


def check_gradient(step: Graph, feeds: Mapping[str, Array], *, together: bool = False) -> None:
    """Assert (L(p + h d) - L(p - h d)) / 2h = <dL/dp, d> along random directions d, for h = 1e-6 and float64.

    The tolerance is what that leaves: 1e-16 of rounding over h, and some for sums.

    Args:
        step: The training step.
        feeds: Its data.
        together: Move all parameters at once instead of one after the other.
    """
    rng = np.random.default_rng(0)
    h, tolerance = 1e-6, 1e-7
    got = gradients(step, feeds)
    assert got, "nothing is trained"
    loss = replace(step, ops=tuple(op for op in step.ops if op.phase in (Phase.FORWARD, Phase.LOSS)))
    for names in [sorted(got)] if together else [[name] for name in sorted(got)]:
        for _ in range(2):
            direction = {name: rng.uniform(-1, 1, got[name].shape) for name in names}
            ends = [
                run_graph(loss, {**feeds, **{name: feeds[name] + shift * direction[name] for name in names}}, EXECUTOR)
                for shift in (h, -h)
            ]
            slope = float(ends[0][step.outputs[0]] - ends[1][step.outputs[0]]) / (2 * h)
            product = sum(float((got[name] * direction[name]).sum()) for name in names)
            assert abs(product - slope) <= tolerance * max(1.0, abs(slope)), f"gradient of {', '.join(names)}"
