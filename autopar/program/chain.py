"""Which values neighbouring blocks hand to each other.

Segments belong to kinds of blocks, so what a kind sends must be what every successor expects. Values that skip blocks (skip connections, the
gradient of a tied embedding) are not part of the hand-over: they are external to the segments that read them.
"""

from dataclasses import dataclass
from itertools import pairwise

from autopar.formulate.fold import Folded, boundary_groups
from autopar.ir.graph import Phase


@dataclass(frozen=True, slots=True)
class HandOver:
    """Names of the values a kind receives and sends, by position, in the forward and in the backward pass."""

    forward_in: tuple[str, ...]
    forward_out: tuple[str, ...]
    backward_in: tuple[str, ...]
    backward_out: tuple[str, ...]


def hand_overs(folded: Folded) -> dict[int, HandOver]:
    """Return what every kind receives and sends: the values all its neighbours agree on."""
    received: dict[int, dict[int, str]] = {kind.id: {} for kind in folded.kinds}
    sent: dict[int, dict[int, str]] = {kind.id: {} for kind in folded.kinds}
    backward = set()
    for group, (producers, arrivals) in enumerate(boundary_groups(folded)):
        for producer in producers:
            op = folded.kinds[producer.kind].ops[producer.position]
            sent[producer.kind][group] = op.outputs[producer.slot]
            if op.phase is Phase.BACKWARD:
                backward.add(group)
        for kind, arrival in arrivals:
            received[kind][group] = arrival.value
    incoming = {kind: set(groups) for kind, groups in received.items()}
    outgoing = {kind: set(groups) for kind, groups in sent.items()}
    links = [(a, b, False) for a, b in pairwise(folded.chain)] + [(b, a, True) for a, b in pairwise(folded.chain)]
    ends = ((folded.chain[0], False, incoming), (folded.chain[-1], False, outgoing),
            (folded.chain[-1], True, incoming), (folded.chain[0], True, outgoing))  # fmt: skip
    for kind, is_backward, sides in ends:
        sides[kind] -= {group for group in sides[kind] if (group in backward) == is_backward}
    changed = True
    while changed:
        changed = False
        for sender, receiver, is_backward in links:
            out = {group for group in outgoing[sender] if (group in backward) == is_backward}
            into = {group for group in incoming[receiver] if (group in backward) == is_backward}
            if out != into:
                outgoing[sender] -= out - into
                incoming[receiver] -= into - out
                changed = True
    return {
        kind.id: HandOver(
            tuple(received[kind.id][g] for g in sorted(incoming[kind.id] - backward)),
            tuple(sent[kind.id][g] for g in sorted(outgoing[kind.id] - backward)),
            tuple(received[kind.id][g] for g in sorted(incoming[kind.id] & backward)),
            tuple(sent[kind.id][g] for g in sorted(outgoing[kind.id] & backward)),
        )
        for kind in folded.kinds
    }
