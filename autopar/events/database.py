"""The database of events: a folder with one JSON file that people can read, diff and merge.

    {"format": "autopar events", "version": 1, "precisions": ["fp32"],
     "machines": {"m-0f3a...": {"device": "...", "backend": "gloo", ...}},
     "events": {"op-91c2...": {"event": {...}, "measured": [{"machine": "m-0f3a...", "busy": 2, "seconds": ...}]}}}

Names of events are hashes of what they are, so that databases of any machines merge by name. Of one event on one
machine, with equally many busy devices, the measurement with more repeats stays.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autopar.errors import DataError
from autopar.events.records import Event, event_id
from autopar.reading import UnreadableError, parse_json
from autopar.writing import write_atomically

FORMAT = "autopar events"
VERSION = 1
DATABASE_FILE = "events.json"
_HINT = "`autopar profile MODEL --gpus N -o DIR` makes one"


class Machine(msgspec.Struct, frozen=True):
    """Where events were measured.

    Attributes:
        device: What computed.
        backend: What communicated: "gloo" or "nccl".
        threads: Threads of a rank on the CPU.
        cores: Cores of the machine.
        software: Versions of what computed and communicated.
        memory: Bytes of memory of a device.
    """

    device: str
    backend: str
    threads: int
    cores: int
    software: tuple[tuple[str, str], ...]
    memory: float

    @property
    def id(self) -> str:
        """Its name in a database."""
        return f"m-{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]}"


class Measurement(msgspec.Struct, frozen=True):
    """Seconds of an event.

    Attributes:
        machine: Name of the machine.
        busy: Devices of a node that did the same at the same time.
        seconds: Median; of collectives the mean.
        low: The time that a tenth of the repeats stays below.
        high: The time that a tenth of the repeats exceeds.
        repeats: Repeats that were timed.
        warmup: Repeats before these.
        date: Day, YYYY-MM-DD.
        load: Load of the machine when it was measured: runnable processes, mean of a minute.
    """

    machine: str
    busy: int
    seconds: float
    low: float
    high: float
    repeats: int
    warmup: int
    date: str
    load: float = 0.0

    @property
    def spread(self) -> float:
        """Distance of the tenths, as a share of the median."""
        return (self.high - self.low) / self.seconds if self.seconds else 0.0


class Entry(msgspec.Struct, frozen=True):
    """An event and what was measured of it.

    Attributes:
        event: The event.
        measured: Measurements, at most one per machine and number of busy devices.
        problem: Why it could not be measured; "" if it could.
    """

    event: Event
    measured: tuple[Measurement, ...] = ()
    problem: str = ""

    def with_measurement(self, found: Measurement) -> "Entry":
        """Return the entry with one more measurement, in place of one of the same machine with fewer repeats."""
        own = (found.machine, found.busy)
        same = next((known for known in self.measured if (known.machine, known.busy) == own), None)
        if same is not None and same.repeats > found.repeats:
            return self
        others = [known for known in self.measured if known is not same]
        ordered = sorted([*others, found], key=lambda known: (known.machine, known.busy))
        return Entry(self.event, tuple(ordered))


class Database(msgspec.Struct, frozen=True):
    """Events and their seconds.

    Attributes:
        machines: Where they were measured, by name.
        events: Entries by name.
        precisions: Precisions of the jobs whose events these are, keys of `autopar.cost.POLICIES`.
        format: What the file is.
        version: Version of the format.
    """

    machines: dict[str, Machine] = {}
    events: dict[str, Entry] = {}
    precisions: tuple[str, ...] = ()
    format: str = FORMAT
    version: int = VERSION

    @property
    def digest(self) -> str:
        """Hash of the content."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:12]

    @property
    def num_measured(self) -> int:
        """Number of events with a measurement."""
        return sum(bool(entry.measured) for entry in self.events.values())

    def is_measured(self, name: str, machine: str, busy: int) -> bool:
        """Whether an event is known on a machine with so many busy devices, or known not to be measurable there."""
        entry = self.events.get(name)
        if entry is None:
            return False
        return any((one.machine, one.busy) == (machine, busy) for one in entry.measured) or bool(entry.problem)

    def with_events(self, events: Iterable[Event], precision: str = "") -> "Database":
        """Return the database with further events, not measured yet."""
        added = {name: Entry(event) for event in events if (name := event_id(event)) not in self.events}
        precisions = tuple(sorted({*self.precisions, *([precision] if precision else [])}))
        return Database(self.machines, self.events | added, precisions)

    def with_measurements(
        self, machine: Machine, found: Mapping[str, Measurement], problems: Mapping[str, str] | None = None
    ) -> "Database":
        """Return the database with measurements of events that it has, by name, and why others could not be made."""
        entries = {name: self.events[name].with_measurement(one) for name, one in found.items()}
        failed = {name: Entry(self.events[name].event, (), text) for name, text in (problems or {}).items()}
        return Database({**self.machines, machine.id: machine}, self.events | entries | failed, self.precisions)


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A database that jobs are planned with.

    Attributes:
        name: What it is called in answers.
        database: Its events.
        digest: Hash of its content; profiles of equal content are equal.
    """

    name: str
    database: Database
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def of(cls, profile: "str | Path | Profile | None") -> "Profile | None":
        """Return a profile: a record as it is, else that of a folder; None for None.

        Raises:
            DataError: As of `load_database`.
        """
        if profile is None or isinstance(profile, Profile):
            return profile
        database = load_database(profile)
        return cls(Path(profile).name or str(profile), database, database.digest)


def merge_databases(databases: Iterable[Database]) -> Database:
    """Return the database with all that several know."""
    machines: dict[str, Machine] = {}
    events: dict[str, Entry] = {}
    precisions: set[str] = set()
    for database in databases:
        machines |= database.machines
        precisions |= set(database.precisions)
        for name, entry in database.events.items():
            known = events.get(name)
            if known is None or (known.problem and entry.measured):
                events[name] = entry
                continue
            for found in entry.measured:
                known = known.with_measurement(found)
            events[name] = known
    return Database(machines, events, tuple(sorted(precisions)))


def save_database(database: Database, folder: Path) -> Path:
    """Write the database of a folder, atomically, and return the path of its file.

    Raises:
        PlanError: If it cannot be written.
    """
    path = folder / DATABASE_FILE
    write_atomically(path, msgspec.json.format(msgspec.json.encode(database, order="sorted"), indent=1) + b"\n")
    return path


def load_database(folder: str | Path) -> Database:
    """Read the database of a folder, or a file of one.

    Raises:
        DataError: If there is none, it is malformed or of another version, or a name is not that of its event.
    """
    path = Path(folder)
    path = path / DATABASE_FILE if path.is_dir() or not path.suffix else path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"profile {path} cannot be read: {error.strerror}", hint=_HINT) from None
    try:
        database = msgspec.convert(parse_json(text), Database)
    except (UnreadableError, msgspec.ValidationError) as error:
        raise DataError(f"profile {path}: {error}", hint=_HINT) from None
    if database.format != FORMAT or database.version != VERSION:
        raise DataError(
            f"profile {path} is {database.format!r} of version {database.version}, this autopar reads "
            f"{FORMAT!r} of version {VERSION}",
            hint="profile again",
        )
    for name, entry in database.events.items():
        if event_id(entry.event) != name:
            raise DataError(f"profile {path}: event {name!r} was edited: its name is a hash of it", hint=_HINT)
        for one in entry.measured:
            if one.machine not in database.machines:
                raise DataError(f"profile {path}: {name!r} was measured on an unknown machine", hint=_HINT)
            if not (one.seconds >= 0 and one.busy >= 1):
                raise DataError(f"profile {path}: {name!r} takes {one.seconds:g} s", hint="seconds are 0 or more")
    return database
