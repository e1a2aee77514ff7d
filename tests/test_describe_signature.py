"""Signatures of plans, and remarks where formula and simulation order plans differently."""

from dataclasses import replace

import pytest

from autopar.configuration import Configuration
from autopar.describe.axis_roles import AxisRole
from autopar.describe.signature import Signature, signature
from autopar.plan import PartTimes, Plan, StagePlan
from autopar.report.ranking import ranking, reorderings
from autopar.sharding import Axis, Mesh
from tests.plans import two_stage_plan

BLOCKS = two_stage_plan().blocks
STAGES = (StagePlan((0, 4), (0, 4), "none"),)


def _role(name: str, size: int, role: str, zero: int = 0, *, experts: bool = False) -> AxisRole:
    return AxisRole(Axis(name, size, 1), role, zero, in_part=False, sequence_parallel=False, experts=experts)


def _signature(
    mesh: Mesh, *roles: AxisRole, count: int = 4, schedule: str = "1f1b", stages: tuple[StagePlan, ...] = STAGES
) -> Signature:
    return signature(Configuration(len(stages), mesh, count, schedule), stages, BLOCKS, roles)


def test_the_same_degrees_on_another_mesh_are_the_same_plan() -> None:
    """dp=4 on one axis, and on two."""
    one = _signature(Mesh.of(inner=4), _role("inner", 4, "dp", 3))
    two = _signature(Mesh.of(outer=2, inner=2), _role("outer", 2, "dp", 3), _role("inner", 2, "dp", 3))
    idle = _signature(Mesh.of(outer=1, inner=4), _role("outer", 1, "idle"), _role("inner", 4, "dp", 3))

    assert one == two == idle


@pytest.mark.parametrize(
    "other",
    [
        _signature(Mesh.of(inner=4), _role("inner", 4, "tp")),
        _signature(Mesh.of(inner=4), _role("inner", 4, "dp", 2)),
        _signature(Mesh.of(outer=2, inner=2), _role("outer", 2, "dp", 3), _role("inner", 2, "tp")),
        _signature(Mesh.of(inner=4), _role("inner", 4, "dp", 3), count=8),
        _signature(
            Mesh.of(inner=4),
            _role("inner", 4, "dp", 3),
            stages=(StagePlan((0, 2), (0, 4), "none"), StagePlan((2, 4), (4, 8), "none")),
        ),
        _signature(Mesh.of(inner=4), _role("inner", 4, "dp", 3), stages=(StagePlan((0, 4), (0, 4), "full"),)),
    ],
)
def test_other_degrees_levels_counts_or_recompute_are_another_plan(other: Signature) -> None:
    """Each difference alone."""
    assert other != _signature(Mesh.of(inner=4), _role("inner", 4, "dp", 3))


def test_a_schedule_counts_where_there_is_something_to_order() -> None:
    """With one stage all schedules are one."""
    mesh, role = Mesh.of(inner=4), _role("inner", 4, "dp")
    two = (StagePlan((0, 2), (0, 4), "none"), StagePlan((2, 4), (4, 8), "none"))

    assert _signature(mesh, role, schedule="gpipe") == _signature(mesh, role)
    assert _signature(mesh, role, schedule="gpipe", stages=two) != _signature(mesh, role, stages=two)


def test_recompute_in_one_more_layer_is_akin() -> None:
    """The layer that recomputes least decides; here blocks 1 and 2 are layers."""
    mesh, role = Mesh.of(inner=4), _role("inner", 4, "dp")
    layers = tuple(replace(block, instances=(0, 1, 2) if block.kind == 0 else block.instances) for block in BLOCKS)
    made = [
        signature(Configuration(1, mesh, 4, "1f1b"), (StagePlan((0, 4), (0, 4), text),), layers, (role,))
        for text in ("none", "full*1 none*3", "full*2 none*2", "full*3 none*1")
    ]

    assert made[0] == made[1] == made[2] != made[3]


