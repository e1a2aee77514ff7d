"""Ranks as real processes over gloo. Slow: every run starts interpreters that import torch."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.configuration import Configuration
from autopar.context_parallelism import CONTEXT_KINDS, ContextKind
from autopar.degrees import Degrees
from autopar.prediction import predict
from autopar.ranks.launch import run_plan
from autopar.ranks.records import RunRequest
from autopar.recompute import Recompute
from autopar.sharding import Mesh
from tests.executions import TINY, interleave
from tests.rank_runs import SAMPLES, tiny_plan, tiny_rules, tiny_workload
from tests.variants import random_plan_of_variants

pytest.importorskip("torch", reason="processes talk over PyTorch: pip install autopar[run]")
pytestmark = pytest.mark.slow

TWO, FOUR = Mesh.of(inner=2), Mesh.of(outer=2, inner=2)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for rules that all models share."""
    return tmp_path_factory.mktemp("rules")


NONE, SELECTIVE, FULL, OFFLOAD = Recompute


@pytest.mark.parametrize(
    ("name", "configuration", "recipe", "recompute"),
    [
        ("gpt2", Configuration(1, TWO, 2, "1f1b"), "data", NONE),
        ("gpt2", Configuration(1, TWO, 2, "1f1b"), "megatron", NONE),
        ("gpt2", Configuration(2, Mesh.of(inner=1), 4, "1f1b"), "", SELECTIVE),
        ("llama3-8b", Configuration(1, FOUR, 2, "1f1b"), "data+zero-1 × megatron+sequence", NONE),
        ("gpt2", Configuration(2, TWO, 3, "gpipe"), "data+zero-1", FULL),
        ("gpt2", Configuration(2, TWO, 3, "zb-h1"), "data+zero-1", FULL),
        ("gpt2", Configuration(2, TWO, 3, "1f1b"), "data+zero-1", OFFLOAD),
        ("llama3-8b", Configuration(4, Mesh.of(inner=1), 6, "zb-h1"), "", NONE),
        ("gpt2", Configuration(2, Mesh.of(inner=1), 4, "zb-h2"), "", NONE),
        ("mixtral-8x7b", Configuration(1, FOUR, 2, "1f1b"), "", NONE),
        ("vit-b16", Configuration(2, TWO, 2, "1f1b"), "", NONE),
    ],
)
def test_processes_train_like_the_model(
    name: str, configuration: Configuration, recipe: str, recompute: Recompute, cache_dir: Path, tmp_path: Path
) -> None:
    """Data, tensor and pipeline parallelism, ZeRO, recompute and random placements, on 2 and 4 ranks."""
    plan = tiny_plan(name, configuration, cache_dir, recipe=recipe, recompute=recompute, seed=5)
    plan.save(tmp_path / "plan.json")

    report = run_plan(RunRequest(str(tmp_path / "plan.json"), plan.job.gpus))

    assert report.passed, report.compared
    assert report.measured_seconds > 0


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_context_parallel_processes_train_like_the_model(kind: ContextKind, cache_dir: Path, tmp_path: Path) -> None:
    """Keys and values go round, are gathered, or positions are exchanged for heads, on 4 ranks."""
    degrees = Degrees(dp=2, cp=2, cp_kind=kind, zero=1, microbatch=2, global_batch=8)
    predict("zoo:llama3-8b", degrees, dims=TINY["llama3-8b"], cache_dir=cache_dir).plan.save(tmp_path / "plan.json")

    report = run_plan(RunRequest(str(tmp_path / "plan.json"), 4))

    assert report.passed, report.compared


@pytest.mark.parametrize(("schedule", "devices"), [("interleaved", 1), ("zb-v", 1), ("zb-v", 2)])
def test_groups_of_several_stages_train_like_the_model(
    schedule: str, devices: int, cache_dir: Path, tmp_path: Path
) -> None:
    """Two groups of one or two devices, two stages each."""
    plan = interleave(tiny_plan("mlp-xs", Configuration(4, Mesh.of(inner=devices), 4, "1f1b"), cache_dir), 2, schedule)
    plan.save(tmp_path / "plan.json")

    assert run_plan(RunRequest(str(tmp_path / "plan.json"), 2 * devices)).passed


@pytest.mark.parametrize(
    ("name", "meshes", "schedule"),
    [
        ("gpt2", (Mesh.of(inner=1), TWO), "1f1b"),
        ("gpt2", (FOUR, TWO), "zb-h1"),
        ("llama3-8b", (TWO, TWO), "gpipe"),
        ("mlp-xs", (Mesh.of(inner=1), TWO), "zb-v"),
    ],
)
def test_stages_of_other_meshes_train_like_the_model(
    name: str, meshes: tuple[Mesh, ...], schedule: str, cache_dir: Path, tmp_path: Path
) -> None:
    """Unequal stages, and equal ones with other placements: values cross in pieces."""
    workload = tiny_workload(name)
    plan = random_plan_of_variants(
        workload.folded(SAMPLES), tiny_rules(name, cache_dir), meshes, schedule, 4, SAMPLES, 3
    )
    replace(plan, model=workload.info()).save(tmp_path / "plan.json")

    report = run_plan(RunRequest(str(tmp_path / "plan.json"), plan.job.gpus))

    assert report.passed, report.compared


def test_torchrun_starts_ranks_too(cache_dir: Path, tmp_path: Path) -> None:
    tiny_plan("mlp-xs", Configuration(1, TWO, 2, "1f1b"), cache_dir, recipe="data").save(tmp_path / "plan.json")

    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autopar", "run", "plan.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal within tolerance") == 1


@pytest.mark.parametrize(
    ("number", "victim", "code", "message"),
    [(signal.SIGKILL, "rank", 5, "was killed by SIGKILL"), (signal.SIGINT, "parent", 130, "interrupted")],
)
def test_a_run_that_is_broken_off_ends_within_seconds(
    number: signal.Signals, victim: str, code: int, message: str, cache_dir: Path, tmp_path: Path
) -> None:
    """A killed rank, or Ctrl-C: one message, and no process is left."""
    tiny_plan("mlp-xs", Configuration(1, TWO, 2, "1f1b"), cache_dir, recipe="data").save(tmp_path / "plan.json")
    command = [
        sys.executable,
        "-m",
        "autopar",
        "run",
        str(tmp_path / "plan.json"),
        "--ranks",
        "2",
        "--steps",
        "1000000",
    ]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert parent.stderr is not None
    for line in parent.stderr:
        if "step" in line:
            break
    children = _children(parent.pid)

    os.kill(children[1] if victim == "rank" else parent.pid, number)
    start = time.monotonic()
    rest = parent.stderr.read()
    parent.stderr.close()

    assert parent.wait(timeout=30) == code
    assert time.monotonic() - start < 10
    assert message in rest
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
