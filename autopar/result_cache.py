"""Plans found before, on disk, by the content of what was asked.

The key is a hash of all that decides a plan: the model's content (not its path), cluster, job, space, effort, the
source of this package, and the versions of the packages that execute ops and solve problems. So a changed model,
cluster or program is another key, and an old answer is never given to a new question. The time limit is no part of the
key: a search that ended by itself answers for every limit, one that was cut for limits that are no longer than its own;
one that was interrupted is not kept.

A file is written at once or not at all, holds the hash of its plan, and counts as absent if anything is wrong with it.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from autopar.errors import PlanError
from autopar.plan import PLAN_VERSION, Plan
from autopar.task import Effort, Task
from autopar.writing import write_atomically

CACHE_VERSION = 1
"""Of the files."""
MAX_BYTES = 256_000_000
"""Of all files together; those not asked for longest go first. A plan of a large model takes about 1 MB."""
FOLDER = "results"
_ELSEWHERE = frozenset({"job", "workload", "rules", "costs", "phases", "constraints"})
"""Fields of a task that follow from the other parts of its key, or decide nothing."""
_PACKAGES = ("highspy", "numba", "numpy", "onnx", "ortools", "pulp")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file.

    Attributes:
        version: Of the format.
        limit: Seconds after which the search was cut; None if it ended by itself.
        sha256: Of the plan's JSON.
        plan: The plan's JSON.
    """

    version: int
    limit: float | None
    sha256: str
    plan: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a cache holds: number of plans, and bytes."""

    plans: int
    bytes: int


class ResultCache:
    """The plans kept in a folder, for one question.

    Args:
        folder: Folder of the cache; None keeps and knows nothing.
        task: The job.
        effort: How hard to look.
    """

    def __init__(self, folder: str | Path | None, task: Task, effort: Effort) -> None:
        self._source = task.workload.source
        self._limit = effort.time_limit
        self._path = None if folder is None else Path(folder) / FOLDER / f"{question_key(task, effort)}.json"

    def answer(self) -> Plan | None:
        """Return the plan found before, marked as such; None if there is none that answers the question."""
        if self._path is None:
            return None
        entry = _read(self._path)
        if entry is None or (entry.limit is not None and (self._limit or math.inf) > entry.limit):
            return None
        try:
            plan = Plan.from_json(entry.plan.encode())
        except PlanError:  # of another version, or damaged: the search is repeated
            return None
        if plan.search is None:
            return None
        with suppress(OSError):  # it may be read-only, or have been removed meanwhile
            self._path.touch()
        return _at(replace(plan, search=replace(plan.search, cached=True)), self._source)

    def keep(self, plan: Plan) -> str:
        """Keep the plan a search came to, unless it was interrupted or the cache knows a better one.

        Returns:
            Why it could not be kept, for people; "" if it was, or need not be.
        """
        if self._path is None or plan.search is None or plan.search.termination == "interrupted":
            return ""
        limit = self._limit if plan.search.termination == "time limit" else None
        known = _read(self._path)
        if limit is not None and known is not None and (known.limit is None or known.limit > limit):
            return ""
        text = plan.to_json().decode()
        entry = Entry(CACHE_VERSION, limit, hashlib.sha256(text.encode()).hexdigest(), text)
        try:
            write_atomically(self._path, msgspec.json.encode(entry))
        except PlanError as error:
            return str(error.args[0])
        _trim(self._path.parent, MAX_BYTES)
        return ""


def usage(folder: Path) -> Usage:
    """Return what the cache in a folder holds."""
    sizes = [size for _, size, _ in _files(folder / FOLDER)]
    return Usage(len(sizes), sum(sizes))


def clear(folder: Path) -> Usage:
    """Remove all plans kept in a folder and return what that was."""
    held = usage(folder)
    _trim(folder / FOLDER, 0)
    return held


def question_key(task: Task, effort: Effort) -> str:
    """Return the hash of all that decides the plan of a task, but for the time limit."""
    workload = task.workload
    parts: list[object] = [
        CACHE_VERSION,
        PLAN_VERSION,
        workload.content,
        workload.info().sha256,
        sorted(workload.dims.items()),
        task.job,
        "" if task.costs.prices is None else task.costs.prices.digest,
        [(field.name, repr(getattr(task, field.name))) for field in fields(task) if field.name not in _ELSEWHERE],
        replace(effort, time_limit=None),
        source_digest(),
        [(name, _installed(name)) for name in _PACKAGES],
    ]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Return a hash of the source of this package, its version included: also while it is being developed."""
    digest = hashlib.sha256()
    for path in sorted(_sources(Path(__file__).parent)):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    """Yield code and data of a package; two of its folders may be symbolic links."""
    for path in folder.iterdir():
        if path.name.startswith((".", "__pycache__")):
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix in (".py", ".yaml", ".json"):
            yield path


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _read(path: Path) -> Entry | None:
    """Return a file's entry; None if it is absent, damaged or of another version."""
    try:
        entry = msgspec.json.decode(path.read_bytes(), type=Entry)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    intact = hashlib.sha256(entry.plan.encode()).hexdigest() == entry.sha256
    return entry if entry.version == CACHE_VERSION and intact else None


def _at(plan: Plan, source: str) -> Plan:
    """Return a plan whose model lies where it lies now: the same content may have moved."""
    others = tuple(replace(other, model=replace(other.model, source=source)) for other in plan.alternatives)
    return replace(plan, model=replace(plan.model, source=source), alternatives=others)


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return time of last use, bytes and path of every file; one that goes meanwhile is left out."""
    found = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return sorted(found)


def _trim(folder: Path, most: int) -> None:
    """Remove the files not used for longest until the others take at most so many bytes."""
    files = _files(folder)
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= most:
            return
        path.unlink(missing_ok=True)
        total -= size
