"""What the passes of blocks take at least, as rows of a linear program: one for each term of each maximum."""

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.bounds.master_rows import COPIED, Counting, Name, Pass, Rows
from autopar.cost.overlap import LAUNCH_EXPONENT, LEAST_COPY, LEAST_GATHER, LEAST_WAIT, WEIGHT_COVER
from autopar.formulate.offload_costs import HostRates
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Slot, Tables
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES

HOST_RATIOS = (0.5, 1.0, 2.0)
"""Seconds of the device over those of the host at which the mean of both (`launched`) is replaced by its tangent."""


class PassRows:
    """Writes them.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        rows: Where to.
        each: How often prices count, and the flavours of the most frequent kind of blocks.
        fastest: By kind the least that blocks of other kinds recompute.
        rates: Of copies to and from the host, seconds for a share of the limit.
    """

    def __init__(
        self,
        tables: Tables,
        pipeline: Pipeline,
        rows: Rows,
        each: Counting,
        fastest: Sequence[Recompute],
        rates: HostRates,
    ) -> None:
        self._tables, self._rows, self._each, self._fastest, self._rates = tables, rows, each, fastest, rates
        self._overlap, self._least_copy = pipeline.overlap, pipeline.overlap.exposed(LEAST_COPY)
        schedule = SCHEDULES[pipeline.schedule]
        self._trains, self._splits = schedule.trains, schedule.splits

    def write(self) -> dict[Pass, float]:
        """Write the rows of the passes of one instance of each kind, and return the sum of all passes."""
        host, again = self._tables.host_seconds, self._tables.recompute_host_seconds
        counts, main, flavours = self._each.counts, self._each.main, self._each.flavours
        total: dict[Pass, float] = {}
        for kind, count in enumerate(counts):
            for index in range(len(flavours)) if kind == main else [None]:
                offloads = index is not None and flavours[index] is Recompute.OFFLOAD
                out, back = (self._rates.out, self._rates.back) if offloads else (0.0, 0.0)
                self._pass(("forward", kind, index), self._forward_terms(*_FORWARD), kind, index, host[kind, 0], out)
                total["forward", kind, index] = count
                if self._trains:
                    self._pass(("backward", kind, index), self._backward_terms(), kind, index, host[kind, 1], back)
                    total["backward", kind, index] = count
            if kind != main and self._fastest[kind] is Recompute.FULL:
                total["forward", kind, None] *= 2
        for index, flavour in enumerate(flavours):
            if flavour is Recompute.FULL:
                total["forward", main, index] *= 2
            elif flavour is Recompute.SELECTIVE:
                terms = self._forward_terms(*_AGAIN)
                self._pass(("again", main, index), terms, main, index, float(again[main]))
                total["again", main, index] = counts[main]
        return total

    def _pass(
        self,
        name: Pass,
        terms: Sequence[Mapping[Slot, float]],
        kind: int,
        flavour: int | None,
        host: float,
        link: float = 0.0,
    ) -> None:
        """Write the rows of one pass: at least each term, and with what the host takes at least each tangent.

        With copies beside it, `link` seconds for a share of the limit, it takes as long as they do at least, and a part
        of them is waited for.
        """
        flavours = len(self._each.flavours)
        own = np.ones(flavours) if flavour is None else np.eye(flavours)[flavour]
        whole: dict[Name, float] = {name: 1.0, COPIED: -self._least_copy * link}
        if link:
            self._rows.add({name: 1.0, COPIED: -link})
        for term in terms:
            self._rows.add(whole, self._each.prices(kind, term, flavour))
            for ratio in HOST_RATIOS if host else ():
                scale = (1 + ratio**LAUNCH_EXPONENT) ** (1 / LAUNCH_EXPONENT - 1)
                device = {slot: factor * ratio ** (LAUNCH_EXPONENT - 1) * scale for slot, factor in term.items()}
                self._rows.add(whole, self._each.prices(kind, device, flavour), host * scale * own)
        if host:
            self._rows.add(whole, None, host * own)

    def _forward_terms(self, kernels: Slot, waits: Slot, gathers: Slot) -> list[dict[Slot, float]]:
        """Return the terms of `Overlap.forward`: gathers hide behind all kernels, or as far as any do."""
        saving = self._overlap.saving
        return [
            {kernels: 1 - saving, waits: 1.0, gathers: 1.0},
            {kernels: 1.0, waits: 1.0, gathers: self._overlap.price(LEAST_GATHER)},
        ]

    def _backward_terms(self) -> list[dict[Slot, float]]:
        """Return the terms of `Overlap.backward`, or what the halves of a split one take at least."""
        s, gather, wait = self._overlap.saving, self._overlap.price(LEAST_GATHER), self._overlap.price(LEAST_WAIT)
        if self._splits:
            return [_backward(1 - s, 1 - s, 1.0, 1.0), _backward(1.0, 1.0, 1.0, gather)]
        cover = WEIGHT_COVER
        return [
            _backward(1 - s, 1 - s, 1.0, 1.0),
            _backward(1.0, 1 - s * cover, 1.0, gather),
            _backward(1 - s, 1 - s * (1 - cover), wait, 1.0),
            _backward(1.0, 1.0, wait, gather),
        ]


_FORWARD = (Slot.FORWARD, Slot.FORWARD_WAIT, Slot.FORWARD_GATHER)
_AGAIN = (Slot.SELECTIVE, Slot.SELECTIVE_WAIT, Slot.SELECTIVE_GATHER)


def _backward(kernels: float, weight: float, waits: float, gathers: float) -> dict[Slot, float]:
    return {
        Slot.BACKWARD: kernels,
        Slot.BACKWARD_WEIGHT: weight,
        Slot.BACKWARD_WAIT: waits,
        Slot.BACKWARD_GATHER: gathers,
    }
