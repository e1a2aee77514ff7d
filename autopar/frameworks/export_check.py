"""What an exported configuration comes to: read back as the framework would run it, predicted, held against the limit.

A configuration says less than a plan: a schedule the framework does not run, recompute by layer, a ZeRO level it does
not have, an overlap it does not make. What is left may take longer, or not fit into memory. So every configuration that
states degrees is predicted again without what the framework cannot do, and refused where it does not fit.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cluster import PRESETS, cluster_from_dict
from autopar.cost import Stack, load_policy
from autopar.degrees import Degrees
from autopar.errors import ExportError, InfeasibleError, JobError, TacticError
from autopar.frameworks import megatron
from autopar.frameworks.abilities import ABILITIES, Abilities, nearest, zero_levels
from autopar.frameworks.assumptions import stack_run
from autopar.frameworks.configuration import Configuration
from autopar.frameworks.configurations import parse_configuration
from autopar.frameworks.facts import STATE_WORDS, Facts
from autopar.frameworks.megatron import layout
from autopar.plan import Exported, Plan
from autopar.prediction import Prediction, Predictor
from autopar.recompute import ON_DEVICE, Recompute, parse_share, share_of
from autopar.units import format_bytes, format_seconds
from autopar.workload import Workload, job_stack

_WORTH_TELLING = 0.005
"""Share of a step by which a framework's may differ before it is said."""
_TRIED = 8
"""Plans that are predicted in search of one that fits."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a configuration comes to.

    Attributes:
        prediction: The prediction; None if the configuration is no plan by degrees of the model.
        sentence: The outcome beside what the plan comes to.
    """

    prediction: Prediction | None
    sentence: str


def outcome_of(
    plan: Plan, to: str, exported: Exported, facts: Facts, workload: Workload, cache: str | Path | None
) -> Outcome:
    """Return what a configuration that was written for a plan comes to.

    Args:
        plan: The plan.
        to: The framework, one that takes degrees.
        exported: The configuration.
        facts: The plan in degrees.
        workload: The model.
        cache: Where discovered rules are kept between runs; None to keep nothing.

    Raises:
        InfeasibleError: If the configuration does not fit into memory; the hint has a plan by degrees that does.
    """
    predictor = Predictor(workload, cache, verify=False)
    stack, missing = stack_run(facts, to)
    try:
        read = _read_back(plan, to, exported, facts)
        found = _predict(plan, predictor, read, stack, to)
    except (ExportError, JobError, TacticError) as error:
        return Outcome(None, f"Not predicted as written: {error.args[0]}.")
    if not found.fits:
        raise _refusal(plan, to, read, found, predictor, stack)
    reasons = (*_changes(facts, read, to), *missing)
    told = f"{_how(to, facts)}: {_figures(found)}{_of_plan(plan)}.{_difference(plan, to, found, reasons)}"
    return Outcome(found, told)


def _how(to: str, facts: Facts) -> str:
    """Return what was predicted: DeepSpeed's configuration states neither a pipeline nor recompute."""
    if to == "deepspeed" and (facts.pp > 1 or set(facts.flavours) != {Recompute.NONE}):
        return "Predicted with the pipeline and the recompute that the model's code has to build"
    return "Predicted as written"


def _read_back(plan: Plan, to: str, exported: Exported, facts: Facts) -> Configuration:
    """Return the plan that the framework runs."""
    if to in ("megatron", "torchtitan"):
        return parse_configuration(exported.text, to, gpus=plan.job.gpus, model=plan.model.name)
    if to == "nemo":  # the same arguments by other names
        return parse_configuration(megatron.export(facts).text, "megatron", gpus=plan.job.gpus, model=plan.model.name)
    degrees, first = nearest(facts, ABILITIES[to])
    return Configuration(degrees, plan.model.source, {}, plan.job.precision, (), (), first_layers=first)


