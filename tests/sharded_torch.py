"""Runs a small MLP under exported DTensor placements: `python tests/sharded_torch.py PLAN PLACEMENTS.py`.

Prints the loss and how far its gradients are from those of the module alone, as JSON. Starts a gloo process per device.
"""

import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autopar.ir.graph import Graph
from autopar.plan import Plan
from autopar.workload import open_plan


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


def work(rank: int, plan_file: str, script: str, port: int, output: str) -> None:
    """Be one process."""
    import torch
    import torch.distributed
    from torch.distributed.tensor import DTensor

    plan = Plan.load(plan_file)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=plan.job.gpus)
    graph = open_plan(plan).forward(plan.microbatch)
    plan_says: dict[str, Any] = {"__name__": "placements"}
    exec(compile(Path(script).read_text(), script, "exec"), plan_says)
    numbers = np.random.default_rng(0)
    weights = {value.name: numbers.normal(size=value.shape, scale=0.05).astype("f") for value in graph.parameters}
    data = torch.tensor(numbers.normal(size=graph.values[graph.inputs[0]].shape).astype("f"))

    alone = module_of(graph, weights)
    expected = (forward(graph, alone, data) ** 2).mean()
    expected.backward()

    device_mesh = plan_says["mesh"]("cpu")
    module = plan_says["distribute"](module_of(graph, weights), device_mesh)
    given = plan_says["distribute_input"](graph.inputs[0], data, device_mesh)
    loss = (forward(graph, module, given) ** 2).mean().full_tensor()
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
