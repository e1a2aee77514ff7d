"""Rows of the master problem that bound the passes of a block from below.

```text
forward   >= (1 - s) c + x + a
forward   >= c + x + e a
backward  >= (1 - s) (c + w) + x + a
backward  >= c + (1 - s k) w + x + e a                      joint;      c + w + x + e a   split
backward  >= (1 - s) c + (1 - s (1 - k)) w + e' x + a       joint only
backward  >= c + w + e' x + e a                             joint only
```

With collectives y in chunks beside products (`hides_tp` of a stack), where n = (1 - k') times what of x can hide:

```text
forward   >= (1 - s) c + x + y + a
forward   >= (1 - s k') c + x + y + e a
forward   >= c + x + e" y + e a
backward  >= (1 - s) (c + w) + x + y + a
backward  >= (1 - s k') (c + w) + x + y + e a - s n         n = 0 split; n <= (1 - k') k w and (1 - k') (1 - l) x joint
backward  >= c + w + x + e" y + e a                         split
backward  >= c + (1 - s k) w + x + e" y + e a               joint
backward  >= c + w + e' x + e" y + e a                      joint
```

With rows r of experts that travel beside shared experts, whose kernels are u and whose weight gradients are g
(`covers_rows` of a stack), c stands for c + u and w for w + g in all rows, and each row is written twice:

```text
pass      >= row + e_r r                            r' <= (1 - l_r) r
pass      >= row + r - s' (u + g)                   r' <= u + g
```

Look here for how the maxima of the overlap formula become linear rows: one per term, and a tangent of the smooth
maximum of host and device. c are kernel seconds, w those of weight gradients, x communication that is waited for, a
gathers; s, e, e', e", k, k' and l are the saving, the least prices of gathers, waits and chunks, the weight cover, the
chunk cover and the least share of waits that is exposed, of the overlap model; s', e_r and l_r are saving, least price
and least exposed share of rows.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.bounds.master_rows import COPIED, PassVariable, RowWriter, SlotCounts, Variable
from autopar.cost.overlap import (
    CHUNK_COVER,
    LAUNCH_EXPONENT,
    LEAST_CHUNKED,
    LEAST_COPY,
    LEAST_GATHER,
    LEAST_WAIT,
    WEIGHT_COVER,
)
from autopar.formulate.offload_costs import HostRates
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Slot, Tables
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES


class PassRows:
    """Writes the rows of passes.

    Args:
        tables: The placement problem's tables.
        pipeline: Stages, microbatches, schedule.
        rows: The rows to add to.
        slot_counts: Matrices over slots, and the flavours of the most frequent kind.
        fastest: For each kind, the least that blocks of other kinds recompute.
        rates: Seconds per share of the limit of copies to and from the host.
    """

    def __init__(
        self,
        tables: Tables,
        pipeline: Pipeline,
        rows: RowWriter,
        slot_counts: SlotCounts,
        fastest: Sequence[Recompute],
        rates: HostRates,
    ) -> None:
        self._tables, self._rows, self._slot_counts = tables, rows, slot_counts
        self._fastest, self._rates = fastest, rates
        self._overlap, self._least_copy = pipeline.overlap, pipeline.overlap.exposed(LEAST_COPY)
        schedule = SCHEDULES[pipeline.schedule]
        self._trains, self._splits = schedule.trains, schedule.splits

    def write(self) -> dict[PassVariable, float]:
        """Write the rows of one instance of each kind; return how often each pass counts in the sum of all passes."""
        host, recompute_host = self._tables.host_seconds, self._tables.recompute_host_seconds
        counts, main, flavours = self._slot_counts.counts, self._slot_counts.main, self._slot_counts.flavours
        total: dict[PassVariable, float] = {}
        for kind, count in enumerate(counts):
            for index in range(len(flavours)) if kind == main else [None]:
                offloads = index is not None and flavours[index] is Recompute.OFFLOAD
                out, back = (self._rates.out, self._rates.back) if offloads else (0.0, 0.0)
                terms = self._beside_shared(self._forward_terms(*_FORWARD_SLOTS), _FORWARD_SHARED)
                self._write_pass(("forward", kind, index), terms, kind, index, host[kind, 0], out)
                total["forward", kind, index] = count
                if self._trains:
                    terms = self._beside_shared(self._backward_terms(), _BACKWARD_SHARED)
                    self._write_pass(("backward", kind, index), terms, kind, index, host[kind, 1], back)
                    total["backward", kind, index] = count
            if kind != main and self._fastest[kind] is Recompute.FULL:
                total["forward", kind, None] *= 2
        for index, flavour in enumerate(flavours):
            if flavour is Recompute.FULL:
                total["forward", main, index] *= 2
            elif flavour is Recompute.SELECTIVE:
                terms = self._beside_shared(self._forward_terms(*_RECOMPUTE_SLOTS), _RECOMPUTE_SHARED)
                self._write_pass(("recompute", main, index), terms, main, index, float(recompute_host[main]))
                total["recompute", main, index] = counts[main]
        return total

    def _write_pass(
        self,
        name: PassVariable,
        terms: Sequence[Mapping[Slot, float]],
        kind: int,
        flavour: int | None,
        host: float,
        link: float = 0.0,
    ) -> None:
        """Write the rows of one pass.

        Each term is a lower bound of the device's seconds. With `host` seconds of kernel launches, the
        tangent of the smooth maximum of host and device (`launched`) where both are equal is a lower bound as well;
        tangents elsewhere raised no bound (docs/benchmarks/ablation.md). With copies of `link` seconds per share of the
        limit, the pass takes at least as long as the copies, and exposes a part of them.
        """
        flavours = len(self._slot_counts.flavours)
        of_flavour = np.ones(flavours) if flavour is None else np.eye(flavours)[flavour]
        exposed: dict[Variable, float] = {name: 1.0, COPIED: -self._least_copy * link}
        if link:
            self._rows.add({name: 1.0, COPIED: -link})
        for term in terms:
            self._rows.add(exposed, self._slot_counts.of_kind(kind, term, flavour))
            if host:
                scale = 2 ** (1 / LAUNCH_EXPONENT - 1)
                device = {slot: factor * scale for slot, factor in term.items()}
                self._rows.add(exposed, self._slot_counts.of_kind(kind, device, flavour), host * scale * of_flavour)
        if host:
            self._rows.add(exposed, None, host * of_flavour)

    def _beside_shared(
        self, terms: Sequence[dict[Slot, float]], slots: tuple[Slot, Mapping[Slot, Slot]]
    ) -> list[dict[Slot, float]]:
        """Return the terms of a pass with rows of experts that travel beside shared experts.

        Args:
            terms: The terms without.
            slots: Slot of the rows, and slots of kernels of shared experts by those of other kernels.
        """
        if not self._overlap.shared:
            return list(terms)
        rows, shared = slots
        saving, found = self._overlap.rows_saving, []
        for term in terms:
            own = {beside: term[kernels] for kernels, beside in shared.items()}
            found.append({**term, **own, rows: self._overlap.rows_price})
            found.append({**term, **{slot: factor - saving for slot, factor in own.items()}, rows: 1.0})
        return found

    def _forward_terms(self, kernels: Slot, waits: Slot, chunked: Slot, gathers: Slot) -> list[dict[Slot, float]]:
        """Terms of `Overlap.forward`: gathers hide behind all kernels, or as far as the kernels last."""
        saving, gather = self._overlap.saving, self._overlap.price(LEAST_GATHER)
        if self._overlap.chunked:
            chunk = self._overlap.price(LEAST_CHUNKED)
            return [
                {kernels: 1 - saving, waits: 1.0, chunked: 1.0, gathers: 1.0},
                {kernels: 1 - saving * CHUNK_COVER, waits: 1.0, chunked: 1.0, gathers: gather},
                {kernels: 1.0, waits: 1.0, chunked: chunk, gathers: gather},
            ]
        return [
            {kernels: 1 - saving, waits: 1.0, gathers: 1.0},
            {kernels: 1.0, waits: 1.0, gathers: gather},
        ]

    def _backward_terms(self) -> list[dict[Slot, float]]:
        """Terms of `Overlap.backward`; lower bounds of both halves if the backward is split."""
        s, gather, wait = self._overlap.saving, self._overlap.price(LEAST_GATHER), self._overlap.price(LEAST_WAIT)
        if self._overlap.chunked:
            return self._chunked_backward_terms(gather, wait)
        if self._splits:
            return [_backward(1 - s, 1 - s, 1.0, 1.0), _backward(1.0, 1.0, 1.0, gather)]
        cover = WEIGHT_COVER
        return [
            _backward(1 - s, 1 - s, 1.0, 1.0),
            _backward(1.0, 1 - s * cover, 1.0, gather),
            _backward(1 - s, 1 - s * (1 - cover), wait, 1.0),
            _backward(1.0, 1.0, wait, gather),
        ]

    def _chunked_backward_terms(self, gather: float, wait: float) -> list[dict[Slot, float]]:
        """Terms of `Overlap.backward` where some collectives run in chunks beside products.

        Args:
            gather: Least price of gathers.
            wait: Least price of collectives that weight gradients hide.
        """
        s, chunk, part = self._overlap.saving, self._overlap.price(LEAST_CHUNKED), CHUNK_COVER
        beside = 1 - s * part
        terms = [_backward(1 - s, 1 - s, 1.0, 1.0, 1.0)]
        if self._splits:
            return [*terms, _backward(beside, beside, 1.0, gather, 1.0), _backward(1.0, 1.0, 1.0, gather, chunk)]
        rest, hidden = s * (1 - part), 1.0 - self._overlap.exposed(LEAST_WAIT)
        return [
            *terms,
            _backward(beside, beside - rest * WEIGHT_COVER, 1.0, gather, 1.0),
            _backward(beside, beside, 1.0 - rest * hidden, gather, 1.0),
            _backward(1.0, 1 - s * WEIGHT_COVER, 1.0, gather, chunk),
            _backward(1.0, 1.0, wait, gather, chunk),
        ]


_FORWARD_SLOTS = (Slot.FORWARD, Slot.FORWARD_WAIT, Slot.FORWARD_CHUNKED, Slot.FORWARD_GATHER)
_RECOMPUTE_SLOTS = (Slot.SELECTIVE, Slot.SELECTIVE_WAIT, Slot.SELECTIVE_CHUNKED, Slot.SELECTIVE_GATHER)


_FORWARD_SHARED = Slot.FORWARD_ROWS, {Slot.FORWARD: Slot.FORWARD_SHARED}
_RECOMPUTE_SHARED = Slot.SELECTIVE_ROWS, {Slot.SELECTIVE: Slot.SELECTIVE_SHARED}
_BACKWARD_SHARED = (
    Slot.BACKWARD_ROWS,
    {Slot.BACKWARD: Slot.BACKWARD_SHARED, Slot.BACKWARD_WEIGHT: Slot.BACKWARD_SHARED_WEIGHT},
)


def _backward(
    kernels: float, weight: float, waits: float, gathers: float, chunked: float | None = None
) -> dict[Slot, float]:
    """Factors of the slots of a backward."""
    return {
        Slot.BACKWARD: kernels,
        Slot.BACKWARD_WEIGHT: weight,
        Slot.BACKWARD_WAIT: waits,
        Slot.BACKWARD_GATHER: gathers,
        **({} if chunked is None else {Slot.BACKWARD_CHUNKED: chunked}),
    }
