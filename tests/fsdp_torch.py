"""Runs a small module under an exported FSDP2 script: `python tests/fsdp_torch.py SCRIPT`.

Prints the losses of three steps with the script, and of the module alone, as JSON. Starts a gloo process per device.
"""

import copy
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

WIDTH, SAMPLES, STEPS = 16, 2, 3


def _module(names: list[str]) -> Any:
    """Return a module with a product and an activation function under each name, and a head."""
    import torch

    class Chain(torch.nn.Module):  # type: ignore[misc]  # of an optional package
        def forward(self, data: Any) -> Any:
            for name in names:
                data = data + self.get_submodule(name)(data)
            return self.head(data)

    torch.manual_seed(0)
    root = Chain()
    root.head = torch.nn.Linear(WIDTH, 4)
    for name in names:
        *path, last = name.split(".")
        owner: Any = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.add_module(last, torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()))
    return root


def _train(script: dict[str, Any], module: Any, batches: list[Any], microbatches: int) -> list[float]:
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = torch.nn.functional.mse_loss
    return [script["step"](module, batches[at : at + microbatches], loss, optimizer) for at in _starts(microbatches)]


def _starts(microbatches: int) -> range:
    return range(0, STEPS * microbatches, microbatches)


def _rank(rank: int, count: int, port: int, path: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(Path(path).read_text(), path, "exec"), script)
    script["PRECISION"] = None  # numbers of 32 bits, so that losses can be compared
    microbatches = script["MICROBATCHES"]
    alone = _module(script["LAYERS"])
    wrapped = script["wrap"](copy.deepcopy(alone), script["mesh"]("cpu"))
    generator = torch.Generator().manual_seed(1)
    whole = [
        tuple(torch.randn(count * SAMPLES, width, generator=generator) for width in (WIDTH, 4))
        for _ in range(STEPS * microbatches)
    ]
    part = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
    own = _train(script, wrapped, [(data[part], target[part]) for data, target in whole], microbatches)
    losses = torch.tensor(own)
    dist.all_reduce(losses)
    script |= {"SHARDS": 1, "REPLICAS": 1}
    expected = _train(script, alone, whole, microbatches)
    if rank == 0:
        sharded = sum(type(own).__name__ == "DTensor" for own in wrapped.parameters())
        sys.stdout.write(
            json.dumps({"found": (losses / count).tolist(), "expected": expected, "sharded": sharded}) + "\n"
        )
    dist.destroy_process_group()


def main() -> None:
    """Start the processes of a script and wait for them."""
    import torch.multiprocessing as mp

    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(Path(sys.argv[1]).read_text(), sys.argv[1], "exec"), script)
    count = script["REPLICAS"] * script["SHARDS"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (count, port, sys.argv[1]), nprocs=count)


if __name__ == "__main__":
    main()
