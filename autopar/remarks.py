"""Remarks on a simulated plan or program: what its reader should know before believing the figures, a sentence each.

Thresholds are constants with their source. `remarks` is the list of checks; `Simulated.remarks` carries the findings to
the report, the page and the JSON.
"""

from collections.abc import Sequence
from math import prod

from autopar.cluster import PRESETS, Cluster
from autopar.cost import CostModel, Stack, bundled_stacks, default_limit, load_policy
from autopar.cost.collectives import widest_tier
from autopar.cost.nearest import is_for
from autopar.cost.traffic import is_guessed
from autopar.describe.axis_roles import AxisRole, roles_of_axes
from autopar.describe.context_kinds import limited_rings
from autopar.describe.device_groups import track_word
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import global_shapes
from autopar.ir.graph import BRANCHES, Phase
from autopar.plan import Plan, Remark, Simulated
from autopar.program.records import Program
from autopar.shares import device_ranges
from autopar.simulate import Timeline
from autopar.units import format_bytes

NEAR_LIMIT = 0.95
"""Share of the memory limit from which on a peak is remarked on, by hand: half of the published peaks are predicted
within 2 to 35 %, depending on the source (docs/benchmarks/validation_2026-11-28.md)."""

LARGEST_MEMORY = max(cluster.device.memory for cluster in PRESETS.values())
"""Bytes of the largest device known: those of B300, GB300 and MI355X, by their data sheets."""

PUBLISHED_MFU = (
    ("A100", 0.642),  # MPT-7B on 8, bfloat16: mosaicml/llm-foundry, scripts/train/benchmarking
    ("H100", 0.625),  # Nemotron-4 15B on 16, bfloat16: NVIDIA/dgxc-benchmarking v25.02.02
    ("H200", 0.625),  # the H100's, whose matrix units it has
    ("V100", 0.549),  # GPT on one: alpa-projects/alpa, osdi22_artifact/results_intra_ablation_ref.tsv
    ("GB200", 0.476),  # Grok-1 on 128 and 512, bfloat16: NVIDIA/dgxc-benchmarking v25.05.05
    ("TPU-v5e", 0.635),  # 32B on 2,048: AI-Hypercomputer/maxtext, README
    ("TPU-v5p", 0.715),  # 32B on 64: AI-Hypercomputer/maxtext, README
    ("TPU-v6e", 0.504),  # Llama 3.1 70B on 256, bfloat16: AI-Hypercomputer/tpu-recipes, trillium
    ("TPU-v7x", 0.523),  # Llama 3.1 70B on 64, bfloat16: AI-Hypercomputer/tpu-recipes, ironwood
)
"""Greatest MFU of training steps published for a device, whose name holds the text, in 16-bit numbers."""

GREATEST_MFU = max(share for _, share in PUBLISHED_MFU)
"""Greatest MFU published for any device."""

ALL_MEASURED = 0.995
"""Share of the seconds from which on nothing is said of the others."""

GUESSED_SHARE = 0.25
"""Share of the computing time from which on ops of guessed cost are remarked on, by hand."""


def remarks(
    plan: Plan, found: Simulated, folded: Folded, costs: CostModel, measured: float | None = None
) -> tuple[Remark, ...]:
    """Return the remarks on a simulated plan.

    Args:
        plan: The plan.
        found: What the simulator found for it.
        folded: The graph of one of its microbatches.
        costs: The costs it was simulated with.
        measured: Share of the seconds of its ops and collectives that is of a profile; None without one.
    """
    limits = [stage.limit or plan.job.memory_limit for stage in found.stages]
    checks = (
        _memory([stage.peak for stage in found.stages], limits, track_word(plan)),
        _mfu(plan, found, costs),
        _guessed(folded, costs),
        _branches(folded),
        _idle(plan, folded, costs.cluster),
        _rings(plan, folded),
        _measured(measured, costs) if measured is not None else _calibration(plan.job.gpus, costs.cluster, costs.stack),
    )
    return tuple(Remark(kind, text) for kind, text in checks if text)


