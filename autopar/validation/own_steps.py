"""Step times of one's own, from a CSV: which columns there are, and what becomes of each row.

    dp,tp,pp,zero,microbatch,global_batch,seconds
    2,1,1,1,4,32,0.412
    1,2,1,0,8,32,0.455

Columns are the fields of `autopar.degrees.Degrees` that are numbers or names, `seconds`, and if they differ between
rows `model` and `set` (sizes as `--set` takes them, between spaces). Empty cells are defaults.
"""

import csv
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster
from autopar.cost import CostModel, Stack, priced
from autopar.degrees import Degrees
from autopar.errors import DataError, JobError
from autopar.events import Profile
from autopar.plan import DimSize
from autopar.prediction import Setting, open_setting
from autopar.profile.plans import parse_degrees
from autopar.progress import Progress, ProgressCallback, silent
from autopar.task import job_machine
from autopar.validation.calibrate import Calibration, Prepared, fit_prepared

DEGREES = tuple(field.name for field in fields(Degrees) if field.name not in ("layers", "predictions"))
COLUMNS = (*DEGREES, "seconds", "model", "set")
HELD_FROM = 9
"""Rows from which on a part of them is held out of the fit."""
_SHARE = 3  # one row of so many is held out
_HINT = f"columns are {', '.join(COLUMNS)}; docs/profile.md has an example"


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step.

    Attributes:
        degrees: The plan.
        seconds: How long it took.
        model: The model, if the row says; "" for that of the command.
        dims: Sizes that the row says.
        line: Line of the file.
    """

    degrees: Degrees
    seconds: float
    model: str
    dims: tuple[tuple[str, str], ...]
    line: int

    @property
    def is_held_out(self) -> bool:
        """Whether the row is for checking a fit: its plan decides, not what was measured."""
        text = f"{self.degrees} {self.model} {self.dims}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8]) % _SHARE == 0


def read_steps(path: Path) -> list[Step]:
    """Return the rows of a CSV file.

    Raises:
        DataError: If it cannot be read, has no or unknown columns, or a cell is wrong; the message has the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint=_HINT) from None
    reader = csv.DictReader(text.splitlines())
    columns = [name.strip() for name in reader.fieldnames or ()]
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or "seconds" not in columns:
        what = f"an unknown column {unknown[0]!r}" if unknown else "no column 'seconds'"
        raise DataError(f"{path} has {what}", hint=_HINT)
    reader.fieldnames = columns
    found = [_step(path, number, cells) for number, cells in enumerate(reader, 2)]
    if not found:
        raise DataError(f"{path} has no rows", hint=_HINT)
    return found


def _step(path: Path, line: int, cells: Mapping[str, Any]) -> Step:
    where = f"{path}, line {line}"
    if None in cells or None in cells.values():
        raise DataError(f"{where}: it has not as many cells as there are columns", hint=_HINT)
    stated = {name: str(cell).strip() for name, cell in cells.items() if str(cell).strip()}
    try:
        seconds = float(stated.pop("seconds", ""))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise DataError(
            f"{where}: seconds is {cells['seconds']!r}", hint="it is the time of a step in seconds, above 0"
        )
    model, sizes = stated.pop("model", ""), stated.pop("set", "").split()
    pairs = [size.partition("=") for size in sizes]
    if any(not equals for _, equals, _ in pairs):
        raise DataError(f"{where}: set is {cells['set']!r}", hint="write it like 'seq=1024 hidden=2048'")
    try:
        degrees = parse_degrees(" ".join(f"{name}={value}" for name, value in stated.items()))
    except JobError as error:
        raise DataError(f"{where}: {error.args[0]}", hint=error.hint) from None
    return Step(degrees, seconds, model, tuple((name, value) for name, _, value in pairs), line)


def calibrate_steps(
    path: Path,
    model: str | None,
    start: Stack,
    cluster: Cluster,
    *,
    dims: Mapping[str, DimSize] | None = None,
    precision: str = "mixed",
    optimizer: str = "adam",
    profile: Profile | None = None,
    scalars: Sequence[str] = (),
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
) -> Calibration:
    """Return a stack fitted to step times of one's own.

    Args:
        path: The CSV file.
        model: The model of rows that name none.
        start: Name and kernels of the stack, and scalars that are not fitted.
        cluster: The hardware.
        dims: Sizes of the model.
        precision: What is stored in which precision.
        optimizer: Optimizer of the steps.
        profile: Measured events that count in place of formulas.
        scalars: Scalars to fit; by default all that make a difference to the rows.
        cache_dir: Where discovered rules are kept between runs.
        progress: Told how far it is.

    Raises:
        DataError: If the file is wrong, or a plan of it cannot be predicted; the message has the line.
    """
    steps = read_steps(path)

    @cache
    def setting_of(name: str, sizes: tuple[tuple[str, str], ...]) -> Setting:
        own = {key: _number(value) for key, value in sizes}
        return open_setting(
            name, cluster=cluster, stack=start, dims={**(dims or {}), **own}, precision=precision,
            optimizer=optimizer, cache_dir=cache_dir,
        )  # fmt: skip

    prepared: list[Prepared] = []
    for number, step in enumerate(steps):
        progress(Progress("lower", number, len(steps), detail=f"line {step.line}"))
        name = step.model or model
        if not name:
            raise DataError(f"{path}, line {step.line}: it names no model", hint="give --model, or a column model")
        try:
            prepared.append(_prepared(step, setting_of(name, step.dims), path, profile))
        except ValueError as error:
            raise DataError(f"{path}, line {step.line}: {error}", hint="leave the row out, or mend it") from None
    held = [len(steps) >= HELD_FROM and step.is_held_out for step in steps]
    parts = [[one for one, out in zip(prepared, held, strict=True) if out is side] for side in (False, True)]
    return fit_prepared(parts[0], parts[1], start, scalars, progress)


def _number(value: str) -> DimSize:
    return int(value) if value.isdecimal() else float(value)


def _prepared(step: Step, setting: Setting, path: Path, profile: Profile | None) -> Prepared:
    degrees = setting.predictor.settled(step.degrees)
    machine = job_machine(degrees.gpus, setting.cluster)
    program, _ = setting.predictor.lowered(degrees, machine, setting.stack, policy=setting.policy)
    costs = priced(CostModel(machine, setting.policy, setting.stack), profile)
    sizes = {"n_gpus": degrees.gpus, "dp": degrees.dp, "tp": degrees.tp, "pp": degrees.pp, "ep": degrees.ep}
    sizes |= {"micro_batch": degrees.microbatch, "microbatches": degrees.num_microbatches}
    return Prepared(program, machine, setting.policy, step.seconds, path.name, sizes, costs.prices)
