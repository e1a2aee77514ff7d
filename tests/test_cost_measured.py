"""Published timings of collectives: what is priced, what is not and why, and how the split is made."""

import json
from pathlib import Path

import numpy as np
import pytest

from autopar.cost.measured_collectives import collective_report, measured_seconds, split
from autopar.errors import ClusterError

COMM = Path(__file__).parents[2] / "shared" / "data" / "published" / "comm.json"


def row(**fields: object) -> dict[str, object]:
    """Return a record of an all-reduce of 8 H100."""
    return {"source": "here", "op": "all_reduce", "gpu": "H100-SXM-80GB", "n_gpus": 8, "nodes": 1, **fields}


def write(path: Path, rows: object) -> Path:
    """Write records and return their file."""
    file = path / "comm.json"
    file.write_text(json.dumps(rows))
    return file


def test_records_are_priced_on_the_preset_of_their_hardware(tmp_path: Path) -> None:
    """35.5 us + 2 x 7/8 x 1 GB / 409.2 GB/s, twice as long as measured; sends by their own constants."""
    whole = 35.5e-6 + 1.75 * 1e9 / 409.2e9
    rows = [row(bytes=1e9, time_us=whole * 5e5), row(op="send_recv", n_gpus=2, nodes=2, bytes=36.5e6, time_us=1017)]

    report = collective_report(write(tmp_path, rows))

    assert [timing.error for timing in report.timings] == pytest.approx([1.0, 0.0])
    assert not report.unpriced


def test_time_follows_from_bus_bandwidth_or_latency() -> None:
    """At 350 GB/s 1 GB of an all-reduce of 8 takes 2 x 7/8 GB / 350 GB/s = 5 ms."""
    assert measured_seconds(row(bytes=1e9, busbw_gbps=350)) == pytest.approx(5e-3)
    assert measured_seconds(row(bytes=0, latency_us=37.0)) == pytest.approx(37e-6)
    assert measured_seconds(row(busbw_gbps=350)) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"busbw_ratio": 0.9, "bytes": 1e9}, "a share of a peak that is not stated"),
        ({"busbw_gbps": 350}, "no message size"),
        ({"gpu": "unknown (4 nodes x 8)", "bytes": 1e9, "time_us": 1.0}, "hardware 'unknown (4 nodes x 8)'"),
        ({"gpu": "A100-SXM-80GB DGX", "nodes": 2, "bytes": 1e9, "time_us": 1.0}, "NICs between these nodes"),
    ],
)
def test_records_that_cannot_be_priced_are_listed_with_the_reason(
    tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    report = collective_report(write(tmp_path, [row(**fields)]))

    assert not report.timings
    (unpriced,) = report.unpriced
    assert unpriced.reason.startswith(reason)


def test_every_third_size_of_a_table_is_held_out() -> None:
    """In ascending order of bytes, each table for itself; tables named as a whole are held out entirely."""
    rows = [row(bytes=size) for size in (4, 1, 3, 2)] + [row(bytes=5, n_gpus=4)]
    whole = [row(source="a100_dgx/all_reduce.csv", bytes=1)]

    assert split(rows + whole) == [False, False, True, False, False, True]


@pytest.mark.parametrize("content", ["[1, 2]", "{", '[{"op": "all_reduce"}]'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "comm.json"
    file.write_text(content)

    with pytest.raises(ClusterError, match=r"comm\.json"):
        collective_report(file)


@pytest.mark.skipif(not COMM.exists(), reason="the published timings are not on this machine")
def test_published_collectives_are_met() -> None:
    """From 1 MB on: below 8 % on average over held-out records, whole tables by other hands included."""
    report = collective_report(COMM)

    errors = [abs(timing.error) for timing in report.timings if timing.held_out and timing.nbytes >= 1e6]
    assert len(errors) > 100
    assert np.mean(errors) < 0.08
    assert np.median(errors) < 0.05
