"""Parameters of a block are gathered together: one latency per unit, in the formula, the program and the simulator."""

from dataclasses import dataclass, replace
from math import fsum

import pytest

from autopar.cost import Collective as CollectiveKind
from autopar.cost import CostModel, Stack
from autopar.cost.reshard import ALONE
from autopar.degrees import Degrees
from autopar.folding.gather_units import DENSE, EXPERTS, gather_units, parameter_views
from autopar.folding.graph_facts import element_bytes
from autopar.ir.routing import Routed
from autopar.prediction import open_setting
from autopar.program.lower import lower
from autopar.program.records import Collective, Instruction, Operand, Segment, SegmentPhase
from autopar.program.text import format_program, parse_program
from autopar.program.units import bytes_together, units_of
from autopar.sharding import Axis, Mesh, Replicate, Shard
from autopar.simulate.layout import lay_out
from autopar.task import job_costs
from autopar.workload import open_workload
from tests.formulations import COSTS, folded
from tests.programs import ExactCosts, two_block_step, value, work

DP, TP = Mesh.of(dp=2, tp=2).axes


@dataclass(frozen=True, slots=True)
class _Late(ExactCosts):
    """A collective takes a second before its first byte."""

    def collective_seconds(
        self, collective: CollectiveKind, nbytes: float, axis: Axis, routed: Routed | None = None, /
    ) -> float:
        return 1.0 + nbytes / self.bandwidth


def _gather(name: str, nbytes: float, unit: str, axis: Axis = DP) -> Collective:
    whole = Operand(f"{name}.whole", (16,), nbytes)
    return Collective(CollectiveKind.ALL_GATHER, axis, Shard(0), Replicate(), value(name), whole, nbytes, unit=unit)


def _block(*gathers: Collective) -> Segment:
    """Return a forward that runs an op of a second for each of its parameters, which are gathered right before."""
    current, instructions = value("x"), list[Instruction]()
    for number, gather in enumerate(gathers):
        made = value(f"y{number}")
        instructions += [gather, work((current, gather.result), (made,), 1.0)]
        current = made
    external = tuple(gather.operand for gather in gathers)
    return Segment(0, SegmentPhase.FORWARD, (value("x"),), external, tuple(instructions), outputs=(current,))


@pytest.mark.parametrize(
    ("gathers", "latencies"),
    [
        ((("a", "", DP), ("b", "", DP)), 2),
        ((("a", DENSE, DP), ("b", DENSE, DP), ("c", DENSE, DP)), 1),
        ((("a", DENSE, DP), ("b", EXPERTS, DP), ("c", DENSE, DP)), 2),
        ((("a", DENSE, DP), ("b", DENSE, TP)), 2),
    ],
    ids=["alone", "a unit", "experts apart", "two axes"],
)
def test_a_unit_pays_one_latency_per_axis(gathers: tuple[tuple[str, str, Axis], ...], latencies: int) -> None:
    """Bytes add up whatever travels together."""
    segment = _block(*(_gather(name, 4.0, unit, axis) for name, unit, axis in gathers))

    layout = lay_out(segment, _Late())

    assert layout.gather_seconds == latencies + 4.0 * len(gathers)
    assert len(layout.stops) == latencies
    spans = [span for span in layout.spans if span.name.startswith("all_gather")]
    assert fsum(span.seconds for span in spans) == layout.gather_seconds


def test_a_parameter_has_its_share_of_the_bytes_of_its_unit() -> None:
    first, second, third = _gather("a", 4.0, DENSE), _gather("b", 12.0, DENSE), _gather("c", 8.0, "")
    units = units_of(_block(first, second, third))

    assert [bytes_together(own, units) for own in (first, second, third)] == [16.0, 16.0, 8.0]


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_shares_of_a_unit_add_up_to_one(name: str) -> None:
    """What the parameters of a unit pay of its latency is one latency; experts have a unit of their own."""
    graph = folded(name)
    _, wire = element_bytes(graph, COSTS.policy)

    found = gather_units(graph, COSTS, (2, 2))

    for kind in graph.kinds:
        for backward in (False, True):
            members = found[kind.id, backward]
            for unit in {part.unit for part in members.values()}:
                views = parameter_views(graph)
                own = {views.get(name, name): part for name, part in members.items() if part.unit == unit}
                split = [name for name in own if any(size % 2 == 0 for size in graph.graph.values[name].shape)]
                shares = {name: own[name].share for name in split}
                assert fsum(1 / share.parts for share in shares.values()) == pytest.approx(1)
                assert fsum(share.latency for share in shares.values()) == pytest.approx(1)
                assert min(share.latency for share in shares.values()) >= 0.5 / len(split)
                totals = {shares[name].parts * wire[name] * graph.graph.values[name].size for name in split}
                assert max(totals) == pytest.approx(min(totals))
    units = {part.unit for members in found.values() for part in members.values()}
    assert units == ({DENSE, EXPERTS} if name == "mixtral-8x7b" else {DENSE})


def test_a_stack_may_gather_every_parameter_by_itself() -> None:
    costs = CostModel(COSTS.cluster, stack=Stack("mine", gathers="parameter"))

    for members in gather_units(folded("gpt2"), costs, (2, 2)).values():
        assert all(part.share == ALONE for part in members.values())
        views = parameter_views(folded("gpt2"))
        assert {part.unit for part in members.values()} == {views.get(name, name) for name in members}


def test_a_tied_table_that_is_transposed_is_gathered_ahead() -> None:
    """The head reads the table of tokens transposed: a gather of that runs beside kernels as that of any parameter."""
    graph = folded("gpt2")
    ((view, table),) = parameter_views(graph).items()
    head = graph.chain[-1]

    found = gather_units(graph, COSTS, (2, 2))

    assert table in {state.input for state in graph.graph.states}
    assert all(found[head, backward][view].unit == DENSE for backward in (False, True))
    plan = open_setting("zoo:gpt2", cluster="h100").predict(Degrees(dp=8, zero=3, microbatch=1, global_batch=8)).plan
    costs = job_costs(plan.job)
    program = lower(plan, open_workload("zoo:gpt2").folded(8), costs)
    layout = lay_out(program.table()[program.stages[-1].blocks[-1], SegmentPhase.FORWARD], costs)
    assert layout.gather_seconds > 0.9 * layout.link_seconds > 0


def test_units_are_written_and_read() -> None:
    program = two_block_step(Mesh.of(dp=2, tp=4))
    segments = list(program.segments)
    for position, segment in enumerate(segments):
        collectives = [own for own in segment.instructions if isinstance(own, Collective)]
        if collectives:
            instructions = tuple(
                replace(own, unit="dense") if own is collectives[0] else own for own in segment.instructions
            )
            segments[position] = replace(segment, instructions=instructions)
            break
    program = replace(program, segments=tuple(segments))

    text = format_program(program)

    assert text.count(" unit=dense") == 1
    assert parse_program(text) == program
