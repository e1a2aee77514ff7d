"""Step times of one's own, from a CSV or from logs: which columns there are, and what becomes of each row.

    dp,tp,pp,zero,microbatch,global_batch,seconds
    2,1,1,1,4,32,0.412
    1,2,1,0,8,32,0.455

Columns are the fields of `autopar.degrees.Degrees` that are numbers or names, `seconds` or `log` (a file that
`autopar.validation.training_logs` reads, relative to the CSV), and if they differ between rows `model` and `set` (sizes
as `--set` takes them, between spaces). Empty cells are defaults; a row that has a log and no degrees has those of the
log.
"""

import csv
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from autopar.validation.training_logs import read_log

DEGREES = tuple(field.name for field in fields(Degrees) if field.name not in ("layers", "predictions"))
COLUMNS = (*DEGREES, "seconds", "log", "model", "set")
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
        where: File and line, as errors name them.
        source: Name of the file.
        precision: What it computed in; None for that of the command.
    """

    degrees: Degrees
    seconds: float
    model: str
    dims: tuple[tuple[str, DimSize], ...]
    where: str
    source: str
    precision: str | None = None

    @property
    def is_held_out(self) -> bool:
        """Whether the row is for checking a fit: its plan decides, not what was measured."""
        text = f"{self.degrees} {self.model} {self.dims}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8]) % _SHARE == 0


def read_steps(path: Path, model: str | None = None, degrees: str = "") -> list[Step]:
    """Return the rows of a CSV file, or the step of a log.

    Args:
        path: A file whose name ends in .csv, or a log.
        model: The model of logs that do not state its sizes.
        degrees: The plan of a log, as `parse_degrees` takes it; "" if the log states it.

    Raises:
        DataError: If it cannot be read, has no or unknown columns, or a cell is wrong; the message has the line.
    """
    if path.suffix.lower() != ".csv":
        return [_logged(path, degrees, model, str(path))]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint=_HINT) from None
    reader = csv.DictReader(text.splitlines())
    columns = [name.strip() for name in reader.fieldnames or ()]
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or not {"seconds", "log"} & {*columns}:
        what = f"an unknown column {unknown[0]!r}" if unknown else "no column 'seconds' or 'log'"
        raise DataError(f"{path} has {what}", hint=_HINT)
    reader.fieldnames = columns
    found = [_step(path, number, cells, model) for number, cells in enumerate(reader, 2)]
    if not found:
        raise DataError(f"{path} has no rows", hint=_HINT)
    return found


def _step(path: Path, line: int, cells: Mapping[str, Any], model: str | None) -> Step:
    where = f"{path}, line {line}"
    if None in cells or None in cells.values():
        raise DataError(f"{where}: it has not as many cells as there are columns", hint=_HINT)
    stated = {name: str(cell).strip() for name, cell in cells.items() if str(cell).strip()}
    own_model, sizes, log = stated.pop("model", ""), stated.pop("set", "").split(), stated.pop("log", "")
    pairs = [size.partition("=") for size in sizes]
    if any(not equals for _, equals, _ in pairs):
        raise DataError(f"{where}: set is {cells['set']!r}", hint="write it like 'seq=1024 hidden=2048'")
    dims = tuple((name, _number(value)) for name, _, value in pairs)
    written = stated.pop("seconds", None)
    degrees = " ".join(f"{name}={value}" for name, value in stated.items())
    if log and written is None:
        found = _logged(path.parent / log, degrees, own_model or model, where)
        return replace(found, dims=tuple({**dict(found.dims), **dict(dims)}.items()))
    try:
        seconds = float(written or "")
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise DataError(f"{where}: seconds is {written or ''!r}", hint="it is the time of a step in seconds, above 0")
    return Step(_parsed(degrees, where), seconds, own_model, dims, where, path.name)


def _parsed(degrees: str, where: str) -> Degrees:
    try:
        return parse_degrees(degrees)
    except JobError as error:
        raise DataError(f"{where}: {error.args[0]}", hint=error.hint) from None


def _logged(path: Path, degrees: str, model: str | None, where: str) -> Step:
    """Return the step that a log states."""
    found = read_log(path, degrees=_parsed(degrees, where) if degrees else None, model=model)
    return Step(found.degrees, found.seconds, found.model, tuple(found.dims.items()), where, path.name, found.precision)


def calibrate_steps(
    paths: Sequence[Path],
    model: str | None,
    start: Stack,
    cluster: Cluster,
    *,
    degrees: str = "",
    dims: Mapping[str, DimSize] | None = None,
    precision: str | None = None,
    optimizer: str = "adam",
    profile: Profile | None = None,
    scalars: Sequence[str] = (),
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
) -> Calibration:
    """Return a stack fitted to step times of one's own.

    Args:
        paths: CSV files and logs.
        model: The model of rows that name none.
        start: Name and kernels of the stack, and scalars that are not fitted.
        cluster: The hardware.
        degrees: The plan of logs that do not state it, as `parse_degrees` takes it.
        dims: Sizes of the model.
        precision: What is stored in which precision; by default what a log says, else "mixed".
        optimizer: Optimizer of the steps.
        profile: Measured events that count in place of formulas.
        scalars: Scalars to fit; by default all that make a difference to the rows.
        cache_dir: Where discovered rules are kept between runs.
        progress: Told how far it is.

    Raises:
        DataError: If the file is wrong, or a plan of it cannot be predicted; the message has the line.
    """
    steps = [step for path in paths for step in read_steps(path, model, degrees)]

    @cache
    def setting_of(name: str, sizes: tuple[tuple[str, DimSize], ...], numbers: str) -> Setting:
        return open_setting(
            name, cluster=cluster, stack=start, dims={**(dims or {}), **dict(sizes)}, precision=numbers,
            optimizer=optimizer, cache_dir=cache_dir,
        )  # fmt: skip

    prepared: list[Prepared] = []
    for number, step in enumerate(steps):
        progress(Progress("lower", number, len(steps), detail=step.where))
        name = step.model or model
        if not name:
            raise DataError(f"{step.where}: it names no model", hint="give --model, or a column model")
        try:
            setting = setting_of(name, step.dims, precision or step.precision or "mixed")
            prepared.append(_prepared(step, setting, profile))
        except ValueError as error:
            raise DataError(f"{step.where}: {error}", hint="leave the row out, or mend it") from None
    held = [len(steps) >= HELD_FROM and step.is_held_out for step in steps]
    parts = [[one for one, out in zip(prepared, held, strict=True) if out is side] for side in (False, True)]
    return fit_prepared(parts[0], parts[1], start, scalars, progress)


def _number(value: str) -> DimSize:
    return int(value) if value.isdecimal() else float(value)


def _prepared(step: Step, setting: Setting, profile: Profile | None) -> Prepared:
    degrees = setting.predictor.settled(step.degrees)
    machine = job_machine(degrees.gpus, setting.cluster)
    program, _ = setting.predictor.lowered(degrees, machine, setting.stack, policy=setting.policy)
    costs = priced(CostModel(machine, setting.policy, setting.stack), profile)
    sizes = {"n_gpus": degrees.gpus, "dp": degrees.dp, "tp": degrees.tp, "pp": degrees.pp, "ep": degrees.ep}
    sizes |= {"micro_batch": degrees.microbatch, "microbatches": degrees.num_microbatches}
    return Prepared(program, machine, setting.policy, step.seconds, step.source, sizes, costs.prices)
