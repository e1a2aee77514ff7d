"""What an exported configuration comes to: read back as the framework would run it, predicted, held against the limit.

A configuration says less than a plan: a schedule the framework does not run, recompute by layer, a ZeRO level it does
not have. What is left may take longer, or not fit into memory. So every configuration that states degrees is predicted
again, and refused where it does not fit.
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cluster import PRESETS, cluster_from_dict
from autopar.cost import load_policy
from autopar.degrees import Degrees
from autopar.errors import ExportError, InfeasibleError, JobError, TacticError
from autopar.frameworks.configuration import Configuration
from autopar.frameworks.configurations import parse_configuration
from autopar.frameworks.facts import Facts
from autopar.frameworks.megatron import layout
from autopar.plan import Exported, Plan
from autopar.prediction import Prediction, Predictor
from autopar.recompute import Recompute
from autopar.units import format_bytes, format_seconds
from autopar.workload import Workload, job_stack

_HIGHEST_ZERO = {"megatron": 3, "torchtitan": 3, "deepspeed": 3, "nemo": 1}
"""ZeRO level up to which a framework goes."""
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
    try:
        read = _read_back(plan, to, exported, facts)
        found = _predict(plan, predictor, read)
    except (ExportError, JobError, TacticError) as error:
        return Outcome(None, f"Not predicted as written: {error.args[0]}.")
    if not found.fits:
        raise _refusal(plan, to, read, found, predictor)
    return Outcome(found, f"{_how(to, facts)}: {_figures(found)}{_of_plan(plan)}.")


def _how(to: str, facts: Facts) -> str:
    """Return what was predicted: DeepSpeed's configuration states neither a pipeline nor recompute."""
    if to == "deepspeed" and (facts.pp > 1 or set(facts.flavours) != {Recompute.NONE}):
        return "Predicted with the pipeline and the recompute that the model's code has to build"
    return "Predicted as written"


def _read_back(plan: Plan, to: str, exported: Exported, facts: Facts) -> Configuration:
    """Return the plan that the framework runs."""
    if to in ("megatron", "torchtitan"):
        return parse_configuration(exported.text, to, gpus=plan.job.gpus, model=plan.model.name)
    # DeepSpeed's pipeline and recompute are built in code, and NeMo's values are not read: both by degrees.
    flavours = facts.flavours
    full = max(sum(flavour is Recompute.FULL for flavour in stage) for stage in facts.recompute)
    mixed = full if len(flavours) > 1 else 0
    offloads = any(facts.offloaded) and to == "nemo" and facts.pp == 1
    highest = 1 if to == "nemo" or facts.pp > 1 else 3
    interleaves = to == "nemo"
    degrees = Degrees(
        dp=facts.dp,
        tp=facts.tp,
        pp=facts.pp,
        cp=facts.cp,
        cp_kind=facts.cp_kind,
        ep=facts.ep,
        etp=facts.etp,
        zero=min(highest, max(facts.zero, int(bool(facts.hosted)))),
        sequence_parallel=facts.sequence_parallel and to == "nemo",
        recompute="offload" if offloads else "full" if full else str(flavours.most_common(1)[0][0]),
        offload="optimizer" if facts.hosted else "",
        interleave=facts.interleave if interleaves else 1,
        microbatch=facts.microbatch,
        global_batch=plan.job.global_batch,
        layers=_layers(facts, interleaves),
        pp_inside=facts.pp_inside and to == "nemo",
    )
    return Configuration(degrees, plan.model.source, {}, plan.job.precision, (), (), first_layers=mixed)


def _layers(facts: Facts, interleaves: bool) -> tuple[int, ...]:
    """Return the layers of every stage, of one stage per group of devices where the framework has no more."""
    if facts.pp == 1:
        return ()
    each = 1 if interleaves else facts.interleave
    return tuple(sum(facts.layers[start : start + each]) for start in range(0, len(facts.layers), each))


def _predict(plan: Plan, predictor: Predictor, read: Configuration) -> Prediction:
    job = plan.job
    return predictor.predict(
        read.degrees,
        cluster_from_dict(job.cluster),
        job_stack(job),
        policy=load_policy(read.precision or job.precision),
        memory_limit=job.memory_limit,
        first_layers=read.first_layers,
    )


def _figures(found: Prediction) -> str:
    limit = format_bytes(found.plan.job.memory_limit)
    peak = format_bytes(found.timeline.peak_bytes)
    return f"{format_seconds(found.timeline.step_seconds)} a step, peak {peak} of {limit} per device"


def _of_plan(plan: Plan) -> str:
    if plan.simulated is None:
        return ""
    peak = max(stage.peak for stage in plan.simulated.stages)
    return f"; the plan: {format_seconds(plan.simulated.step_seconds)}, peak {format_bytes(peak)}"


def _refusal(plan: Plan, to: str, read: Configuration, found: Prediction, predictor: Predictor) -> InfeasibleError:
    """Return the error of a configuration that does not fit, with the nearest one that does as its hint."""
    message = f"what {to} would run of this plan does not fit: {found.plan.summary}: {_figures(found)}{_of_plan(plan)}"
    for degrees in _nearest(read.degrees, _HIGHEST_ZERO[to])[:_TRIED]:
        try:
            other = _predict(plan, predictor, replace(read, degrees=degrees, first_layers=0))
        except (JobError, TacticError):
            continue
        if other.fits:
            command = f"autopar predict {plan.model.source} {as_options(degrees)}{_settings(plan, read.precision)}"
            return InfeasibleError(message, hint=f"{command} -o DIR, and export that: {_figures(other)}")
    return InfeasibleError(message, hint="plan for more GPUs, or with another --memory-limit")


def _nearest(degrees: Degrees, highest_zero: int) -> list[Degrees]:
    """Return plans that take less memory, the nearest first: smaller microbatches, more recompute, more ZeRO."""
    flavours = ("none", "selective", "full")
    now = flavours.index(degrees.recompute) if degrees.recompute in flavours else len(flavours) - 1
    sizes = [size for size in range(degrees.microbatch, 0, -1) if degrees.microbatch % size == 0]
    highest = max(degrees.zero, 1 if degrees.pp > 1 else highest_zero)
    found = [
        replace(degrees, microbatch=size, recompute=flavour, zero=zero, shard=degrees.shard if zero else 0)
        for zero in range(degrees.zero, highest + 1)
        for flavour in flavours[now:]
        for size in (sizes[0], sizes[-1])
    ]
    return list(dict.fromkeys(found))[1:]


def as_options(degrees: Degrees) -> str:
    """Return degrees as options of `autopar predict`.

    >>> as_options(Degrees(dp=2, pp=4, zero=1, recompute="full", global_batch=8, layers=(1, 2, 2, 1)))
    '--dp 2 --pp 4 --zero 1 --recompute full --microbatch 1 --layers 1,2,2,1 --global-batch 8'
    """
    usual = Degrees()
    words = []
    for name in (
        "dp", "tp", "pp", "cp", "cp_kind", "ep", "zero", "shard", "recompute", "offload", "schedule", "interleave"
    ):  # fmt: skip
        value = getattr(degrees, name)
        if value != getattr(usual, name) and not (name == "interleave" and degrees.predictions):
            words.append(f"--{name.replace('_', '-')} {value}")
    words += ["--sequence-parallel"] if degrees.sequence_parallel else []
    words += ["--pp-inside"] if degrees.pp_inside else []
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
