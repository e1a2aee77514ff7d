"""Time on the host link of lowered blocks, for the planner's formula: that of the simulator's own layouts."""

from collections.abc import Iterable, Mapping

import numpy as np

from autopar.formulate.offload_costs import FloatArray, HostLinks
from autopar.program.block import LoweredKind
from autopar.program.hosted import host_update, shared_parameters, streams
from autopar.program.records import SegmentPhase
from autopar.recompute import STATE_KINDS, Hosted
from autopar.simulate.layout import Costs, lay_out, lay_out_host_update


def host_links(lowered: Mapping[int, LoweredKind], costs: Costs, what: Hosted = Hosted.OPTIMIZER) -> HostLinks:
    """Return how long what blocks could offload is on the host link.

    Args:
        lowered: The kinds of blocks.
        costs: Whose cluster says how devices reach their host.
        what: What of their state lies in host memory.

    Raises:
        ClusterError: If it does not say.
    """
    host = costs.cluster.known_host()
    seconds = np.zeros((max(lowered) + 1, len(_PHASES)))
    updates, shared = np.zeros(len(seconds)), shared_parameters(lowered.values())
    for kind, block in lowered.items():
        copies = {segment.phase: segment for segment in (*block.segments, *streams(block, what, shared))}
        for phase, segment in copies.items():
            if phase in _PHASES:
                seconds[kind, _PHASES.index(phase)] = lay_out(segment, costs).host_link_seconds
        if STATE_KINDS[what].updates_there and SegmentPhase.UPDATE in copies:
            update = copies[SegmentPhase.UPDATE]
            updates[kind] = lay_out_host_update(lay_out(update, costs), host_update(update, copies), costs).seconds
    out, back, state_out, state_back, sums_out, sums_back, parameters = seconds.T

    def both(ways: Iterable[tuple[float, float]]) -> FloatArray:
        return np.array([host.both(*each) for each in ways])

    return HostLinks(
        out,
        back,
        both(zip(state_out, state_back, strict=True)),
        parameters,
        both(zip(sums_out, sums_back + parameters, strict=True)),
        updates if STATE_KINDS[what].updates_there else None,
    )


_PHASES = (
    SegmentPhase.OFFLOAD,
    SegmentPhase.FETCH,
    SegmentPhase.STATE_OFFLOAD,
    SegmentPhase.STATE_FETCH,
    SegmentPhase.SUM_OFFLOAD,
    SegmentPhase.SUM_FETCH,
    SegmentPhase.PARAMETER_FETCH,
)