def program_remarks(
    program: Program, timeline: Timeline, costs: CostModel, doubts: Sequence[str]
) -> tuple[Remark, ...]:
    """Return the remarks on the simulated step of a program, which may use what devices have less a reserve.

    Args:
        program: The program.
        timeline: Its step.
        costs: The costs it was simulated with.
        doubts: Ops that run by no strategy of their rule, in a sentence each.
    """
    ranges = device_ranges((stage.devices for stage in program.stages), program.shares)
    limits = [default_limit(costs.cluster.on(range(*devices))) for devices in ranges]
    checks = (
        _memory([stage.memory.bytes for stage in timeline.stages], limits, timeline.unit),
        _doubt(doubts),
        _measured(timeline.measured, costs)
        if timeline.measured is not None
        else _calibration(program.num_devices, costs.cluster, costs.stack),
    )
    return tuple(Remark(kind, text) for kind, text in checks if text)


def is_tight(plan: Plan) -> bool:
    """Whether a stage of a simulated plan leaves little of the memory it may use."""
    stages = plan.simulated.stages if plan.simulated is not None else ()
    return any(stage.peak >= NEAR_LIMIT * limit for stage, limit in zip(stages, plan.stage_limits, strict=True))


def _rings(plan: Plan, folded: Folded) -> tuple[str, str]:
    """Return a remark on rings that no framework runs."""
    layers = limited_rings(plan.blocks, folded)
    return "rings", (
        f"keys and values go round in {layers} layers with a window, chunks, sinks or a mask; "
        "Transformer Engine has rings for full attention only"
        if layers
        else ""
    )


def _memory(peaks: Sequence[float], limits: Sequence[float], word: str) -> tuple[str, str]:
    """Return a remark on the devices with the least memory to spare.

    Args:
        peaks: Bytes by stage, or by device group where these have several stages.
        limits: What they may use.
        word: What these are called.
    """
    number = max(range(len(peaks)), key=lambda stage: peaks[stage] / limits[stage])
    most, limit = peaks[number], limits[number]
    peak = format_bytes(most)
    if most > LARGEST_MEMORY:
        return "memory", (
            f"{peak} per device is more than any device has ({format_bytes(LARGEST_MEMORY)}): check the sizes of the "
            "model and the batch"
        )
    where = f"{word} {number} takes" if len(peaks) > 1 else "a device takes"
    if most > limit:
        return "fit", f"does not fit: {where} {peak}, over the limit of {format_bytes(limit)}"
    if most >= NEAR_LIMIT * limit:
        share = f"{100 * most / limit:.1f} %"
        return (
            "memory",
            f"little memory to spare: {where} {peak}, {share} of the limit; actual use may exceed the estimate",
        )
    return "memory", ""


def _doubt(doubts: Sequence[str]) -> tuple[str, str]:
    if not doubts:
        return "rules", ""
    more = f" ({len(doubts)} such ops)" if len(doubts) > 1 else ""
    return "rules", f"{doubts[0]}{more}: `autopar run` says whether the numbers are right"


def _mfu(plan: Plan, found: Simulated, costs: CostModel) -> tuple[str, str]:
    policy = load_policy(plan.job.precision)
    if plan.job.mode != "train" or policy.classes != ("half",):
        return "mfu", ""  # nothing comparable is published
    if found.mfu == 0:
        return "mfu", "an MFU of 0: no op of the model is a matrix product, a convolution or attention"
    name = costs.cluster.device.name
    known = () if costs.cluster.groups else (share for text, share in PUBLISHED_MFU if text.lower() in name.lower())
    most = max(known, default=GREATEST_MFU)
    if found.mfu <= most:
        return "mfu", ""
    whose = "any device" if most == GREATEST_MFU else name
    return "mfu", f"an MFU above the {100 * most:.1f} % that is published for {whose}: expect a longer step"


def _guessed(folded: Folded, costs: CostModel) -> tuple[str, str]:
    """Return a remark if ops whose cost is a guess take much of the computing time of an unpartitioned microbatch."""
    ops = [(op, kind.count) for kind in folded.kinds for op in kind.ops if op.phase is not Phase.UPDATE]
    if not any(is_guessed(op.kind) for op, _ in ops):
        return "cost", ""
    element_bytes = costs.policy.graph_read_bytes(folded.graph)
    seconds: dict[str, float] = {}
    for op, count in ops:
        inputs, outputs = global_shapes(folded.graph, op)
        own = count * float(costs.op_seconds(op, inputs, outputs, element_bytes)[0])
        seconds[op.kind] = seconds.get(op.kind, 0.0) + own
    guessed = {kind: own for kind, own in seconds.items() if is_guessed(kind)}
    share = sum(guessed.values()) / sum(seconds.values())
    if share < GUESSED_SHARE:
        return "cost", ""
    names = ", ".join(sorted(guessed, key=lambda kind: -guessed[kind]))
    return "cost", f"{100 * share:.0f} % of the computing time is of {names}, priced by the bytes they move alone"


