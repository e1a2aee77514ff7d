"""Exported shardings under the frameworks themselves; slow, and only where they are installed."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cluster import load_cluster
from autopar.degrees import Degrees

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
GPT = {"num_layers": 2, "hidden": 128, "heads": 4, "seq": 64, "vocab": 512}


# Compute is dear on it, so that plans share as much of it as they may.
CPU = replace(load_cluster(ROOT / "docs" / "benchmarks" / "cpu2.yaml"), devices_per_node=8)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1024,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


def run(program: str, target: str, model: str, dims: dict[str, int], degrees: Degrees, folder: Path) -> dict[str, Any]:
    """Plan, export, run; return what the run printed."""
    plan = autopar.predict(model, degrees, dims=dims, cluster=CPU, cache_dir=folder / "cache").plan
    plan.save(folder / "plan.json")
    (folder / "script.py").write_bytes(plan.export(target, cache_dir=folder / "cache").data)
    command = [sys.executable, f"tests/{program}.py", str(folder / "plan.json"), str(folder / "script.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)

    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], name: str, share: float) -> None:
    """Same loss, same gradients, and of a matrix a device holds the share that the degrees say.

    Sums in float32 are added in another order: 1e-5 of the loss, 1e-4 of the largest gradient.
    """
    assert found["loss"] == pytest.approx(found["alone"], rel=1e-5)
    assert found["gradients"] < 1e-4
    assert found["shares"][name] == share


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
@pytest.mark.parametrize(
    ("degrees", "share"),
    [
        (Degrees(dp=2, tp=4, global_batch=8, microbatch=2), 0.25),
        (Degrees(dp=8, zero=3, global_batch=16, microbatch=2), 0.125),
    ],
    ids=["dp2-tp4", "zero3"],
)
def test_jax_gives_the_same_loss(degrees: Degrees, share: float, tmp_path: Path) -> None:
    """A GPT on 8 host devices, sharded as the plan says."""
    check(run("sharded_jax", "jax", "zoo:gpt2", GPT, degrees, tmp_path), "layers.1.mlp.up.weight", share)


SHARES = [
    (Degrees(dp=2, tp=2, global_batch=16, microbatch=4), 0.5),
    (Degrees(dp=4, zero=3, global_batch=16, microbatch=4), 0.25),
]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize(("degrees", "share"), SHARES, ids=["dp2-tp2", "zero3"])
def test_dtensor_gives_the_same_loss(degrees: Degrees, share: float, tmp_path: Path) -> None:
    """An MLP on 4 gloo processes, its parameters DTensors as the plan says."""
    check(run("sharded_torch", "pytorch", "zoo:mlp-xs", {}, degrees, tmp_path), "layers.0.weight", share)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs torch and transformers")
@pytest.mark.parametrize(
    ("degrees", "share", "vocab"),
    [(*SHARES[0], 512), (*SHARES[1], 512), (*SHARES[0], 509)],
    ids=["dp2-tp2", "zero3", "uneven"],
)
def test_a_hugging_face_model_gives_the_same_loss(degrees: Degrees, share: float, vocab: int, tmp_path: Path) -> None:
    """From its configuration to a plan, and from the plan to transformers' own module on 4 gloo processes.

    A vocabulary of 509 tokens lies in blocks of 255 and 254.
    """
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": vocab}))

    found = run("sharded_torch", "pytorch", f"hf:{tmp_path}", {}, degrees, tmp_path)

    check(found, "model.layers.1.mlp.up_proj.weight", share)
    assert degrees.tp == 1 or found["shares"]["lm_head.weight"] == -(-vocab // 2) / vocab
