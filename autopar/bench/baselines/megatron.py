"""What somebody does who follows the documentation of Megatron-LM, written down.

1. Tensor parallelism inside a node, as little as the model needs; pipeline parallelism only once a whole node is tensor
   parallel and the model still does not fit; data parallelism for all other devices (takeaways 1 and 2 of Narayanan et
   al., SC'21, sections 3.2 and 3.3). "Fits" is tried as they would, with one sample per microbatch.
2. Sequence parallelism wherever there is tensor parallelism, and selective recompute; full recompute is for models that
   fit by no degrees otherwise (Korthikanti et al. 2022, section 5).
3. The distributed optimizer, which is ZeRO-1, whenever there is data parallelism (Megatron Core's README advises it).
4. For mixtures of experts, expert parallelism rather than tensor parallelism, up to the experts there are, inside a
   node (Megatron Core's guide to mixtures of experts: ep x tp within NVLink).
5. Then samples per microbatch, stages per device and recompute are tried out at these degrees, samples in powers of two
   and stages in divisors of the layers, as takeaway 3 of SC'21 says that the best depends on the model; the schedule is
   1F1B, interleaved where a device has several stages.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd

from autopar.bench.baselines.degree_space import DegreeSpace
from autopar.bench.baselines.race import Race
from autopar.degrees import Degrees
from autopar.recompute import Recompute
from autopar.tactics.stages import layers

_RECOMPUTE = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
MOST_SAMPLES = 16
"""Samples per microbatch that are tried, at most."""


def megatron(race: Race) -> None:
    """Price what the rules lead to on all devices, then on fewer where these may win."""
    for gpus in filter(race.is_tried, race.space.gpu_counts):
        _follow(race, gpus)


def _follow(race: Race, gpus: int) -> None:
    """Price what the rules lead to: degrees first, with one sample per microbatch, then what is tried out."""
    for recompute in (Recompute.SELECTIVE, Recompute.FULL) if race.space.trains else (Recompute.NONE,):
        for degrees in _degrees(race.space, gpus):
            first = _fixed(race.space, gpus, degrees, recompute)
            if first is None or race.stopped or not race.price(first).fits:
                continue
            for plan in _tried_out(race.space, gpus, degrees):
                if race.stopped:
                    return
                race.price(plan)
            return


def _degrees(space: DegreeSpace, gpus: int) -> Iterator[tuple[int, int]]:
    """Yield (tp, pp) by model-parallel size: tensor parallelism up to the node, then pipelines."""
    sizes = [size for size in range(1, space.node + 1) if gpus % size == 0]
    tensor = [tp for tp in sizes if tp == 1 or space.model.tensor]
    yield from ((tp, 1) for tp in tensor)
    whole = tensor[-1]
    yield from (
        (whole, pp)
        for pp in space.options({"gpus": gpus})
        if isinstance(pp, int) and pp > 1 and gpus % (pp * whole) == 0
    )


def _fixed(
    space: DegreeSpace,
    gpus: int,
    degrees: tuple[int, int],
    recompute: str,
    microbatch: int | None = None,
    flow: int = 1,
) -> Degrees | None:
    """Return the plan of the rules; None if the batch does not divide so."""
    tp, pp = degrees
    partial = {"gpus": gpus, "pp": pp, "tp": tp, "cp": 1}
    dp = space.data(partial)
    inside = max((ep for ep in range(1, space.node // tp + 1) if gcd(dp, space.model.experts) % ep == 0), default=1)
    partial["ep"] = inside
    sizes = space.options(partial)
    if not sizes or (microbatch is not None and microbatch not in sizes):
        return None
    partial["microbatch"] = microbatch or min(size for size in sizes if isinstance(size, int))
    schedule = "1f1b" if space.trains else "forward-only"
    if (schedule, flow) not in space.options(partial):
        return None
    shared = 1 if dp > 1 and space.trains else 0
    sequence = tp > 1 and space.model.sequence
    return space.degrees(
        {
            **partial,
            "flow": (schedule, flow),
            "zero": shared,
            "sequence_parallel": sequence,
            "recompute": str(recompute),
            "offload": "",
        }
    )


def _tried_out(space: DegreeSpace, gpus: int, degrees: tuple[int, int]) -> Iterator[Degrees]:
    """Yield the plans of some degrees with other microbatches, interleaving and recompute."""
    whole = max(1, len(layers(space.folded)) // degrees[1])
    chunks = [count for count in range(1, whole + 1) if whole % count == 0]
    samples = [2**power for power in range(MOST_SAMPLES.bit_length())]
    for size, flow, recompute in product(samples, chunks, _flavours(space)):
        plan = _fixed(space, gpus, degrees, recompute, size, flow)
        if plan is not None:
            yield plan


def _flavours(space: DegreeSpace) -> tuple[Recompute, ...]:
    return _RECOMPUTE if space.trains else (Recompute.NONE,)
