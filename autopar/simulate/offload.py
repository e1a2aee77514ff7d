"""Time on the host link of lowered blocks, for the planner's formula: that of the simulator's own layouts."""

from collections.abc import Mapping

import numpy as np

from autopar.formulate.offload_costs import HostLinks
from autopar.program.block import LoweredKind
from autopar.program.records import SegmentPhase
from autopar.simulate.layout import Costs, lay_out


def host_links(lowered: Mapping[int, LoweredKind], costs: Costs) -> HostLinks:
    """Return how long what blocks could offload is on the host link.

    Args:
        lowered: The kinds of blocks.
        costs: Whose cluster says how devices reach their host.

    Raises:
        ClusterError: If it does not say.
    """
    host = costs.cluster.known_host()
    seconds = np.zeros((max(lowered) + 1, len(_PHASES)))
    for kind, block in lowered.items():
        for segment in block.segments:
            if segment.phase in _PHASES:
                seconds[kind, _PHASES.index(segment.phase)] = lay_out(segment, costs).host_link_seconds
    out, back, state_out, state_back = seconds.T
    state = np.array([host.both(*both) for both in zip(state_out, state_back, strict=True)])
    return HostLinks(out, back, state)


_PHASES = (SegmentPhase.OFFLOAD, SegmentPhase.FETCH, SegmentPhase.STATE_OFFLOAD, SegmentPhase.STATE_FETCH)
