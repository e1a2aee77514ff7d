"""What hides behind compute and what does not, by hand; and the laws of the formulas."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import PRESETS
from autopar.cost import BUCKET_BYTES, Bucketed, CostModel, Overlap, Stack
from autopar.ir.graph import Op
from autopar.program.records import Collective, Program, Segment, SegmentPhase, Store, collective_kind
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh, Partial, Placement, Replicate, Shard
from autopar.simulate import Stragglers, simulate
from autopar.simulate.layout import lay_out
from tests.programs import ExactCosts, all_reduce, equal_stages, programs, two_block_step, value, work

MESH = Mesh.of(dp=2, tp=2)
DP, TP = MESH.axes


def _backward(weight: float, collective: float) -> Segment:
    """Return a backward of 2 s towards the block before, its all_reduce, and a weight gradient."""
    d, w, dx, total = value("d"), value("w.grad"), value("dx"), value("w.sum")
    reduced = all_reduce(TP, dx, "dx.sum", seconds=collective)
    phase = SegmentPhase.BACKWARD
    gradient = work((d, w), (total,), weight, phase)
    instructions = (work((d,), (dx,), 2, phase), reduced, gradient)
    return Segment(1, phase, (d,), (w,), instructions, outputs=(reduced.result,), stores=(Store(total, "w.grad"),))


@pytest.mark.parametrize(
    ("collective", "scalars", "seconds"),
    [
        (4.0, {}, 12.0 + 0.15 * 4),  # 9 s would hide; 15 % never do
        (20.0, {}, 12.0 + 20 - 9),
        (4.0, {"exposed_share": 1.0}, 12.0 + 4),
        (4.0, {"exposed_share": 0.5}, 12.0 + 0.575 * 4),  # 0.5 + 0.5 * 0.15
        (4.0, {"overlap_slowdown": 1.2}, 12.0 + 4 - 0.8 * 0.85 * 4),
        (4.0, {"host_launch": 10.0}, (12.6**3 + 20.0**3) ** (1 / 3)),  # two kernels
    ],
)
def test_collectives_run_beside_weight_gradients(collective: float, scalars: dict[str, float], seconds: float) -> None:
    """A backward of 2 s, a weight gradient of 10 s, of which 9 s can hide a collective."""
    costs = ExactCosts(stack=Stack("mine"))
    costs = replace(costs, stack=_stack(scalars))

    layout = lay_out(_backward(10, collective), costs)

    assert layout.seconds == pytest.approx(seconds)
    assert layout.link_seconds == collective
    (span,) = (span for span in layout.spans if span.name.startswith("all_reduce"))
    assert 0 <= span.offset <= layout.seconds - span.seconds + 1e-9 or span.seconds > layout.seconds


def _stack(scalars: dict[str, float]) -> Stack:
    """Return a stack with these scalars, those of the host as large as tests want them."""
    host = scalars.pop("host_launch", None)
    stack = Stack("mine", scalars=tuple(scalars.items()))
    if host is not None:
        object.__setattr__(stack, "scalars", (*stack.scalars, ("host_launch", host)))
    return stack


def test_gathers_run_beside_the_block() -> None:
    """A gather of 4 s beside kernels of 10 s: 5 % are waited for. Beside 1 s: 3 s are."""
    w, x, y = value("w"), value("x"), value("y")
    whole = replace(value("w.whole"), shape=(16,))
    gather = Collective("all_gather", DP, Shard(0), Replicate(), w, whole, 4.0)  # type: ignore[arg-type]

    def seconds(kernel: float) -> float:
        segment = Segment(0, SegmentPhase.FORWARD, (x,), (w,), (gather, work((x, whole), (y,), kernel)), outputs=(y,))
        return lay_out(segment, ExactCosts()).seconds

    assert seconds(10) == pytest.approx(10 + 0.05 * 4)
    assert seconds(1) == pytest.approx(1 + 3)


_SECONDS = st.floats(0, 100)


@given(
    kernels=_SECONDS,
    weight=_SECONDS,
    collectives=_SECONDS,
    chunked=st.one_of(st.none(), _SECONDS),
    gathers=_SECONDS,
    slowdown=st.floats(1, 2),
    share=st.floats(0, 1),
)
def test_hiding_obeys_the_links_and_the_prices(
    kernels: float,
    weight: float,
    collectives: float,
    chunked: float | None,
    gathers: float,
    slowdown: float,
    share: float,
) -> None:
    """No pass is faster than its kernels or its link, nor than the planner's linear price, nor slower than one by one.

    More of anything never makes it faster. Collectives run in chunks only where the stack says so.
    """
    overlap = Overlap(slowdown, share, chunked=chunked is not None)
    chunked = chunked or 0.0
    whole = kernels + weight
    sent = collectives + chunked + gathers

    def backward(extra: float = 0.0, more: str = "") -> float:
        terms = {
            "kernels": whole, "weight": weight, "collectives": collectives, "chunked": chunked, "gathers": gathers
        }  # fmt: skip
        terms[more] = terms.get(more, 0.0) + extra
        terms["kernels"] += extra if more == "weight" else 0.0
        terms.pop("", None)
        return float(overlap.backward(*terms.values()))

    seconds = backward()
    priced = whole + overlap.price(0.15) * collectives + overlap.price(0.125) * chunked + overlap.price(0.05) * gathers
    assert seconds >= max(whole, sent, priced) * (1 - 1e-9) - 1e-9
    assert seconds <= (whole + sent) * (1 + 1e-9) + 1e-9
    for more in ("kernels", "weight", "collectives", "chunked", "gathers"):
        assert backward(1.0, more) >= seconds - 1e-9
    forward = float(overlap.forward(kernels, collectives, chunked, gathers))
    assert max(kernels, chunked + gathers) + collectives <= forward * (1 + 1e-9) + 1e-9


def test_collectives_of_tensor_parallelism_run_beside_products() -> None:
    """Beside a product of 10 s an eighth of a collective is waited for, or what 6 s have no room for.

    An all-reduce of what the product makes hides nothing, nor does a gather of what it makes.
    """
    costs = ExactCosts(stack=Stack("mine", hides_tp=True))

    def added(name: str, source: Placement, target: Placement, seconds: float) -> float:
        x, y = value("x"), value("y")
        kind = collective_kind(source, target)
        assert kind is not None
        move = Collective(kind, TP, source, target, value(name), value(f"{name}|moved"), seconds)
        product = replace(work((x, value("w")), (y,), 10.0), op=Op("fc", "MatMul", ("x", "w"), ("y",), _TEN))
        steps = (move, replace(product, inputs=(move.result, value("w")))) if name == "x" else (product, move)
        segment = Segment(0, SegmentPhase.FORWARD, (x,), (value("w"),), steps, outputs=(y,))
        return lay_out(segment, costs).seconds - 10.0

    assert added("x", Shard(0), Replicate(), 4.0) == pytest.approx(0.5)
    assert added("y", Partial(), Shard(0), 4.0) == pytest.approx(0.5)
    assert added("y", Partial(), Shard(0), 20.0) == pytest.approx(14.0)
    assert added("y", Partial(), Replicate(), 4.0) == pytest.approx(4.0)
    assert added("y", Shard(0), Replicate(), 4.0) == pytest.approx(4.0)


_TEN = (("seconds", 10.0),)


def test_gradients_share_buckets() -> None:
    """Block 1's gradient of 5 bytes waits for block 0's of 2: one job of 7 s from 28 on, the end of the backward."""
    timeline = simulate(two_block_step(Mesh.of(dp=2, tp=8)), ExactCosts(), trace=True)

    assert timeline.stages[0].gradient_seconds == 7
    assert [event.name for event in timeline.events if "gradients" in event.name] == ["all_reduce[dp] of 2 gradients"]


def test_buckets_close_when_they_are_full() -> None:
    """With buckets of 5 bytes both gradients travel alone, as by hand in `test_simulate_gradients`."""
    timeline = simulate(two_block_step(Mesh.of(dp=2, tp=8)), ExactCosts(), bucket=5)

    assert timeline.stages[0].gradient_seconds == 3


def test_a_price_in_a_bucket_is_a_share_of_it() -> None:
    """A bucket is closed by the tensor that fills it: one of half a bucket travels in one of 5 / 4 on the mean.

    What is as large as two costs what it costs alone. A tensor that begins with a bucket goes on in one and a half of
    it, however little of it is left for a later collective to deal with.
    """
    costs = CostModel(PRESETS["a100"])
    sizes = np.array([BUCKET_BYTES / 2, 2 * BUCKET_BYTES, 8 * BUCKET_BYTES])

    half, *large = Bucketed(costs).collective_seconds("all_reduce", sizes, DP).tolist()
    later = Bucketed(costs).carrying(BUCKET_BYTES).collective_seconds("all_reduce", sizes[:1] / 4, DP)

    assert half == pytest.approx(float(costs.collective_seconds("all_reduce", 1.25 * BUCKET_BYTES, DP)) / 2.5)
    assert large == pytest.approx(costs.collective_seconds("all_reduce", sizes[1:], DP).tolist())
    assert later == pytest.approx(costs.collective_seconds("all_reduce", 1.5 / 4 * sizes[:1], DP) / 1.5)


@given(program=programs(), bucket=st.sampled_from([0.0, 3.0, 9.0, 25e6]))
def test_buckets_keep_every_byte(program: Program, bucket: float) -> None:
    """A collective of a byte takes a second, so the link is busy with as many seconds however gradients are put."""
    busy = [stage.overlapped_seconds for stage in simulate(program, ExactCosts(), bucket=bucket).stages]

    assert busy == pytest.approx(
        [stage.overlapped_seconds for stage in simulate(program, ExactCosts(), bucket=0).stages]
    )


@given(program=programs())
def test_the_critical_path_is_the_step(program: Program) -> None:
    """Its pieces follow each other without gaps from 0 to the end of the step; it begins later where steps overlap."""
    timeline = simulate(program, ExactCosts(latency=1.0), trace=True)

    ends = [0.0, *(piece.end for piece in timeline.path)]
    assert [piece.start for piece in timeline.path] == pytest.approx(ends[:-1])
    if SCHEDULES[program.schedule].steps_overlap:
        assert ends[-1] >= timeline.step_seconds * (1 - 1e-9)
    else:
        assert ends[-1] == pytest.approx(timeline.step_seconds)


def test_arrays_hold_the_step() -> None:
    """3 stages, 4 microbatches: 24 passes, 16 transfers, and memory at each pass and at the update."""
    timeline = simulate(equal_stages(3, 4, "1f1b"), ExactCosts(latency=1.0), trace=True)

    arrays = timeline.arrays
    assert arrays is not None
    assert (len(arrays.tasks), len(arrays.transfers), len(arrays.memory)) == (24, 16, 27)
    assert arrays.tasks["end"].max() == timeline.step_seconds
    forwards = arrays.tasks[(arrays.tasks["pass"] == "F") & (arrays.tasks["stage"] == 1)]
    assert (forwards["start"] - forwards["sent"]).tolist()[0] == 1.0


def test_stragglers_are_the_slowest_of_many() -> None:
    """A stage of 64 devices is slower than one of 2, and the seed decides by how much."""
    few, many = (Stragglers(0.02, seed=1).slowest((0, count)) for count in (2, 64))

    assert 1.0 < few <= many < 1.1
    program = equal_stages(2, 4, "1f1b")
    plain = simulate(program, ExactCosts())
    slow = simulate(program, ExactCosts(), stragglers=Stragglers(0.5, seed=3))
    assert slow.step_seconds != plain.step_seconds
    assert slow == simulate(program, ExactCosts(), stragglers=Stragglers(0.5, seed=3))
    assert sum(stage.delay_seconds for stage in slow.stages) != 0


def test_steps_have_fixed_seconds() -> None:
    costs = ExactCosts(stack=Stack("mine", scalars=(("step_seconds", 0.5),)))

    timeline = simulate(equal_stages(2, 4, "1f1b"), costs)

    assert timeline.step_seconds == simulate(equal_stages(2, 4, "1f1b"), ExactCosts()).step_seconds + 0.5
    assert [stage.delay_seconds for stage in timeline.stages] == [0.5, 0.5]