def test_axes_of_one_role_have_the_highest_of_their_levels() -> None:
    """ZeRO-3 over the links inside a node is ZeRO-3."""
    mesh = Mesh.of(outer=2, inner=2)
    levels = [(0, 3), (3, 1), (3, 3)]
    made = {_signature(mesh, _role("outer", 2, "dp", a), _role("inner", 2, "dp", b)) for a, b in levels}

    assert len(made) == 1


def test_sequence_parallelism_is_another_plan() -> None:
    """It takes other collectives and other memory."""
    mesh, role = Mesh.of(inner=4), _role("inner", 4, "tp")

    assert _signature(mesh, role) != _signature(mesh, replace(role, sequence_parallel=True))


def test_another_expert_degree_is_another_plan() -> None:
    """The number of devices counts, not the axes; with several meshes the largest."""
    mesh = Mesh.of(outer=2, inner=2)
    made = [
        _signature(mesh, _role("outer", 2, "dp", experts=a), _role("inner", 2, "dp", experts=b))
        for a, b in ((False, False), (True, False), (False, True), (True, True))
    ]
    one, other = _role("inner", 4, "dp"), _role("inner", 4, "dp", experts=True)
    unequal = signature(Configuration(1, mesh, 4, "1f1b"), STAGES, BLOCKS, (one,), ((other,),))

    assert [own.experts for own in (*made, unequal)] == [1, 2, 2, 4, 4]
    assert made[1] == made[2]
    assert not made[0].is_akin_to(made[1])
    assert not made[3].is_akin_to(made[1])


def _plan(objective: float, step: float, **parts: tuple[float, float]) -> Plan:
    plan = two_stage_plan()
    assert plan.simulated is not None
    against = tuple(PartTimes(name, *seconds) for name, seconds in parts.items())
    return replace(
        plan,
        objective=objective,
        simulated=replace(plan.simulated, step_seconds=step, against=against),
        alternatives=(),
    )


def test_a_reordering_names_the_part_that_differs() -> None:
    """The formula has b before a by 10 %; simulated, waits of b take 0.3 s that the formula does not have."""
    a = _plan(1.1, 1.2, passes=(0.9, 0.9), waits=(0.1, 0.1), end=(0.1, 0.2))
    b = _plan(1.0, 1.3, passes=(0.8, 0.8), waits=(0.1, 0.4), end=(0.1, 0.1))

    (told,) = reorderings((a, b))

    assert told == (
        "plan 2 is 9.1 % faster than plan 1 by the formula, 8.3 % slower simulated: "
        "waits 400 ms instead of 100 ms, of the other 100 ms instead of 100 ms"
    )
    assert reorderings((b, replace(a, objective=2.0))) == []


def test_a_reordering_names_all_parts_that_matter() -> None:
    """Those a quarter as far apart as the first one, which comes first, and none that speaks for the other order."""
    a = _plan(1.1, 1.2, passes=(0.9, 0.9), waits=(0.1, 0.1), end=(0.1, 0.2), update=(0.1, 0.1))
    b = _plan(1.0, 1.3, passes=(0.8, 0.9), waits=(0.1, 0.4), end=(0.1, 0.1), update=(0.1, 0.11))

    (told,) = reorderings((a, b))

    assert told.endswith(
        "simulated: waits 400 ms instead of 100 ms, of the other 100 ms instead of 100 ms; "
        "passes 900 ms instead of 800 ms, of the other 900 ms instead of 900 ms"
    )


@pytest.mark.parametrize(
    ("complete", "words"),
    [(0.0, ""), (1.4, "no substantially different plan is faster"), (1.05, "different plan can be faster than 1.05 s")],
)
def test_the_list_says_how_complete_it_is(complete: float, words: str) -> None:
    """Up to the last of its plans, or from which time on others may exist; nothing if nothing is known."""
    plan = _plan(1.0, 1.0)
    assert plan.search is not None
    listed = replace(plan, alternatives=(_plan(1.2, 1.2),), search=replace(plan.search, complete=complete))

    text = " ".join(" ".join(ranking(listed)).split())

    assert (words in text) if words else ("differs from these" not in text)
