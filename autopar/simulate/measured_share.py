"""Which share of a step was measured: seconds of ops and transfers that a profile has, over all of them."""

from autopar.cost import ALONE, CostModel, devices_in_node
from autopar.program.records import Collective, Compute, Exchange, Program, Segment, SegmentPhase, StageProgram
from autopar.program.units import bytes_together, units_of
from autopar.recompute import Recompute
from autopar.simulate.layout import compute_seconds, element_bytes, fused_in, shapes_of

_ONCE = (SegmentPhase.REDUCE, SegmentPhase.UPDATE)
_PER_MICROBATCH = (SegmentPhase.FORWARD, SegmentPhase.AGAIN, SegmentPhase.BACKWARD, SegmentPhase.WEIGHT)


def measured_share(program: Program, costs: CostModel) -> float:
    """Return the share of the seconds of all ops and collectives of all stages that was measured, 0 to 1.

    Sends between stages are left out: they are not part of what a device does.
    """
    table, known, total = program.table(), 0.0, 0.0
    seconds = {key: _segment_seconds(segment, costs) for key, segment in table.items()}
    for stage in program.stages:
        for index, kind in enumerate(stage.blocks):
            for phase in (*_PER_MICROBATCH, *_ONCE):
                own = seconds.get((kind, phase))
                if own is not None:
                    times = _times(stage, index, phase, program.num_microbatches)
                    known, total = known + times * own[0], total + times * own[1]
    return known / total if total else 0.0


def _times(stage: StageProgram, index: int, phase: SegmentPhase, microbatches: int) -> int:
    """Return how often a block runs a segment in a step."""
    flavour = stage.recompute[index]
    if phase in _ONCE:
        return 1
    if phase is SegmentPhase.AGAIN and flavour is not Recompute.SELECTIVE:
        return 0
    if phase is SegmentPhase.FORWARD and flavour is Recompute.FULL:
        return 2 * microbatches
    return microbatches


def _segment_seconds(segment: Segment, costs: CostModel) -> tuple[float, float]:
    """Return measured seconds and all seconds of a segment, nothing hidden."""
    prices, known, total = costs.prices, 0.0, 0.0
    fused, units = fused_in(segment, costs), units_of(segment)
    for each in segment.instructions:
        seconds, is_known = 0.0, False
        match each:
            case Compute():
                seconds = compute_seconds(each, costs, fused.get(each.op.name, ALONE))
                sizes = element_bytes(each)
                inputs, outputs = shapes_of(each.inputs), shapes_of(each.outputs)
                is_known = prices is not None and prices.knows_op(each.op, inputs, outputs, sizes)
            case Collective() if each.axis.size > 1:
                together = bytes_together(each, units)
                seconds = float(costs.collective_seconds(each.kind, together, each.axis, each.routed))
                seconds *= each.bytes / together if together else 1.0
                inside = devices_in_node(each.axis, costs.cluster.devices_per_node)
                is_known = prices is not None and prices.knows_transfer(each.kind, together, each.axis.size, inside)
            case Exchange() if each.axis.size > 1:
                seconds = costs.exchange_seconds(each.bytes, each.axis)
                inside = min(2, devices_in_node(each.axis, costs.cluster.devices_per_node))
                is_known = prices is not None and prices.knows_transfer("send", each.bytes, 2, inside)
        total += seconds
        known += seconds if is_known else 0.0
    return known, total
