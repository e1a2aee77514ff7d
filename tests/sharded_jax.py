"""Runs a small GPT under exported JAX shardings: `python tests/sharded_jax.py PLAN SHARDINGS.py`.

Prints the loss and how far its gradients are from those on one device, as JSON. Needs JAX; made to be run in a process
of its own, because the number of CPU devices is decided when JAX starts.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autopar.ir.graph import Graph
from autopar.plan import Plan
from autopar.workload import open_plan

DEVICES = 8


def forward(graph: Graph, given: Mapping[str, Any]) -> Any:
    """Return the logits, computed op by op in JAX."""
    import jax
    import jax.numpy as jnp

    values = dict(given) | {name: np.asarray(array) for name, array in graph.constants.items()}
    for op in graph.ops:
        args: list[Any] = [values[name] if name else None for name in op.inputs]
        match op.kind:
            case "Gather":
                result = jnp.take(args[0], args[1], axis=op.attr("axis", 0))
            case "Add":
                result = args[0] + args[1]
            case "Mul":
                result = args[0] * args[1]
            case "MatMul":
                result = args[0] @ args[1]
            case "Gelu":
                result = jax.nn.gelu(args[0], approximate=op.attr("approximate") == "tanh")
            case "Reshape":
                result = args[0].reshape(graph.values[op.outputs[0]].shape)
            case "Transpose":
                result = jnp.transpose(args[0], op.attr("perm"))
            case "LayerNormalization":
                mean = args[0].mean(-1, keepdims=True)
                spread = jnp.sqrt(((args[0] - mean) ** 2).mean(-1, keepdims=True) + op.attr("epsilon", 1e-5))
                result = (args[0] - mean) / spread * args[1] + args[2]
            case "Attention":
                q, k, v = args[:3]
                scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
                seq = q.shape[-2]
                masked = jnp.where(np.tril(np.ones((seq, seq), bool)), scores, -np.inf)
                result = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(masked, axis=-1), v)
            case _:
                raise NotImplementedError(op.kind)
        values[op.outputs[0]] = result
    return values[graph.outputs[0]]


def main(plan_file: str, script: str) -> None:
    """Run a plan and print what came out."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    import jax.numpy as jnp

    plan = Plan.load(plan_file)
    graph = open_plan(plan).forward(plan.microbatch)
    plan_says: dict[str, Any] = {"__name__": "shardings"}
    exec(compile(Path(script).read_text(), script, "exec"), plan_says)
    numbers = np.random.default_rng(0)
    weights = {value.name: numbers.normal(size=value.shape, scale=0.1).astype("f") for value in graph.parameters}
    (tokens_name,) = graph.inputs
    shape = graph.values[tokens_name].shape
    vocabulary = graph.values[graph.outputs[0]].shape[-1]
    tokens, labels = (numbers.integers(0, vocabulary, shape) for _ in range(2))

    def loss(parameters: Mapping[str, Any], data: Any) -> Any:
        logits = forward(graph, {**parameters, tokens_name: data})
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).mean()

    step = jax.jit(jax.value_and_grad(loss))
    alone, wanted = step(weights, tokens)
    placed = plan_says["shard"](weights)
    found, gradients = step(placed, jax.device_put(tokens, plan_says["sharding"](tokens_name)))
    shares = {
        name: float(np.prod(value.addressable_shards[0].data.shape) / value.size) for name, value in placed.items()
    }
    # Against the largest gradient of all: that of a key's bias is zero but for rounding.
    largest = max(float(jnp.abs(gradient).max()) for gradient in wanted.values())
    worst = max(float(jnp.abs(gradients[name] - wanted[name]).max()) for name in weights) / largest
    result = {"loss": float(found), "alone": float(alone), "gradients": worst, "shares": shares}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
