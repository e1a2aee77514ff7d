"""The plans whose events are profiled: by degrees, all degrees of a number of devices, or plan files."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from autopar import api
from autopar.cost import CostModel
from autopar.degrees import Degrees
from autopar.errors import JobError, TacticError
from autopar.plan import Plan
from autopar.prediction import Setting
from autopar.profile.extract import Extraction, extract
from autopar.task import job_machine
from autopar.units import parse_whole

_NUMBERS = frozenset(field.name for field in fields(Degrees) if field.type in (int, "int"))
_HINT = 'write them like "dp=2 tp=2 zero=1 microbatch=4 recompute=full"'


def parse_degrees(text: str, **others: Any) -> Degrees:
    """Return degrees that are written as NAME=VALUE, between commas or spaces.

    Args:
        text: The degrees.
        **others: Fields that the text does not state.

    Raises:
        JobError: If a name or a value is wrong, or the degrees do not agree.

    >>> parse_degrees("dp=2, zero=1", global_batch=8).zero
    1
    """
    found: dict[str, Any] = {}
    known = {field.name for field in fields(Degrees)}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        name = name.replace("-", "_")
        if name not in known or name in ("layers", "predictions") or not equals:
            raise JobError(f"degrees {text!r}: {part!r} is no degree", hint=_HINT)
        if name in _NUMBERS:
            number = parse_whole(value)
            if number is None:
                raise JobError(f"degrees {text!r}: {name} is {value!r}, no whole number", hint=_HINT)
            found[name] = number
        elif name in ("sequence_parallel", "pp_inside"):
            if value not in ("true", "false", "1", "0"):
                raise JobError(f"degrees {text!r}: {name} is {value!r}", hint="it is true or false")
            found[name] = value in ("true", "1")
        else:
            found[name] = value
    return Degrees(**{**others, **found})


def every_split(gpus: int, global_batch: int) -> Iterator[Degrees]:
    """Yield all products of data-, tensor- and pipeline-parallel degrees of so many devices."""
    for tp in range(1, gpus + 1):
        for pp in range(1, gpus // tp + 1):
            if gpus % (tp * pp) == 0 and global_batch % (gpus // (tp * pp)) == 0:
                yield Degrees(dp=gpus // (tp * pp), tp=tp, pp=pp, global_batch=global_batch)


def extract_degrees(
    setting: Setting, plans: Sequence[Degrees], into: Extraction, *, skip: bool = False
) -> list[tuple[Degrees, str]]:
    """Add the events of plans by degrees.

    Args:
        setting: Model, hardware and software.
        plans: The plans.
        into: What is known of others.
        skip: Whether plans that the model cannot be split into are left out.

    Returns:
        The plans that were left out, and why.

    Raises:
        AutoparError: If a plan fits neither model nor cluster, and none is to be left out.
    """
    left_out: list[tuple[Degrees, str]] = []
    predictor = setting.predictor
    for degrees in plans:
        try:
            settled = predictor.settled(degrees)
            machine = job_machine(settled.gpus, setting.cluster)
            program, _ = predictor.lowered(settled, machine, setting.stack, policy=setting.policy)
        except (JobError, TacticError) as error:
            if not skip:
                raise
            left_out.append((degrees, str(error.args[0])))
            continue
        folded = predictor.workload.folded(settled.samples)
        extract(program, folded, CostModel(machine, setting.policy, setting.stack), into)
    return left_out


def extract_plan(path: Path, into: Extraction, *, model: str | None = None, cache_dir: Path | None = None) -> str:
    """Add the events of a plan file and return the precision it was planned in; errors as of `simulate_plan`."""
    plan = Plan.load(path)
    program, costs, folded = api.lower_plan(plan, model=model, cache_dir=cache_dir)
    extract(program, folded, costs, into)
    return costs.policy.name
