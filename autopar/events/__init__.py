"""Events of distributed steps and the seconds measured of them: records, their database, and how databases merge."""

from autopar.events.database import (
    DATABASE_FILE,
    Database,
    Entry,
    Machine,
    Measurement,
    Profile,
    load_database,
    merge_databases,
    save_database,
)
from autopar.events.records import (
    Event,
    LaunchEvent,
    OpEvent,
    OverlapEvent,
    PieceEvent,
    TensorType,
    TransferEvent,
    event_id,
    op_family,
    op_sizes,
)

__all__ = [
    "DATABASE_FILE",
    "Database",
    "Entry",
    "Event",
    "LaunchEvent",
    "Machine",
    "Measurement",
    "OpEvent",
    "OverlapEvent",
    "PieceEvent",
    "Profile",
    "TensorType",
    "TransferEvent",
    "event_id",
    "load_database",
    "merge_databases",
    "op_family",
    "op_sizes",
    "save_database",
]