def _predict(plan: Plan, predictor: Predictor, read: Configuration, stack: Stack, to: str) -> Prediction:
    job, modules = plan.job, dict(read.software).get("recompute_modules", ())
    return predictor.predict(
        read.degrees,
        cluster_from_dict(job.cluster),
        ABILITIES[to].recomputing(stack, modules),
        policy=load_policy(read.precision or job.precision),
        memory_limit=job.memory_limit,
        first_layers=read.first_layers,
    )


def _difference(plan: Plan, to: str, found: Prediction, reasons: Sequence[str]) -> str:
    """Return how much longer the framework takes than the plan, and for what; empty if it takes about as long."""
    if plan.simulated is None:
        return ""
    share = found.timeline.step_seconds / plan.simulated.step_seconds - 1.0
    if abs(share) < _WORTH_TELLING:
        return ""
    why = "; ".join(reasons) or "what is not expressed"
    return f" Under {ABILITIES[to].name} this plan takes {abs(share):.1%} {'more' if share > 0 else 'less'}: {why}."


def _changes(facts: Facts, read: Configuration, to: str) -> Iterator[str]:
    """Yield what a framework runs in place of what the plan says, a phrase each."""
    plan, runs, ability = facts.plan, read.degrees.in_mode("train"), ABILITIES[to]
    if facts.pp > 1:
        if runs.schedule != plan.schedule:
            yield f"{runs.schedule} in place of {plan.schedule}"
        if runs.interleave != facts.interleave:
            yield f"{runs.interleave} in place of {facts.interleave} stages per group of devices"
        if runs.layers and runs.interleave == facts.interleave and runs.layers != facts.layers:
            yield f"layers per stage {', '.join(map(str, runs.layers))} in place of {', '.join(map(str, facts.layers))}"
    if plan.shares and not runs.shares:
        yield "equal shares of the batch"
    if runs.zero != facts.zero:
        yield f"ZeRO {runs.zero} in place of ZeRO {facts.zero}"
    groups = facts.sharded if 1 < facts.sharded < facts.dp else 0
    if runs.zero and facts.zero and groups and runs.shard * runs.expert_axis != groups:
        yield f"ZeRO over all {facts.dp} data-parallel devices in place of groups of {groups}"
    if runs.sequence_parallel != facts.sequence_parallel:
        yield f"{'with' if runs.sequence_parallel else 'without'} sequence parallelism"
    kept = Recompute.OFFLOAD if any(facts.offloaded) else None
    wanted = {kept} if kept is not None else set(facts.flavours)
    if wanted != {Recompute(runs.recompute)}:
        where = f"the first {read.first_layers} layers of every stage" if read.first_layers else "all layers"
        yield f"recompute {runs.recompute} in {where}"
    elif wanted == {Recompute.SELECTIVE}:
        stack = job_stack(plan.job)
        if ability.recomputing(stack) != stack:
            yield f"selective recompute of what {ability.name} chooses"
    if bool(runs.offload) != bool(facts.hosted):
        yield "the optimizer's state on devices" if facts.hosted else "the optimizer's state in host memory"
    elif facts.hosted and share_of(runs.offload) is not facts.hosted_state:
        yield f"{STATE_WORDS[share_of(runs.offload)]} in place of {STATE_WORDS[facts.hosted_state]} in host memory"
    elif facts.hosted and parse_share(runs.offload) == 1 and facts.hosted_share < 1:
        yield "all of the optimizer's state in host memory"


def _figures(found: Prediction) -> str:
    limit = format_bytes(found.plan.job.memory_limit)
    peak = format_bytes(found.timeline.peak_bytes)
    return f"{format_seconds(found.timeline.step_seconds)} a step, peak {peak} of {limit} per device"


def _of_plan(plan: Plan) -> str:
    if plan.simulated is None:
        return ""
    peak = max(stage.peak for stage in plan.simulated.stages)
    return f"; the plan: {format_seconds(plan.simulated.step_seconds)}, peak {format_bytes(peak)}"


