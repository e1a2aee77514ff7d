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
    counts = [script["microbatches"](other) for other in range(count)]

    def taken(other: int) -> list[Any]:
        """Return what a rank trains on: of each step the first microbatches, as many as its share has."""
        part = slice(other * SAMPLES, (other + 1) * SAMPLES)
        held = (pair for at in _starts(microbatches) for pair in whole[at : at + counts[other]])
        return [(data[part], target[part]) for data, target in held]

    own = _train(script, wrapped, taken(rank), counts[rank])
    losses = torch.tensor(own)
    dist.all_reduce(losses)
    each = [taken(other) for other in range(count)]
    steps = [
        pair
        for step in range(STEPS)
        for pairs, number in zip(each, counts, strict=True)
        for pair in pairs[step * number : (step + 1) * number]
    ]
    script |= {"SHARDS": 1, "REPLICAS": 1, "MICROBATCHES": sum(counts), "SHARES": []}
    expected = _train(script, alone, steps, sum(counts))
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
