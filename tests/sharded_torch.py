"""Runs a small model under exported DTensor placements: `python tests/sharded_torch.py PLAN PLACEMENTS.py`.

The model is an MLP of the zoo, or a language model of a local Hugging Face configuration.

Prints the loss and how far its gradients are from those of the module alone, as JSON. Starts a gloo process per device.
"""

import copy
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autopar.ir.graph import Graph
from autopar.plan import Plan
from autopar.workload import HUGGING_FACE, open_plan


def module_of(graph: Graph, weights: Mapping[str, Any]) -> Any:
    """Return a module whose parameters have the names of the graph's."""
    import torch

    root = torch.nn.Module()
    for name, array in weights.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, torch.nn.Parameter(torch.tensor(array)))
    return root


def forward(graph: Graph, module: Any, data: Any) -> Any:
    """Return the output, computed op by op in PyTorch."""
    import torch

    values: dict[str, Any] = {**dict(module.named_parameters()), graph.inputs[0]: data}
    for op in graph.ops:
        args: list[Any] = [values.get(name) for name in op.inputs]
        match op.kind:
            case "MatMul":
                result = args[0] @ args[1]
            case "Add":
                result = args[0] + args[1]
            case "Relu":
                result = torch.relu(args[0])
            case _:
                raise NotImplementedError(op.kind)
        values[op.outputs[0]] = result
    return values[graph.outputs[0]]


def mlp(plan: Plan) -> tuple[Any, str, Any, Callable[[Any, Any], Any]]:
    """Return a module of the zoo, the name of its input, data, and what gives the loss."""
    import torch

    graph = open_plan(plan).forward(plan.microbatch)
    numbers = np.random.default_rng(0)
    weights = {value.name: numbers.normal(size=value.shape, scale=0.05).astype("f") for value in graph.parameters}
    data = torch.tensor(numbers.normal(size=graph.values[graph.inputs[0]].shape).astype("f"))
    return (
        module_of(graph, weights),
        graph.inputs[0],
        data,
        lambda module, x: whole(forward(graph, module, x) ** 2).mean(),
    )


def language_model(plan: Plan) -> tuple[Any, str, Any, Callable[[Any, Any], Any]]:
    """Return a transformer as its users make it, the name of its input, data, and what gives the loss."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(plan.model.source.removeprefix(HUGGING_FACE))
    config.use_cache, config._attn_implementation = False, "eager"
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(0, config.vocab_size, (plan.microbatch, config.max_position_embeddings))
    labels = torch.roll(tokens, -1, dims=1).flatten()

    def loss(model: Any, x: Any) -> Any:
        logits = whole(model(input_ids=x).logits)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)

    return module, "input_ids", tokens, loss


def whole(tensor: Any) -> Any:
    """Return a tensor that may be distributed as one that is not."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def work(rank: int, plan_file: str, script: str, port: int, output: str) -> None:
    """Be one process."""
    import torch
    import torch.distributed
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import implicit_replication

    plan = Plan.load(plan_file)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=plan.job.gpus)
    plan_says: dict[str, Any] = {"__name__": "placements"}
    exec(compile(Path(script).read_text(), script, "exec"), plan_says)
    is_language = plan.model.source.startswith(HUGGING_FACE)
    alone, name, data, loss_of = (language_model if is_language else mlp)(plan)
    module = copy.deepcopy(alone)
    expected = loss_of(alone, data)
    expected.backward()

    device_mesh = plan_says["mesh"]("cpu")
    plan_says["distribute"](module, device_mesh)
    with implicit_replication():  # tables of the module, which are no parameters, are the same everywhere
        loss = loss_of(module, plan_says["distribute_input"](name, data, device_mesh))
        loss.backward()

    worst, shares = 0.0, {}
    for (name, parameter), reference in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        shares[name] = parameter.to_local().numel() / parameter.numel()
        difference = (parameter.grad.full_tensor() - reference.grad).abs().max() / reference.grad.abs().max()
        worst = max(worst, float(difference))
    if rank == 0:
        result = {"loss": loss.item(), "alone": expected.item(), "gradients": worst, "shares": shares}
        Path(output).write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def main(plan_file: str, script: str) -> None:
    """Start the processes and print what came out."""
    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile() as output:
        args = (plan_file, script, port, output.name)
        torch.multiprocessing.spawn(work, args=args, nprocs=Plan.load(plan_file).job.gpus)
        sys.stdout.write(Path(output.name).read_text())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
