"""Profile databases in the form of Aceso: measured seconds and bytes per op, collectives, bandwidth between devices.

A database is a folder, or a tar archive of one, of CSV files (microsoft/SuperScaler, EuroSys 2024):

| file | what its rows say |
|---|---|
| `FAMILY_SIZE_mbsB_tpT_algoA.csv` | what an op takes with B samples on T tensor-parallel devices |
| `prim_FAMILY_SIZE_COLLECTIVE_Ngpus.csv` | milliseconds of a collective of so many MiB on N devices |
| `p2p_intra_node.csv`, `p2p_inter_node.csv` | GB/s of a transfer of so many MiB inside a node and between nodes |

The first has a row per distinct op with its name, microseconds forward and backward, and MiB: of input, output,
weights, what it keeps for the backward, and what the allocator reserves besides in either pass. A numbers ways of
sharding: 0 splits products by columns and then by rows, as in Megatron-LM, 1 the other way round.

Seconds of ops contain the collectives of tensor parallelism. An op that did not fit when it was measured has 10,000,000
in its row; here its seconds are infinite. Files that are missing count as not measured, too.
"""

import csv
import io
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

import numpy as np
from numpy.typing import NDArray

from autopar.errors import DataError

Floats = NDArray[np.float64]

MIB = 2.0**20
UNMEASURED = 1e6  # microseconds or MiB from which on a row says that the op did not run; Aceso writes 1e7
LARGEST_FILE = 16 * 2**20  # bytes; those of public databases have 2 KB

