"""Exported files under the frameworks' own parsers and classes; slow, and only where the frameworks are installed.

AUTOPAR_FRAMEWORKS_PYTHON names interpreters that have them, separated as paths are in PATH; this one by default.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cost import NEAREST, Stack
from autopar.degrees import Degrees
from autopar.plan import Plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PYTHONS = os.environ.get("AUTOPAR_FRAMEWORKS_PYTHON", sys.executable).split(os.pathsep)
MODULES = {
    "megatron": "megatron.training", "nemo": "megatron.bridge", "torchtitan": "torchtitan", "deepspeed": "deepspeed",
    "accelerate": "accelerate", "trainer": "accelerate", "maxtext": "maxtext",
}  # fmt: skip
"""What has to be installed for each target."""
SMALL = {"num_layers": 8, "hidden": 256, "heads": 8, "kv_heads": 8, "ffn": 512, "seq": 256, "vocab": 2048}
MIXTURE = {**SMALL, "experts": 8}


@cache
def python_with(module: str) -> str | None:
    """Return an interpreter that has a module, None if there is none."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    for python in PYTHONS:
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0:
            return python
    return None


def made_of(plan: Plan, to: str, folder: Path) -> dict[str, Any]:
    """Export a plan and return what the framework makes of the file; skip where it is not installed."""
    python = python_with(MODULES[to])
    if python is None:
        pytest.skip(f"no interpreter of AUTOPAR_FRAMEWORKS_PYTHON has {MODULES[to]}")
    exported = plan.export(to, cache_dir=folder / "cache")
    file = folder / exported.name
    file.write_bytes(exported.data)
    command = [python, "tests/real_frameworks.py", to, str(file), str(plan.job.gpus)]

    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def planned(
    folder: Path, model: str = "zoo:llama3-8b", dims: dict[str, int] | None = None, stack: str | Stack = NEAREST,
    **degrees: Any,
) -> Plan:  # fmt: skip
    """Return a plan by degrees; of a small model unless told otherwise."""
    stated = Degrees(**{"global_batch": 32, **degrees})
    sizes = SMALL if dims is None else dims
    return autopar.predict(model, stated, dims=sizes, stack=stack, cache_dir=folder / "cache").plan


@pytest.mark.parametrize(
    ("degrees", "layers"),
    [
        (
            {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True, "recompute": "full", "layers": (3, 5)},
            [3, 5],
        ),
        ({"dp": 2, "pp": 2, "interleave": 2, "recompute": "selective"}, [2, 2, 2, 2]),
        ({"dp": 4, "zero": 3}, [8]),
        ({"dp": 2, "cp": 2, "zero": 1}, [8]),
    ],
    ids=["uneven", "interleaved", "zero3", "context"],
)
def test_megatron_runs_the_plan(degrees: dict[str, Any], layers: list[int], tmp_path: Path) -> None:
    """Its parser and checks take the arguments; Megatron-Core builds these layers, and this part of the model."""
    plan = planned(tmp_path, **degrees)

    found = made_of(plan, "megatron", tmp_path)

    assert [found[name] for name in ("dp", "tp", "pp", "cp")] == [
        degrees.get(name, 1) for name in ("dp", "tp", "pp", "cp")
    ]
    assert found["layers"] == layers
    assert found["microbatches"] == plan.num_microbatches
    assert found["overlap"] == [True, bool(degrees.get("zero"))]
    assert found["distributed"] == bool(degrees.get("zero"))
    assert found["recompute"][0] == {"none": None}.get(degrees.get("recompute", "none"), degrees.get("recompute"))
    assert (found["parameters"] > 0) == (found["cp"] == 1)
    if found["tp"] == 2:  # half of the embedding, and of three layers with their norms
        assert found["parameters"] == 2048 * 256 // 2 + 3 * ((4 * 256 * 256 + 3 * 256 * 512) // 2 + 2 * 256)


def test_megatron_runs_experts(tmp_path: Path) -> None:
    """Dispatched by all-to-all, with as many places as the zoo's experts have, grouped."""
    plan = planned(tmp_path, "zoo:mixtral-8x7b", MIXTURE, dp=4, ep=2, tp=2, zero=1, sequence_parallel=True)

    found = made_of(plan, "megatron", tmp_path)

    assert (found["ep"], found["dispatcher"], found["capacity"]) == (2, "alltoall", 1.25)


