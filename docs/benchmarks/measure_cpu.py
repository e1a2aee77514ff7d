"""Measure this machine as a cluster of CPU cores and print the cluster file `autopar solve --cluster` takes.

    python docs/benchmarks/measure_cpu.py > cpu2.yaml

Two processes work at the same time, one thread each, as the two ranks of a run do. Needs torch and onnxruntime.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from usage import show_usage

SIZE = 1024
"""Rows and columns of the matrices multiplied."""
ELEMENTS = 1 << 24
"""Elements of the arrays added: far more than caches hold."""
TEMPLATE = """\
name: cpu2
devices_per_node: 2
device:
  name: CPU core
  peaks: {{half: {peak:.3g} GFLOP/s, single: {peak:.3g} GFLOP/s}}
  memory: 8 GB
  memory_bandwidth: {memory:.3g} GB/s
  launch: {launch:.3g} us
  gemm_efficiency: 1.0
  attention_efficiency: 0.5
  bandwidth_efficiency: 1.0
intra:
  tier: gloo over loopback
  bandwidth: {link:.3g} GB/s
  latency: {latency:.3g} us
inter:
  tier: gloo over loopback
  bandwidth: {link:.3g} GB/s
  latency: {latency:.3g} us
"""


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def session(kind: str, shape: tuple[int, ...], count: int) -> Callable[[], Any]:
    """Return what runs a chain of equal ops in ONNX Runtime on one thread."""
    import onnxruntime
    from onnx import TensorProto, helper

    nodes = [helper.make_node(kind, [f"x{i}", "w"], [f"x{i + 1}"]) for i in range(count)]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x0", "w", f"x{count}")]
    graph = helper.make_graph(nodes, "chain", ports[:2], ports[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    run = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run
    feeds = {name: np.full(shape, 1e-3, np.float32) for name in ("x0", "w")}
    return lambda: run(None, feeds)


def measure(rank: int, store: str) -> dict[str, float]:
    """Return the figures of the template, measured by one of two processes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )
    product = seconds(session("MatMul", (SIZE, SIZE), 1), 51)
    dist.barrier()
    addition = seconds(session("Add", (ELEMENTS,), 1), 21)
    dist.barrier()
    small = seconds(session("Add", (8,), 200), 30) / 200
    dist.barrier()
    times = {}
    for count in (1, ELEMENTS):
        tensor = torch.zeros(count)
        times[count] = seconds(lambda tensor=tensor: dist.all_reduce(tensor), 500 if count == 1 else 21)  # type: ignore[misc]
    dist.destroy_process_group()
    return {
        "peak": 2 * SIZE**3 / product / 1e9,
        "memory": 3 * 4 * ELEMENTS / addition / 1e9,
        "launch": small * 1e6,
        # an all-reduce over 2 devices moves each byte once in each direction
        "link": 4 * ELEMENTS / times[ELEMENTS] / 1e9,
        "latency": times[1] * 1e6,
    }


def main() -> None:
    """Print the cluster file."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        child = os.fork()
        if child == 0:
            measure(1, store)
            os._exit(0)
        figures = measure(0, store)
        os.waitpid(child, 0)
    sys.stdout.write(TEMPLATE.format(**figures))


if __name__ == "__main__":
    show_usage(__doc__)
    main()