_HINT = "give a folder of CSV files in Aceso's form, or a tar archive of one"
_OP_FILE = re.compile(r"(?P<model>\w+?)_mbs(?P<microbatch>\d+)_tp(?P<tensor>\d+)_algo(?P<algorithm>\d+)\.csv")
_COLLECTIVE_FILE = re.compile(
    r"prim_(?P<model>\w+)_(?P<kind>all_gather|all_reduce|reduce_scatter|all_to_all)_(?P<devices>\d+)gpus\.csv"
)
_COLUMNS = (
    "forward-compute", "backward-compute", "input_size", "output_size", "weights", "activations", "fwd_reserved",
    "bwd_reserved",
)  # fmt: skip
_FIELDS = (
    "forward", "backward", "inputs", "outputs", "weights", "activations", "reserved_forward", "reserved_backward",
)  # fmt: skip
"""Attributes of a `ModelProfile` in the order of the columns."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelProfile:
    """What was measured of the ops of one model.

    The arrays have the dims (op, microbatch size, tensor-parallel degree, algorithm); infinity where nothing was
    measured.

    Attributes:
        model: Name in the files, such as `gpt_1_3B`.
        ops: Names of distinct ops in the order of the model, the layer once.
        microbatches: Samples per device, ascending.
        degrees: Tensor-parallel degrees, ascending.
        algorithms: Ways of sharding, ascending.
        forward: Seconds.
        backward: Seconds.
        inputs: Bytes that the op takes.
        outputs: Bytes that the op hands on.
        weights: Bytes of parameters.
        activations: Bytes that it keeps for the backward.
        reserved_forward: Bytes the allocator reserves besides in the forward.
        reserved_backward: The same in the backward.
        collectives: Seconds by (kind, devices), then by whole MiB.
    """

    model: str
    ops: tuple[str, ...]
    microbatches: tuple[int, ...]
    degrees: tuple[int, ...]
    algorithms: tuple[int, ...]
    forward: Floats
    backward: Floats
    inputs: Floats
    outputs: Floats
    weights: Floats
    activations: Floats
    reserved_forward: Floats
    reserved_backward: Floats
    collectives: Mapping[tuple[str, int], Mapping[int, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Bandwidth:
    """Bytes per second of transfers by size, ascending in bytes."""

    sizes: Floats
    rates: Floats

    def seconds(self, size: float) -> float:
        """Return the seconds of a transfer, by Aceso's rule: the rate of half the size, rounded down to a column.

        >>> rates = Bandwidth(np.array([1.0, 2.0, 4.0, 8.0]) * MIB, np.array([1e9, 2e9, 4e9, 8e9]))
        >>> rates.seconds(8 * MIB) == 8e6 / 4e9
        True
        """
        if size == np.inf:
            return np.inf
        if size <= 0:
            return 0.0
        steps = int(np.log2(size / MIB))  # towards 0; below half a MiB it is negative and counts from the last column
        place = steps - 1 if steps >= 1 else max(steps, -len(self.rates))
        return float(size / MIB * 1e6 / self.rates[min(place, len(self.rates) - 1)])  # they divide MiB by GB/s


class Database:
    """The files of a database by name, and what they say."""

    def __init__(self, path: Path, files: Mapping[str, str]) -> None:
        self.path = path
        self._files = files

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a folder or a tar archive.

        Raises:
            DataError: If there is no such thing, or no file of this form in it.
        """
        place = Path(path)
        try:
            files = dict(_read_folder(place) if place.is_dir() else _read_archive(place))
        except (OSError, tarfile.TarError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no tar archive of text"
            raise DataError(f"{str(path)!r} cannot be read as a profile database: {why}", hint=_HINT) from None
        found = cls(place, files)
        if not found.models:
            raise DataError(
                f"{str(path)!r} has no file like gpt_1_3B_mbs1_tp1_algo0.csv",
                hint=_HINT,
            )
        return found

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that it has measurements of."""
        return tuple(sorted({match["model"] for match in map(_OP_FILE.fullmatch, self._files) if match}))

    def find(self, name: str) -> str:
        """Return the name in the files of a model as a user writes it: `gpt-1.3b` is `gpt_1_3B`.

        Raises:
            DataError: If there is no such model.
        """
        for model in self.models:
            if _plain(model) == _plain(name):
                return model
        raise DataError(f"{str(self.path)!r} has no model {name!r}", hint=f"it has {', '.join(self.models)}")

    def bandwidth(self, *, between_nodes: bool) -> Bandwidth:
        """Return the bandwidth inside a node or between nodes; that inside a node if the other was not measured.

        Raises:
            DataError: If the file is missing or malformed.
        """
        name = "p2p_inter_node.csv" if between_nodes and "p2p_inter_node.csv" in self._files else "p2p_intra_node.csv"
        if name not in self._files:
            raise DataError(f"{str(self.path)!r} has no {name}", hint="copy the whole database")
        rows = self._rows(name)
        if len(rows) != 2 or len(rows[0]) != len(rows[1]):
            raise DataError(f"{name} in {str(self.path)!r} needs two rows of one length: MiB and GB/s")
        sizes = [self._number(name, 1, each) for each in rows[0]]
        rates = [self._number(name, 2, each) for each in rows[1]]
        if min(rates) <= 0 or sizes != sorted(sizes):
            raise DataError(f"{name} in {str(self.path)!r}: sizes have to ascend and rates to be positive")
        return Bandwidth(np.array(sizes) * MIB, np.array(rates) * 1e9)

    def profile(self, model: str) -> ModelProfile:
        """Return all measurements of one model.

        Raises:
            DataError: If a file is malformed or names other ops than the first one.
        """
        settings: dict[tuple[int, int, int], str] = {}
        for name in self._files:
            match = _OP_FILE.fullmatch(name)
            if match and match["model"] == model:
                settings[int(match["microbatch"]), int(match["tensor"]), int(match["algorithm"])] = name
        microbatches, degrees, algorithms = (tuple(sorted({key[axis] for key in settings})) for axis in range(3))
        ops = tuple(row[0] for row in self._rows(settings[min(settings)])[1:])
        table = np.full((len(_COLUMNS), len(ops), len(microbatches), len(degrees), len(algorithms)), np.inf)
        for (samples, degree, algorithm), name in sorted(settings.items()):
            place = microbatches.index(samples), degrees.index(degree), algorithms.index(algorithm)
            for op, values in enumerate(self._op_rows(name, ops)):
                table[:, op, place[0], place[1], place[2]] = np.inf if max(values) >= UNMEASURED else values
        table[:2] *= 1e-6
        table[2:] *= MIB
        columns = dict(zip(_FIELDS, table, strict=True))
        return ModelProfile(
            model, ops, microbatches, degrees, algorithms, collectives=self._collectives(model), **columns
        )

    def _op_rows(self, name: str, ops: tuple[str, ...]) -> Iterator[list[float]]:
        """Yield the numbers of every op of a file; they have to be the given ones."""
        rows = self._rows(name)
        if not rows or tuple(each.strip() for each in rows[0][1:]) != _COLUMNS:
            raise DataError(f"{name} in {str(self.path)!r} has not the columns op_name, {', '.join(_COLUMNS)}")
        if tuple(row[0] for row in rows[1:]) != ops:
            raise DataError(f"{name} in {str(self.path)!r} has other ops than {len(ops)} of the model's first file")
        for line, row in enumerate(rows[1:], 2):
            if len(row) != len(_COLUMNS) + 1:
                raise DataError(
                    f"line {line} of {name} in {str(self.path)!r} has {len(row)} columns, not {len(_COLUMNS) + 1}"
                )
            yield [self._number(name, line, each) for each in row[1:]]

    def _collectives(self, model: str) -> dict[tuple[str, int], dict[int, float]]:
        found: dict[tuple[str, int], dict[int, float]] = {}
        for name in sorted(self._files):
            match = _COLLECTIVE_FILE.fullmatch(name)
            if match is None or match["model"] != model:
                continue
            own = found[match["kind"], int(match["devices"])] = {}
            for line, row in enumerate(self._rows(name)[1:], 2):
                if len(row) != 2:
                    raise DataError(f"line {line} of {name} in {str(self.path)!r} has {len(row)} columns, not 2")
                size, seconds = (self._number(name, line, each) for each in row)
                if size < UNMEASURED:
                    own[round(size)] = seconds * 1e-3
        return found

    def _rows(self, name: str) -> list[list[str]]:
        return [row for row in csv.reader(io.StringIO(self._files[name])) if row]

    def _number(self, name: str, line: int, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = np.nan
        if not 0 <= value < np.inf:
            raise DataError(f"line {line} of {name} in {str(self.path)!r}: {text!r} is no number of at least 0")
        return value


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def _is_wanted(name: str) -> bool:
    return bool(_OP_FILE.fullmatch(name) or _COLLECTIVE_FILE.fullmatch(name) or name.startswith("p2p_"))


def _read_folder(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.csv")):
        if _is_wanted(path.name):
            yield path.name, _text(path.name, path.stat().st_size, path.read_bytes)


def _read_archive(path: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(path) as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if member.isfile() and _is_wanted(name):
                content = archive.extractfile(member)
                assert content is not None, "it is a file"
                yield name, _text(name, member.size, content.read)


def _text(name: str, size: int, read: Callable[[], bytes]) -> str:
    if size > LARGEST_FILE:
        raise DataError(f"{name} has {size} bytes; files of a profile database have at most {LARGEST_FILE}")
    return read().decode()