@pytest.mark.parametrize("graphs", ["none", "partial", "full"])
def test_megatron_takes_what_the_stack_says(graphs: Any, tmp_path: Path) -> None:
    """CUDA graphs, unfused attention, and collectives of tensor parallelism in chunks."""
    stack = Stack("mine", attention="unfused", graphs=graphs, hides_tp=True)
    plan = planned(tmp_path, dp=2, tp=2, sequence_parallel=True, stack=stack)

    found = made_of(plan, "megatron", tmp_path)

    assert found["attention"] == "unfused"
    assert found["graphs"] == {"partial": "transformer_engine", "full": "full_iteration"}.get(graphs, graphs)


def test_torchtitan_loads_the_configuration(tmp_path: Path) -> None:
    """Its manager finds the function, its classes check the fields, its mesh has the devices; no layer is left out."""
    plan = planned(
        tmp_path, dims={}, dp=2, tp=2, pp=2, zero=3, sequence_parallel=True, recompute="full", layers=(15, 17)
    )  # fmt: skip

    found = made_of(plan, "torchtitan", tmp_path)

    assert (found["dp"], found["tp"], found["pp"], found["cp"]) == ([1, 2], 2, 2, 1)
    assert (found["layers"], found["missing"]) == ([15, 17], [])
    assert found["batch"] == [16, 32, 8192]
    assert found["recompute"] == "FullAC.Config"


def test_torchtitan_deals_out_experts(tmp_path: Path) -> None:
    plan = planned(tmp_path, "zoo:qwen3-30b-a3b", {}, dp=16, ep=8, zero=3, recompute="full", global_batch=64)

    found = made_of(plan, "torchtitan", tmp_path)

    assert (found["dp"], found["ep"]) == ([1, 16], 8)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_takes_the_configuration(zero: int, tmp_path: Path) -> None:
    """Its class knows the keys, and the batch is what it checks it to be."""
    plan = planned(tmp_path, dp=4, zero=zero, microbatch=2)

    found = made_of(plan, "deepspeed", tmp_path)

    assert found["zero"] == zero
    assert found["batch"] == [32, 2, 4]
    assert found["unknown"] == []
    if zero:
        assert found["overlap"] is True


def test_megatron_bridge_has_the_fields(tmp_path: Path) -> None:
    """Every field that a recipe sets is one of its classes."""
    plan = planned(tmp_path, dp=2, tp=2, pp=2, zero=1, sequence_parallel=True, recompute="full", layers=(3, 5))

    found = made_of(plan, "nemo", tmp_path)

    assert found["missing"] == []
    assert found["set"] > 30


@pytest.mark.parametrize(("zero", "shard"), [(3, 0), (3, 2), (2, 0)])
def test_accelerate_takes_the_configuration(zero: int, shard: int, tmp_path: Path) -> None:
    """Its launcher reads the file, its plugin and its mesh have what the plan says."""
    plan = planned(tmp_path, dp=4, zero=zero, shard=shard, recompute="full")

    found = made_of(plan, "accelerate", tmp_path)

    assert (found["version"], found["reshard"], found["recompute"]) == (2, zero == 3, True)
    assert found["sizes"] == [4 // (shard or 4), shard or 4, 1, 1]


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_training_arguments_take_the_fields(zero: int, tmp_path: Path) -> None:
    plan = planned(tmp_path, dp=4, zero=zero, recompute="full")

    found = made_of(plan, "trainer", tmp_path)

    assert found["batch"] == 32
    assert bool(found["fsdp"]) == bool(zero)


@pytest.mark.parametrize("degrees", [{"dp": 4, "zero": 3}, {"dp": 2, "tp": 2, "pp": 2}], ids=["fsdp", "pipeline"])
def test_maxtext_knows_the_keys(degrees: dict[str, Any], tmp_path: Path) -> None:
    """And takes the values as of the types of its configuration."""
    assert made_of(planned(tmp_path, **degrees), "maxtext", tmp_path)["wrong"] == {}
