"""What a measured figure of memory counts, whose it is, and the reserve of stacks that is fitted to such figures."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from autopar.cli import main
from autopar.cluster import load_cluster
from autopar.cost import Stack, load_stack
from autopar.cost.dropout import dropout_bytes
from autopar.errors import StackError
from autopar.ir.graph import Op, Phase
from autopar.validation.completion import complete
from autopar.validation.records import MemoryKind, MemoryRank, Row
from autopar.validation.report import memory_rows
from autopar.validation.reserve_fit import Held, fitted_reserve
from autopar.validation.run import Outcome, shown_bytes
from autopar.validation.stacks import stack_for

A100 = load_cluster("a100").device
MLPERF = "mlcommons/training_results_v5.0: NVIDIA/results/eos/llama31_405b"
TESTS = "NVIDIA/Megatron-LM HEAD d98e8a6 tests/functional_tests/test_cases/bert/a/golden_values.json"


def _row(**fields: Any) -> Row:
    return msgspec.convert({"id": "made-1", "memory_gb": 10.0, **fields}, Row)


@pytest.mark.parametrize(
    ("fields", "rank", "measured"),
    [
        ({}, "fullest", 10e9),
        ({"source": MLPERF, "memory_unit": "GB as printed by the source"}, "first", 10 * 2**30),
        ({"source": TESTS, "framework": "Megatron-Core CI functional test"}, "last", 10e9),
        ({"source": "pytorch/torchtitan benchmarks/llama3.md"}, "fullest", 10 * 2**30),
        ({"source": TESTS, "memory_unit": "GiB allocated peak (worst rank)"}, "fullest", 10 * 2**30),
    ],
)
def test_a_figure_is_of_the_rank_that_logs_it(fields: dict[str, Any], rank: MemoryRank, measured: float) -> None:
    """Rank 0 prints the lines of MLPerf, the last rank writes TensorBoard's; torchtitan's tables are in GiB."""
    row = _row(**fields)

    assert row.memory_rank == rank
    assert row.memory_bytes == measured


def test_functional_tests_of_megatron_run_as_their_configurations_say() -> None:
    """Unfused attention, dropout by default; two layers per interleaved stage, as a note says, are three stages."""
    row, _ = complete(
        _row(source=TESTS, model="bert_mcore_tp1_pp4_vp2", layers=24, pp=4, notes="deterministic; vpp layers/stage=2")
    )

    assert (row.vpp, row.attention, row.dropout) == (3, "unfused", "layers")


@pytest.mark.parametrize(("kind", "shown"), [("allocated", 50.0), ("reserved", 60.0), ("device", 62.5)])
def test_stacks_have_a_reserve_of_their_own(kind: MemoryKind, shown: float) -> None:
    """Of 50 GB with gaps of 20 % and 2.5 GB outside of the allocator."""
    stack = Stack("own", gaps=0.2, outside=2.5e9)

    assert shown_bytes(kind, 50e9, A100, stack) == pytest.approx(shown * 1e9)


def test_memory_that_is_planned_ahead_has_no_gaps() -> None:
    """OneFlow lays out the memory of a step when it compiles it."""
    assert stack_for("OneFlow 0.4", "V100-SXM2-16GB").gaps == 0


@pytest.mark.parametrize("field", [{"gaps": 0.5}, {"gaps": -0.1}, {"outside": 7e9}, {"dropout": "some"}])
def test_a_reserve_stays_within_its_bounds(field: dict[str, Any]) -> None:
    """A fit cannot buy accuracy with numbers that no machine has."""
    with pytest.raises(StackError, match=next(iter(field))):
        Stack("odd", **field)


def test_a_reserve_is_found_again() -> None:
    """Rows that were made with 15 % and 3 GB; one that is wrong by half does not move it."""
    truth = Stack("truth", gaps=0.15, outside=3e9)
    sizes = (20e9, 30e9, 40e9, 55e9)
    rows = [Held("device", size, shown_bytes("device", size, A100, truth), A100) for size in sizes]
    rows.append(Held("device", 25e9, 60e9, A100))

    found = fitted_reserve(rows, Stack("start"))

    assert found.gaps == pytest.approx(0.15)
    assert found.outside == pytest.approx(3e9)


def test_two_of_three_rows_are_at_most_as_full_as_predicted() -> None:
    """An error that is too low counts twice: of six rows the fit goes between the fourth and the fifth."""
    rows = [Held("reserved", 30e9, 30e9 * (1 + gaps), A100) for gaps in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)]

    found = fitted_reserve(rows, Stack("start"))

    assert 0.2 <= found.gaps <= 0.25
    assert found.outside == Stack("start").outside


def test_dropout_before_adapters_keeps_a_mask_and_a_copy() -> None:
    """Of x [2, 4] in 2 bytes: 8 masks of a byte, and what dropout left of x for the gradient of A."""
    shapes = [np.array([[2, 4]]), np.array([[4, 16]])]
    op = Op("q.lora.0", "MatMul", ("x", "q.lora_A.weight"), ("h",))

    found = dropout_bytes(op, shapes, {"x": 2.0}, "adapters")

    assert found is not None
    assert found == pytest.approx([8 * (1 + 2)])
    assert dropout_bytes(op, shapes, {"x": 2.0}, "layers") is None


def test_dropout_of_layers_is_where_they_add_to_their_input() -> None:
    """A byte per element of a sum; the bias of a product and sums of gradients have no dropout."""
    wide, bias = np.array([[2, 4, 8]]), np.array([[8]])
    op = Op("sum", "Add", ("x", "y"), ("z",))
    gradient = Op("sum.grad", "Add", ("x", "y"), ("z",), phase=Phase.BACKWARD)

    assert dropout_bytes(op, [wide, wide], {}, "layers") == pytest.approx([64])
    assert dropout_bytes(op, [wide, bias], {}, "layers") is None
    assert dropout_bytes(gradient, [wide, wide], {}, "layers") is None
    assert dropout_bytes(op, [wide, wide], {}, "scores") is None


def test_rows_held_out_have_a_line_of_their_own() -> None:
    """After those of all; which they are is decided by what was run."""
    rows = [_row(seq=1024 * number) for number in range(1, 9)]
    outcomes = [Outcome(row, "", 1.0, 1.0, shown_bytes=11e9) for row in rows]

    lines = {line[0]: line[1:] for line in memory_rows(outcomes)}

    held_out = sum(not row.calibrates for row in rows)
    assert 0 < held_out < 8
    assert lines["all"] == ("8", "10.0", "10.0", "0 %", "+10.0")
    assert lines["held out"][0] == str(held_out)


def test_the_command_writes_the_reserve_and_leaves_the_scalars(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of one plan that were all measured at the same: the reserve makes up for what is missing."""
    row = {
        "framework": "torchtitan compile", "arch": "gpt", "layers": 2, "hidden": 256, "heads": 4, "vocab": 512,
        "gpu": "H100-SXM-80GB", "n_gpus": 1, "tp": 1, "pp": 1, "dp": 1, "micro_batch": 1, "zero": 0,
        "recompute": "none", "precision": "bf16", "step_time_s": 1.0, "memory_gb": 1e3, "memory_unit": "GB",
    }  # fmt: skip
    rows = [{"id": f"made-{seq}", **row, "seq": seq, "global_batch": 1} for seq in (128, 256, 384, 512)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    written = tmp_path / "own.yaml"

    where = ["-o", str(written), "--cache-dir", str(cache_dir)]
    code = main(["calibrate", str(tmp_path), "--stack", "fsdp-compile-h100", "--memory", *where])

    assert code == 0
    assert "gaps" in capsys.readouterr().out
    found, bundled = load_stack(written), load_stack("fsdp-compile-h100")
    assert found.gaps == 0.4  # as much as a stack may have
    assert found.scalars == bundled.scalars
