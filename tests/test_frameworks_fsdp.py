"""Scripts for FSDP2: what their `fully_shard` calls say, and, slow, what they train."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.degrees import Degrees
from autopar.plan import Exported
from autopar.prediction import predict

DIMS = {"num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 24, "seq": 4, "vocab": 24}
KINDS: dict[str, dict[str, Any]] = {
    "all share": {"dp": 2, "zero": 3, "recompute": "full"},
    "groups share": {"dp": 4, "zero": 3, "shard": 2},
    "gathered once a step": {"dp": 2, "zero": 2},
    "copies": {"dp": 2},
    "copies with shares": {"dp": 2, "shares": ((1, 6), (1, 2))},
    "groups with shares": {"dp": 4, "zero": 3, "shard": 2, "shares": ((2, 3), (2, 1))},
}


def _script(kind: str, cache_dir: Path) -> Exported:
    degrees = Degrees(**KINDS[kind], global_batch=8)
    plan = predict("zoo:llama3-8b", degrees, dims=DIMS, precision="fsdp", cache_dir=cache_dir).plan
    return plan.export("fsdp", cache_dir=cache_dir)


@pytest.mark.parametrize(
    ("kind", "constants"),
    [
        ("all share", {"REPLICAS": 1, "SHARDS": 2, "RESHARD_AFTER_FORWARD": True, "RECOMPUTED": [0, 1]}),
        ("groups share", {"REPLICAS": 2, "SHARDS": 2, "GATHER_AGAIN": True, "RECOMPUTED": []}),
        ("gathered once a step", {"SHARDS": 2, "RESHARD_AFTER_FORWARD": False, "GATHER_AGAIN": False}),
        ("copies", {"REPLICAS": 2, "SHARDS": 1, "MICROBATCHES": 4, "SHARES": []}),
        ("copies with shares", {"REPLICAS": 2, "SHARDS": 1, "SHARES": [(1, 6), (1, 2)]}),
        ("groups with shares", {"REPLICAS": 2, "SHARDS": 2, "SHARES": [(2, 3), (2, 1)], "GATHER_AGAIN": True}),
    ],
)
def test_scripts_say_what_is_shared_and_gathered(kind: str, constants: dict[str, object], cache_dir: Path) -> None:
    """Layers are gathered one after the other, by the names of their modules."""
    exported = _script(kind, cache_dir)

    lines = dict(line.split("  #")[0].split(" = ", 1) for line in exported.text.splitlines() if " = " in line[:30])
    replicas, shards = (part.strip() for part in lines.pop("REPLICAS, SHARDS").split(","))
    found = {**lines, "REPLICAS": replicas, "SHARDS": shards}
    assert {name: found[name] for name in constants} == {name: str(value) for name, value in constants.items()}
    assert found["LAYERS"] == "['layers.0', 'layers.1']"
    compile(exported.text, exported.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scripts_train_like_the_module_alone(kind: str, cache_dir: Path, tmp_path: Path) -> None:
    """On gloo, in 32 bits: losses of three steps of several microbatches."""
    pytest.importorskip("torch")
    path = tmp_path / "fsdp.py"
    path.write_text(_script(kind, cache_dir).text)

    run = subprocess.run(
        [sys.executable, "-m", "tests.fsdp_torch", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
    )

    assert run.returncode == 0, run.stderr[-2000:]
    answer = json.loads(run.stdout.strip().splitlines()[-1])
    assert answer["found"] == pytest.approx(answer["expected"], rel=1e-4)
    assert (answer["sharded"] > 0) == ("zero" in KINDS[kind])