def _branches(folded: Folded) -> tuple[str, str]:
    """Return a remark if a model runs each of its experts on all tokens."""
    count = folded.graph.metadata.get(BRANCHES, "")
    if not count:
        return "experts", ""
    return "experts", (
        f"experts as separate branches: the file runs each of {count} experts on all tokens, whoever chose it, and so "
        "it is priced; their matrices are not dealt out as experts"
    )


def _idle(plan: Plan, folded: Folded, cluster: Cluster) -> tuple[str, str]:
    """Return a remark if devices do what others do as well."""
    idle, across = 0.0, False
    for number in range(len(plan.all_variants)):
        alone = plan.of_variant(number) if plan.variants else plan
        axes = idle_axes(roles_of_axes(alone.mesh, alone.blocks, folded))
        devices = sum(end - start for start, end in {stage.devices for stage in alone.stages})
        idle += devices * (1 - 1 / prod(found.axis.size for found in axes))
        across = across or any(widest_tier(found.axis, cluster) > 0 for found in axes)
    if not idle:
        return "idle", ""
    return "idle", f"{idle:.0f} of {plan.job.gpus} GPUs do no useful work: {why_idle(cluster if across else None)}"


def why_idle(nodes: Cluster | None) -> str:
    """Return why devices are not used; `nodes` is the cluster if they lie in other nodes than those that are."""
    why = "no plan was found in which they make the step shorter"
    if nodes is None:
        return why
    return f"{why}; between nodes a device reaches {format_bytes(nodes.inter.bandwidth)}/s ({nodes.inter.tier})"


def left_free(free: int, gpus: int, cluster: Cluster, kinds: str = "") -> Remark:
    """Return what is told of a plan that leaves some of a number of devices free.

    Args:
        free: How many it leaves free.
        gpus: How many there are.
        cluster: The cluster of all.
        kinds: The kinds of nodes that the plan uses, where nodes differ.
    """
    used = f" (the plan is on {kinds})" if kinds else ""
    return Remark("idle", f"{free} of {gpus} GPUs are left free{used}: {why_idle(cluster)}")


def idle_axes(roles: Sequence[AxisRole]) -> list[AxisRole]:
    """Return the mesh axes all devices of which do the same work."""
    return [found for found in roles if found.role == "idle" and found.axis.size > 1]


def _calibration(gpus: int, cluster: Cluster, stack: Stack) -> tuple[str, str]:
    device = cluster.device
    kind = "calibration"
    if stack.fit is None:
        known = [own.name for own in bundled_stacks().values() if own.fit is not None and is_for(own, cluster)]
        if known:
            return kind, f"step time not calibrated; for {device.name} there is --stack {' or '.join(known)}"
        return kind, f"step time not calibrated on {device.name}: it follows from the figures of the cluster alone"
    if stack.clusters and not is_for(stack, cluster):
        names = dict.fromkeys(PRESETS[name].device.name for name in stack.clusters if name in PRESETS)
        whose = ", ".join(names) or "other devices"
        return kind, f"not calibrated on {device.name}: stack {stack.name} is, on {whose}; errors are taken to be wider"
    for valid in stack.fit.valid:
        if valid.name == "n_gpus" and not valid.low <= gpus <= valid.high:
            return kind, f"stack {stack.name} is calibrated on {valid.low:g} to {valid.high:g} GPUs, not on {gpus}"
    return kind, ""


def _measured(share: float, costs: CostModel) -> tuple[str, str]:
    """Return the remark that says how much of a step is of a profile."""
    prices = costs.prices
    assert prices is not None, "only a profile has measured events"
    factors = ", ".join(f"{name} {factor:.2g}" for name, factor in sorted(prices.factors.items()))
    text = f"{100 * share:.0f} % of the seconds of ops and collectives are measured (profile {prices.profile.name})"
    if share > ALL_MEASURED:
        return "profile", text
    return (
        "profile",
        f"{text}; the rest follows formulas, scaled by class of op: {factors or 'nothing is known of any'}",
    )
