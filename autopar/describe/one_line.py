"""A plan in one line; the roles of its axes come from `autopar.describe.axis_roles`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autopar.describe.axis_roles import AxisRole, expert_degree, roles_of_axes
from autopar.folding.fold import Folded
from autopar.plan import AxisUse, Plan
from autopar.recompute import Hosted, Recompute, parse_recompute


def summarise(plan: Plan, folded: Folded) -> Plan:
    """Return the plan of a folded graph with its one-line summary."""
    if not plan.variants:
        return summarise_roles(plan, roles_of_axes(plan.mesh, plan.blocks, folded))
    alone = (plan.of_variant(number) for number in range(len(plan.all_variants)))
    return summarise_roles(plan, *(roles_of_axes(own.mesh, own.blocks, folded) for own in alone))


def summarise_roles(plan: Plan, *roles: Sequence[AxisRole]) -> Plan:
    """Return a plan with its one-line summary and axis uses, given the axis roles of each variant."""
    uses = tuple(tuple(AxisUse(found.role, found.zero) for found in own) for own in roles)
    plan = replace(plan, uses=uses)
    if not plan.variants:
        return _summarised(plan, [*_axes(roles[0]), _groups(plan)])
    axes = ((plan.numbers_of(number), _axes(own)) for number, own in enumerate(roles))
    stages = "; ".join(f"{name_stages(numbers)}: {' × '.join(found)}" for numbers, found in axes)
    return _summarised(plan, [f"{_groups(plan)} of {stages}"])


def _groups(plan: Plan) -> str:
    groups = len({stage.devices for stage in plan.stages})
    words = [f"{len(plan.stages) // groups} stages each"] if groups < len(plan.stages) else []
    words += ["inside dp"] if "numbered" in plan.job.cluster else []
    return f"pp={groups}" + (f" ({', '.join(words)})" if words else "")


def _summarised(plan: Plan, words: Sequence[str]) -> Plan:
    microbatches = f"{plan.num_microbatches} microbatch{'es' if plan.num_microbatches > 1 else ''} of {plan.microbatch}"
    if plan.shares:
        counts = " + ".join(str(share.num_microbatches) for share in plan.shares)
        microbatches = f"shares of {counts} microbatches of {plan.microbatch}"
    kept = f"{_recompute(plan)}{_offload(plan)}"
    return replace(plan, summary=f"{' × '.join(words)}, {_schedule(plan)}{microbatches}, {kept}")


def name_stages(numbers: Sequence[int]) -> str:
    """Return the stage numbers as text, consecutive ones as a range.

    >>> name_stages([1]), name_stages([0, 2, 3, 4])
    ('stage 1', 'stages 0 2-4')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"stage{'s' if len(numbers) > 1 else ''} {' '.join(texts)}"


def _axes(roles: Sequence[AxisRole]) -> list[str]:
    """Return the degrees of a plan of one variant as text, per role."""
    degrees = {"dp": 1, "tp": 1, "ep": 1, "cp": 1, "spatial": 1, "idle": 1}
    notes: dict[str, list[str]] = {name: [] for name in degrees}
    levels: dict[str, set[int]] = {name: set() for name in degrees}
    for found in roles:
        role = found.role
        if found.axis.size == 1:
            continue
        degrees[role] *= found.axis.size
        if role in ("dp", "cp", "spatial"):
            levels[role].add(found.zero)
        if found.context and found.context not in notes[role]:
            notes[role].append(found.context)
        if role == "tp":
            if found.in_part:
                notes[role] = ["in part"]
            elif found.sequence_parallel:
                notes[role] = ["sequence parallel"]
    for role, zeros in levels.items():
        if any(zeros):
            # Two axes of one role may differ: ZeRO over the links inside a node only, for example.
            notes[role].append("zero-" + "/".join(str(level) for level in sorted(zeros)))
    for role, own in notes.items():
        experts = expert_degree(found for found in roles if found.role == role)
        if experts > 1 and role != "ep":
            own.append(f"ep={experts}")
    return [
        f"{name}={degree}" + (f" ({', '.join(notes[name])})" if notes[name] else "")
        for name, degree in degrees.items()
        if degree > 1 or name == "dp"
    ]


def _schedule(plan: Plan) -> str:
    return f"{plan.schedule.upper() if plan.schedule == '1f1b' else plan.schedule}, " if len(plan.stages) > 1 else ""


def _recompute(plan: Plan) -> str:
    """Return the recompute flavours of the layers: blocks that occur more than once, or all blocks if none does."""
    layers = {index for block in plan.blocks if len(block.instances) > 1 for index in block.instances}
    counts: Counter[str] = Counter()
    for stage in plan.stages:
        first, last = stage.blocks
        flavours = parse_recompute(stage.recompute, last - first)
        counts.update(str(flavour) for index, flavour in enumerate(flavours, first) if not layers or index in layers)
    if len(counts) == 1:
        name = next(iter(counts))
        return "no recompute" if name == "none" else _flavour_name(name)
    parts = [f"{_flavour_name(name)} in {count}" for name, count in sorted(counts.items()) if name != "none"]
    return f"{' and '.join(parts)} of {counts.total()} {'layers' if layers else 'blocks'}"


def _flavour_name(flavour: str) -> str:
    return "activations offloaded" if flavour == Recompute.OFFLOAD else f"{flavour} recompute"


def _offload(plan: Plan) -> str:
    """Return of how many stages or blocks what state is in host memory; empty if of none."""
    count, each = sum(bool(stage.offload) for stage in plan.stages), [stage.hosted for stage in plan.stages]
    if not count:
        return ""
    what = _STATES[next(stage.hosted_state for stage in plan.stages if stage.offload)]
    if any(len(set(own)) > 1 for own in each):
        away = [is_away for own in each for is_away in own]
        return f", {what} of {sum(away)} of {len(away)} blocks offloaded"
    return f", {what} offloaded" + (f" in {count} of {len(plan.stages)} stages" if count < len(plan.stages) else "")


_STATES = {
    Hosted.OPTIMIZER: "optimizer",
    Hosted.UPDATE: "optimizer and its update",
    Hosted.GRADIENTS: "gradients, optimizer and its update",
    Hosted.PARAMETERS: "parameters, gradients, optimizer and its update",
}
