"""Shared experts beside the rows of routed experts that travel: which ops they are, what hides, what bounds it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.bounds.pass_rows import _BACKWARD_SHARED, _FORWARD_SHARED, _FORWARD_SLOTS, PassRows
from autopar.cost import Overlap, Stack
from autopar.cost.overlap import Rows
from autopar.degrees import Degrees
from autopar.errors import ExportError
from autopar.folding.fold import Folded
from autopar.folding.shared_experts import shared_expert_ops
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Slot
from autopar.frameworks.configurations import parse_configuration
from autopar.ir.routing import Routed, Routing
from autopar.program.records import Collective, Compute, Segment, SegmentPhase
from autopar.program.text import format_program, parse_program
from autopar.sharding import Mesh, Shard
from autopar.simulate.layout import lay_out
from autopar.workload import open_workload
from tests.programs import ExactCosts, two_block_step, value, work

BESIDE = Stack("beside", overlaps_shared=True)
EP = Mesh.of(ep=2).axes[0]
SIZES = {
    "num_layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "head": 8, "seq": 8, "vocab": 32, "experts": 4,
    "top_k": 2, "expert_ffn": 16, "dense_layers": 1,
}  # fmt: skip


def _folded(model: str, sizes: dict[str, int]) -> Folded:
    return open_workload(f"zoo:{model}", dims=sizes).folded(2)


# Which ops.


def test_ops_of_shared_experts_are_found_by_what_they_wait_for() -> None:
    """Three projections and what lies between them, forward and backward; no other MLP, router or expert."""
    found = shared_expert_ops(_folded("glm-4.5-air", SIZES))

    assert {name.split(".shared.")[1].split(".")[0] for name in found} == {"gate", "up", "down", "swish", "gated"}
    assert all(".moe.shared." in name for name in found)
    assert {name for name in found if ".vjp." in name}


def test_layers_without_shared_experts_have_none() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "dense_layers"}

    assert not shared_expert_ops(_folded("qwen3-30b-a3b", sizes))
    assert not shared_expert_ops(_folded("llama3-8b", {"num_layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2}))


# What hides.


@pytest.mark.parametrize(
    ("rows", "stack", "added"),
    [
        (4.0, Stack("waits"), 4.0),
        (4.0, BESIDE, 4.0 * 0.17),
        (20.0, BESIDE, 20.0 - 10.0 * 0.83),
        (4.0, replace(BESIDE, scalars=(("exposed_share", 0.5),)), 4.0 - 2.0 * 0.83),
    ],
)
def test_rows_travel_beside_shared_experts(rows: float, stack: Stack, added: float) -> None:
    """Beside a shared expert of 10 s, which transfers hold 17 % of; other kernels of 30 s hide nothing of them."""
    x, sent, moved, y = value("x"), value("rows"), value("rows.there"), value("y")
    there = Routed(Routing(4, 2))
    move = Collective("all_to_all", EP, Shard(1), Shard(0), sent, moved, rows, routed=there)  # type: ignore[arg-type]
    own = replace(work((x,), (y,), 10.0), shared=True)
    segment = Segment(0, SegmentPhase.FORWARD, (x,), (), (work((x,), (sent,), 30.0), move, own), outputs=(y, moved))

    layout = lay_out(segment, ExactCosts(stack=stack))

    assert layout.seconds == pytest.approx(40.0 + added)
    assert layout.link_seconds == rows


def test_nothing_is_left_for_shared_experts_where_a_schedule_hides_the_dispatch() -> None:
    """Transfers of rows are hidden once: behind the other microbatch, and not behind shared experts besides."""
    assert BESIDE.covers_rows
    assert not BESIDE.overlapped().covers_rows


def test_weight_gradients_of_shared_experts_cover_rows_or_other_collectives() -> None:
    """A shared expert of 6 s and 4 s for its weights: rows of 8 s leave 2 s of these to a collective of 5 s."""
    rows = Rows(np.array(8.0), np.array(10.0), np.array(4.0))
    nothing = np.array(0.0)

    whole, _, _, travelling = Overlap(shared=True).added(
        np.array(30.0), np.array(4.0), np.array(5.0), nothing, nothing, rows=rows
    )

    assert whole == pytest.approx(5.0 - 0.9 * 2.0)
    assert travelling == pytest.approx(8.0 * 0.17)


def test_programs_say_which_ops_are_of_shared_experts() -> None:
    """And are read back so."""
    program = two_block_step(Mesh.of(dp=2, tp=8))
    segments = [
        replace(
            segment,
            instructions=tuple(
                replace(own, shared=True) if isinstance(own, Compute) else own for own in segment.instructions
            ),
        )
        for segment in program.segments
    ]
    shared = replace(program, segments=tuple(segments))

    assert parse_program(format_program(shared)) == shared != program


# What bounds it.

_SECONDS = st.floats(0, 50)


@given(
    seconds=st.fixed_dictionaries({
        slot: _SECONDS
        for slot in (
            Slot.FORWARD, Slot.FORWARD_SHARED, Slot.FORWARD_WAIT, Slot.FORWARD_CHUNKED, Slot.FORWARD_GATHER,
            Slot.FORWARD_ROWS, Slot.BACKWARD, Slot.BACKWARD_SHARED, Slot.BACKWARD_WEIGHT, Slot.BACKWARD_SHARED_WEIGHT,
            Slot.BACKWARD_WAIT, Slot.BACKWARD_CHUNKED, Slot.BACKWARD_GATHER, Slot.BACKWARD_ROWS,
        )
    }),
    slowdown=st.floats(1, 2),
    share=st.floats(0, 1),
    chunked=st.booleans(),
    splits=st.booleans(),
)  # fmt: skip
def test_no_pass_is_faster_than_its_rows(
    seconds: dict[Slot, float], slowdown: float, share: float, chunked: bool, splits: bool
) -> None:
    """The rows of the master problem, of both passes; of a split backward they bound the sum of its halves."""
    overlap = Overlap(slowdown, share, chunked=chunked, shared=True)
    if not chunked:
        seconds |= {Slot.FORWARD_CHUNKED: 0.0, Slot.BACKWARD_CHUNKED: 0.0}
    s = {slot: np.array(amount) for slot, amount in seconds.items()}
    anything: Any = None
    pipeline = Pipeline(2, 4, "zb-h1" if splits else "1f1b", overlap)
    rows = PassRows(anything, pipeline, anything, anything, (), anything)
    nothing = np.array(0.0)

    forward = overlap.forward(
        s[Slot.FORWARD] + s[Slot.FORWARD_SHARED], s[Slot.FORWARD_WAIT], s[Slot.FORWARD_CHUNKED],
        s[Slot.FORWARD_GATHER], rows=Rows(s[Slot.FORWARD_ROWS], s[Slot.FORWARD_SHARED], nothing),
    )  # fmt: skip
    plain, own = s[Slot.BACKWARD], s[Slot.BACKWARD_SHARED]
    weight, own_weight = s[Slot.BACKWARD_WEIGHT], s[Slot.BACKWARD_SHARED_WEIGHT]
    waits, parts, gathers = s[Slot.BACKWARD_WAIT], s[Slot.BACKWARD_CHUNKED], s[Slot.BACKWARD_GATHER]
    if splits:
        first = overlap.backward(
            plain + own, nothing, waits, parts, gathers, rows=Rows(s[Slot.BACKWARD_ROWS], own, nothing)
        )
        backward = first + weight + own_weight
    else:
        sent = Rows(s[Slot.BACKWARD_ROWS], own + own_weight, own_weight)
        backward = overlap.backward(
            plain + own + weight + own_weight, weight + own_weight, waits, parts, gathers, rows=sent
        )

    for terms, passed in (
        (rows._beside_shared(rows._forward_terms(*_FORWARD_SLOTS), _FORWARD_SHARED), forward),
        (rows._beside_shared(rows._backward_terms(), _BACKWARD_SHARED), backward),
    ):
        for term in terms:
            bound = sum(factor * seconds[slot] for slot, factor in term.items())
            assert bound <= float(passed) * (1 + 1e-9) + 1e-9


# Frameworks.

_MOE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 256 --ffn-hidden-size 128 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 8 --bf16 "
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --expert-model-parallel-size 4 "
)


def test_the_overlap_of_megatron_is_read() -> None:
    text = _MOE + "--moe-token-dispatcher-type alltoall --moe-shared-expert-overlap"

    found = parse_configuration(text, "megatron", gpus=8)

    assert dict(found.software)["overlaps_shared"] is True
    assert "overlaps_shared" not in dict(parse_configuration(_MOE, "megatron", gpus=8).software)


@pytest.mark.parametrize(
    "text",
    [
        "--moe-token-dispatcher-type flex",
        "",
        "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
        "--moe-token-dispatcher-type alltoall --recompute-granularity selective --recompute-modules shared_experts",
    ],
    ids=["flex", "allgather", "of another microbatch", "recomputed"],
)
def test_what_megatron_refuses_beside_it_is_refused(text: str) -> None:
    with pytest.raises(ExportError, match="Megatron-LM refuses"):
        parse_configuration(f"{_MOE} --moe-shared-expert-overlap {text}", "megatron", gpus=8)


@pytest.mark.slow
def test_a_plan_with_shared_experts_beside_the_dispatch_is_faster_and_exported(cache_dir: Path) -> None:
    """By the shared experts at most; Megatron-LM and NeMo are asked for it, and what is read back takes as long."""
    sizes = {**SIZES, "hidden": 512, "expert_ffn": 512, "seq": 512, "experts": 16}
    job = {"dims": sizes, "cluster": "h100", "cache_dir": cache_dir}
    degrees = Degrees(dp=16, ep=16, global_batch=64, microbatch=4)
    stack = Stack("mine", loss="float32", experts="each")

    slow, fast = (
        autopar.predict("zoo:glm-4.5-air", degrees, stack=stack, shared_expert_overlap=own, **job).plan  # type: ignore[arg-type]
        for own in (False, True)
    )

    assert slow.simulated is not None
    assert fast.simulated is not None
    assert fast.simulated.step_seconds < slow.simulated.step_seconds
    args = fast.export("megatron", cache_dir=cache_dir).text
    assert "--moe-shared-expert-overlap\n" in args
    assert "moe_shared_expert_overlap = True" in fast.export("nemo", cache_dir=cache_dir).text
    assert "moe_shared_expert_overlap = False" in slow.export("nemo", cache_dir=cache_dir).text
    assert "--moe-shared-expert-overlap" not in slow.export("megatron", cache_dir=cache_dir).text
    waits = fast.export("torchtitan", cache_dir=cache_dir)
    assert any("beside the shared experts" in sentence for sentence in waits.granted)
    found = parse_configuration(args, "megatron", gpus=16, model="zoo:glm-4.5-air")
    assert dict(found.software)["overlaps_shared"] is True
