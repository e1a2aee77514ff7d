"""Tactics against Shardy: random programs under random schedules lie alike, or the difference has a reason."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.discover import discover
from autopar.plan import Job, ModelInfo
from autopar.tactics import Shard
from autopar.tactics.draft import Draft
from tests.executions import COSTS, Execution, random_feeds
from tests.gradients import as_float64
from tests.shardy_programs import MESH, Line, Program, difference, programs, schedules

pytest.importorskip("jaxlib", reason="needs Shardy, which comes with jaxlib: pip install autopar[jax]")
pytest.importorskip("jax", reason="needs jax, which sets up Shardy's dialects: pip install autopar[jax]")


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_values_lie_where_shardy_puts_them(data: st.DataObject) -> None:
    """Unless Shardy decides by kinds of ops what tactics decide in the order of the graph, or decisions collide."""
    program = data.draw(programs())
    schedule = data.draw(schedules(program))

    found = difference(program, schedule, program.state())

    assert found.reason, found.values


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_was_compared_equals_the_unpartitioned_program(data: st.DataObject) -> None:
    program = data.draw(programs())
    schedule = data.draw(schedules(program))
    graph = as_float64(program.graph())
    model = Execution.of_graph(graph, *random_feeds(graph, 1, {}))
    info, job = ModelInfo("program", "program", "", 0), Job("infer", MESH.size, 1, 75e9, {})
    draft = Draft(model.folded, discover(graph), MESH, COSTS, model=info, job=job, batch={}, num_microbatches=1)
    for tactic in schedule:
        draft.apply(tactic)

    assert model.check(draft.plan()) <= 1e-9


def _product(schedule: list[Shard]) -> tuple[str, dict[str, object]]:
    """Return how Shardy differs on x + (x w), in which the sum wants the product like x."""
    program = Program(
        {"x": (8, 8), "w": (8, 8)},
        (Line("MatMul", ("x", "w"), "v0", (8, 8)), Line("Add", ("v0", "x"), "v1", (8, 8))),
    )
    found = difference(program, schedule, program.state())
    return found.reason, {name: own for name, (own, _) in found.values.items()}


def test_the_reasons_for_a_difference() -> None:
    """Columns of x are rows of w for the product and columns of the sum: tactics go by the graph, Shardy sums first."""
    assert _product([Shard({"x": 0}, "a")]) == ("same", {})
    assert _product([Shard({"x": 1}, "a")]) == ("order", {"w": (("a",), ())})


def test_a_value_that_collides_with_itself() -> None:
    """The square of x with both dims split: tactics split the result by its rows only, and say what collided."""
    program = Program({"x": (8, 8)}, (Line("MatMul", ("x", "x"), "v0", (8, 8)),))

    found = difference(program, [Shard({"x": 0}, "a"), Shard({"x": 1}, "b")], program.state())

    assert found.reason == "conflict"
    assert found.values == {"v0": ((("a",), ()), (("a",), ("b",)))}