def _refusal(
    plan: Plan, to: str, read: Configuration, found: Prediction, predictor: Predictor, stack: Stack
) -> InfeasibleError:
    """Return the error of a configuration that does not fit, with the nearest one that does as its hint."""
    message = f"what {to} would run of this plan does not fit: {found.plan.summary}: {_figures(found)}{_of_plan(plan)}"
    for degrees in _nearest(read.degrees, ABILITIES[to])[:_TRIED]:
        try:
            other = _predict(plan, predictor, replace(read, degrees=degrees, first_layers=0), stack, to)
        except (JobError, TacticError):
            continue
        if other.fits:
            command = f"autopar predict {plan.model.source} {as_options(degrees)}{_settings(plan, read.precision)}"
            return InfeasibleError(message, hint=f"{command} -o DIR, and export that: {_figures(other)}")
    return InfeasibleError(message, hint="plan for more GPUs, or with another --memory-limit")


def _nearest(degrees: Degrees, ability: Abilities) -> list[Degrees]:
    """Return plans that take less memory, the nearest first: smaller microbatches, more recompute, more ZeRO."""
    flavours = [str(own) for own in ON_DEVICE if own in ability.recompute]
    now = flavours.index(degrees.recompute) if degrees.recompute in flavours else len(flavours) - 1
    sizes = [size for size in range(degrees.microbatch, 0, -1) if degrees.microbatch % size == 0]
    levels = sorted(own for own in zero_levels(ability, pp=degrees.pp, tp=degrees.tp) if own >= degrees.zero)
    if degrees.pp > 1:
        levels = [own for own in levels if own <= 1] or [degrees.zero]
    found = [
        replace(degrees, microbatch=size, recompute=flavour, zero=zero, shard=degrees.shard if zero else 0)
        for zero in levels or [degrees.zero]
        for flavour in flavours[now:]
        for size in (sizes[0], sizes[-1])
    ]
    return [own for own in dict.fromkeys(found) if own != degrees]


def as_options(degrees: Degrees) -> str:
    """Return degrees as options of `autopar predict`.

    >>> as_options(Degrees(dp=2, pp=4, zero=1, recompute="full", global_batch=8, layers=(1, 2, 2, 1)))
    '--dp 2 --pp 4 --zero 1 --recompute full --microbatch 1 --layers 1,2,2,1 --global-batch 8'
    """
    usual = Degrees()
    words = []
    for name in (
        "dp",
        "tp",
        "pp",
        "cp",
        "cp_kind",
        "ep",
        "etp",
        "zero",
        "shard",
        "recompute",
        "offload",
        "schedule",
        "interleave",
    ):
        value = getattr(degrees, name)
        if value != getattr(usual, name) and not (name == "interleave" and degrees.predictions):
            words.append(f"--{name.replace('_', '-')} {value}")
    words += ["--sequence-parallel"] if degrees.sequence_parallel else []
    words += ["--pp-inside"] if degrees.pp_inside else []
    words += [f"--shares {','.join(f'{count}x{each}' for count, each in degrees.shares)}"] if degrees.shares else []
    words.append(f"--microbatch {degrees.microbatch}")
    if degrees.predictions:
        words.append(f"--layout {shlex.quote(layout(degrees.layers, degrees.predictions))}")
    elif degrees.layers:
        words.append(f"--layers {','.join(map(str, degrees.layers))}")
    return " ".join([*words, f"--global-batch {degrees.global_batch}"])


def _settings(plan: Plan, precision: str | None) -> str:
    """Return the options beside the degrees that a prediction like the plan takes."""
    cluster = str(plan.job.cluster.get("name", ""))
    where = f" --cluster {cluster}" if cluster in PRESETS and cluster != "h100" else ""
    stored = "" if precision in (None, "mixed") else f" --precision {precision}"
    return "".join(f" --set {name}={value}" for name, value in plan.model.dims) + where + stored
