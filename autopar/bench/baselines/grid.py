"""Grid search: every plan by degrees there is.

Plans are priced by the formula and the fastest are simulated. Two kinds of plans are left out without a price, neither
of which could win: those whose blocks alone take longer than the best plan so far, pipelines without a bubble assumed
(`Estimator.floor`), and those with more samples per microbatch than plans none of which fits. Plans on fewer devices
come last, and are not listed where none can be as fast as the best so far (`Race.least`).
"""

from collections.abc import Iterator, Mapping
from itertools import chain

from autopar.bench.baselines.degree_space import DECISIONS, DegreeSpace, Partial, whole
from autopar.bench.baselines.race import Race
from autopar.degrees import Degrees
from autopar.schedule import SCHEDULES

Plans = Mapping[int, list[Degrees]]
"""Plans by data-parallel degree: alike but for ZeRO, recompute, stages and schedule."""


def grid(race: Race) -> None:
    """Price every plan of the space that could win, those that stay within a node first."""
    for sizes in _on_all_counts(race):
        too_large: set[int] = set()  # ZeRO stages that no longer fit
        for plans in sizes:
            fits: dict[int, bool] = {}
            for alike in plans.values():
                if race.stopped:
                    return
                able = [plan for plan in alike if plan.zero not in too_large]
                race.skipped += len(alike) - len(able)
                if not able:
                    continue
                if race.floor(able[0]) >= race.best:
                    race.skipped += len(able)
                    may_fit = not _is_too_large(race, able)
                    fits |= {plan.zero: fits.get(plan.zero, False) or may_fit for plan in able}
                    continue
                for plan in able:
                    if race.stopped:
                        return
                    fits[plan.zero] = race.price(plan).fits or fits.get(plan.zero, False)
            too_large |= {zero for zero, any_fits in fits.items() if not any_fits}


def _is_too_large(race: Race, plans: list[Degrees]) -> bool:
    """Whether no plan's activations fit; those of pipelines with joint backwards hold the least."""
    shapes = {(plan.pp, plan.interleave): plan for plan in plans if not SCHEDULES[plan.schedule].splits}
    return all(race.is_too_large(plan) for plan in shapes.values())


def _on_all_counts(race: Race) -> Iterator[list[Plans]]:
    """Yield the families of all devices, then of fewer where these may win."""
    for gpus in filter(race.may_win, race.space.gpu_counts):
        yield from _families(race.space, {"gpus": gpus})


def _families(space: DegreeSpace, devices: Partial) -> Iterator[list[Plans]]:
    """Yield all plans on some devices by what splits their layers, each by the samples of a microbatch, ascending.

    They are listed as they are asked for: a thousand devices have half a million.
    """
    groups: dict[tuple[int, ...], list[Partial]] = {}
    for beginning in space.leaves(devices, DECISIONS.index("ep") + 1):
        cp, tp, ep = (whole(beginning, name) for name in ("cp", "tp", "ep"))
        groups.setdefault((cp, tp > space.node, tp, ep), []).append(beginning)
    for _, beginnings in sorted(groups.items()):
        found: dict[bool, dict[int, dict[int, list[Degrees]]]] = {}
        for leaf in chain.from_iterable(map(space.leaves, beginnings)):
            plan = space.degrees(leaf)
            sizes = found.setdefault(plan.sequence_parallel, {})
            sizes.setdefault(plan.microbatch, {}).setdefault(plan.dp, []).append(plan)
        for _, sizes in sorted(found.items()):
            yield [sizes[size] for size in sorted(sizes)]
