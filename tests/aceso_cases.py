"""Small profile databases in Aceso's form, and the best plan on them by trying all of them."""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path

from autopar.aceso import CostModel, Database, Stage

OPS = (
    "encoder-embedding", "enc-1st-layernorm", "enc-attention-qkv", "enc-attention-dropout", "enc-post-MLP-dropout",
    "final-layernorm", "gpt-post-process",
)  # fmt: skip
HEADER = "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,fwd_reserved,bwd_reserved"
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


def write_database(
    folder: Path, seed: int, *, microbatches: Sequence[int] = (1, 2), degrees: Sequence[int] = (1, 2)
) -> Path:
    """Write the database of a GPT of four ops per layer, with numbers that are drawn, and return its folder."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [
        (draw.randint(100, 900), draw.randint(100, 900), draw.randint(1, 40), draw.randint(2, 60), draw.randint(0, 9))
        for _ in OPS
    ]
    for samples, degree in product(microbatches, degrees):
        rows = [HEADER]
        for op, (forward, backward, weights, kept, reserved) in zip(OPS, drawn, strict=True):
            pace = samples / degree + 0.1
            sizes = samples * 8, 0 if op == OPS[-1] else samples * 8, weights / degree, samples * kept / degree
            numbers = forward * pace, backward * pace, *sizes, reserved, 2 * reserved
            rows.append(",".join([op, *(f"{number:.3f}" for number in numbers)]))
        (folder / f"gpt_1_3B_mbs{samples}_tp{degree}_algo0.csv").write_text("\n".join(rows) + "\n")
    for kind, devices in product(COLLECTIVES, degrees[1:]):
        name = f"prim_gpt_1_3B_{kind}_{devices}gpus.csv"
        (folder / name).write_text("data_size(MB),time(ms)\n" + "".join(f"{2**k},{2**k * 0.1}\n" for k in range(8)))
    for where, pace in (("intra", 10), ("inter", 1)):
        (folder / f"p2p_{where}_node.csv").write_text(
            f"1,2,4,8,16\n{pace},{2 * pace},{3 * pace},{4 * pace},{5 * pace}\n"
        )
    return folder


def open_model(folder: Path, *, devices: int, node: int, layers: int = 2, global_batch: int = 8) -> CostModel:
    """Return the cost model of the GPT of a database that `write_database` wrote."""
    return CostModel.of(
        Database.open(folder), "gpt-1.3b", devices=devices, node=node, global_batch=global_batch, layers=layers
    )


def least_seconds(model: CostModel, limit: float) -> float:
    """Return the seconds of the fastest plan, by trying all cuts, degrees and choices of ops that run again."""
    found = float("inf")
    for microbatch in model.microbatches():
        num = model.global_batch // microbatch
        for sizes in _splits(model.devices, model.node):
            for cut in _cuts(len(model.names), len(sizes)):
                seconds, before = [], 0
                for index, (size, (first, end)) in enumerate(zip(sizes, cut, strict=True)):
                    behind = len(sizes) - 1 - index
                    seconds.append(_least_stage(model, microbatch, first, end, size, before, behind, limit))
                    before += size
                found = min(found, max(seconds) * (num - 1) + sum(seconds))
    return found


def _splits(devices: int, node: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, devices + 1):
        for sizes in product((1, 2, 4, 8), repeat=count):
            borders = [0, *accumulate(sizes)]
            inside = all(start % node + size <= node for start, size in zip(borders, sizes, strict=False))
            if borders[-1] == devices and inside:
                yield sizes


def _cuts(ops: int, stages: int, first: int = 0) -> Iterator[tuple[tuple[int, int], ...]]:
    if stages == 1:
        yield ((first, ops),)
        return
    for end in range(first + 1, ops - stages + 2):
        for rest in _cuts(ops, stages - 1, end):
            yield (first, end), *rest


_KNOWN: dict[object, float] = {}


def _least_stage(
    model: CostModel, microbatch: int, first: int, end: int, size: int, before: int, behind: int, limit: float
) -> float:
    key = id(model), microbatch, first, end, size, model.crossings(before, size), behind, limit
    if key not in _KNOWN:
        found = float("inf")
        for tensor, data in model.degrees(size, microbatch):
            for again in _choices(model, first, end):
                stage = Stage(first, end - first, tensor, data, again)
                if model.stage_bytes(stage, microbatch, behind) <= limit:
                    found = min(found, model.stage_seconds(stage, microbatch, before))
        _KNOWN[key] = found
    return _KNOWN[key]


def _choices(model: CostModel, first: int, end: int) -> Iterator[tuple[bool, ...]]:
    for again in product((False, True), repeat=end - first):
        starts = [k for k, flag in enumerate(again) if flag and not (k and again[k - 1])]
        if all(model.may_start_run[first + k] for k in starts):
            yield again
