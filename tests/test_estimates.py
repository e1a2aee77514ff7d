"""Estimates by formula beside predictions by events, plan by plan."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost import MIXED, Stack, load_policy
from autopar.degrees import Degrees
from autopar.errors import ClusterError, JobError, TacticError
from autopar.estimates import Estimator
from autopar.estimates.microbatch import choose_microbatch
from autopar.prediction import Predictor, Setting
from autopar.program.records import Category
from autopar.workload import open_workload

CLUSTER = load_cluster("a100")
STACK = Stack(
    "slow", scalars=(("overlap_slowdown", 1.1), ("exposed_share", 0.05), ("step_seconds", 1e-3), ("host_launch", 5e-6))
)

CLOSE = 0.04
"""Relative. What the formula leaves out: a last bucket that is not full, traffic behind other traffic, uneven waits."""
SAME = 1e-3
"""Relative; the few parameters that cannot be shared are taken to be shared as in the table."""
SHARED = 3e-3
"""The same under ZeRO-3, whose gathers are in flight beside all else."""
SPLIT = 0.07
"""As `CLOSE`, of short steps under ZeRO-3 that split the backward: 2 ms of 32, of traffic behind gathers."""
EXPERTS = 0.06
"""The same for small experts, whose gradients fill no bucket."""
INTERLEAVED = 0.08
"""The same where stages are interleaved: most plans of these are within 2 %."""


@cache
def _predictor() -> Predictor:
    dims = {"num_layers": 8, "hidden": 1024, "heads": 8, "seq": 512, "vocab": 8192}
    return Predictor(open_workload("zoo:gpt2", dims=dims))


PLANS = [
    Degrees(dp=dp, tp=tp, pp=pp, zero=zero, recompute=recompute, microbatch=4, global_batch=256)
    for dp, tp, pp, zero, recompute in product((1, 8), (1, 4), (1, 4), (0, 1, 3), ("none", "selective", "full"))
    if (dp > 1 or zero == 0) and (recompute == "none" or zero == 1 or dp == 1)
] + [
    Degrees(dp=16, tp=2, pp=2, schedule="gpipe", microbatch=2, global_batch=128),
    Degrees(dp=4, tp=4, pp=2, sequence_parallel=True, global_batch=64),
    Degrees(dp=2, tp=1, pp=3, layers=(2, 3, 3), microbatch=2, global_batch=32),
]


def _check(degrees: Degrees, stack: Stack, seconds: float, size: float) -> None:
    """Compare an estimate with a prediction; tolerances are relative."""
    found = Estimator(_predictor(), CLUSTER, stack).estimate([degrees])

    timeline = _predictor().predict(degrees, CLUSTER, stack).timeline
    assert found.step_seconds[0] == pytest.approx(timeline.step_seconds, rel=seconds)
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=size)


@pytest.mark.parametrize("stack", [Stack("plain"), STACK], ids=lambda stack: stack.name)
def test_estimates_are_close_to_predictions(stack: Stack) -> None:
    """Seconds within `CLOSE`, bytes within `SAME`."""
    predictor = _predictor()

    found = Estimator(predictor, CLUSTER, stack).estimate(PLANS)

    for degrees, seconds, size in zip(PLANS, found.step_seconds, found.peak_bytes, strict=True):
        timeline = predictor.predict(degrees, CLUSTER, stack).timeline
        assert seconds == pytest.approx(timeline.step_seconds, rel=CLOSE), degrees
        assert size == pytest.approx(timeline.peak_bytes, rel=SAME), degrees


@pytest.mark.parametrize(("dp", "tp", "pp"), [(6, 1, 1), (3, 2, 1), (1, 2, 3)])
def test_a_part_of_a_node_is_estimated_as_such(dp: int, tp: int, pp: int) -> None:
    """Six of the eight devices of a node are not on two: the same part of the cluster as predictions are for."""
    degrees = Degrees(dp=dp, tp=tp, pp=pp, zero=1 if dp > 1 else 0, microbatch=4, global_batch=48 * dp)

    _check(degrees, STACK, CLOSE, SAME)


@pytest.mark.parametrize("zero", [0, 1])
def test_what_the_update_makes_is_not_there_in_passes(zero: int) -> None:
    """Float32 gradients of parameters in float16: the formula leaves them out of passes as the simulator does."""
    degrees = Degrees(dp=2, pp=2, zero=zero, microbatch=4, global_batch=64)
    policy = load_policy("fp16")

    found = Estimator(_predictor(), CLUSTER, policy=policy).estimate([degrees])

    timeline = _predictor().predict(degrees, CLUSTER, policy=policy).timeline
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=SAME)
    sizes = {category: size for category, size in timeline.stages[0].memory.breakdown}
    assert sizes[Category.UPDATE] == 0


@pytest.mark.parametrize(("dp", "tp", "microbatches"), [(1, 1, 8), (1, 4, 16), (4, 2, 8), (8, 1, 16)])
def test_interleaved_estimates_are_close(dp: int, tp: int, microbatches: int) -> None:
    """Two stages per group of devices, four groups; memory is exact here, too."""
    degrees = Degrees(dp=dp, tp=tp, pp=4, zero=1, interleave=2, microbatch=4, global_batch=4 * dp * microbatches)

    found = Estimator(_predictor(), CLUSTER).estimate([degrees])

    timeline = _predictor().predict(degrees, CLUSTER).timeline
    assert found.step_seconds[0] == pytest.approx(timeline.step_seconds, rel=INTERLEAVED)
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("schedule", "interleave"), [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)])
@pytest.mark.parametrize(("dp", "tp", "zero"), [(1, 1, 0), (4, 2, 1), (16, 1, 3)])
def test_estimates_of_split_backwards_are_close(
    schedule: str, interleave: int, dp: int, tp: int, zero: int, recompute: str
) -> None:
    """Weight passes fill the gaps as in the simulator, and what they hold until then is counted, byte by byte."""
    degrees = Degrees(
        dp=dp, tp=tp, pp=4, zero=zero, schedule=schedule, interleave=interleave, recompute=recompute, microbatch=2,
        global_batch=2 * dp * 12,
    )  # fmt: skip

    _check(degrees, STACK, SPLIT if zero == 3 else CLOSE, SHARED)


@pytest.mark.parametrize(
    ("recompute", "offload"),
    [("offload", ""), ("none", "optimizer"), ("none", "optimizer=0.4"), ("offload", "optimizer")],
)
@pytest.mark.parametrize(
    ("dp", "pp", "zero", "schedule"), [(1, 1, 0, "1f1b"), (8, 2, 1, "1f1b"), (4, 2, 3, "1f1b"), (4, 4, 1, "zb-h1")]
)
def test_estimates_with_host_memory_are_close(
    recompute: str, offload: str, dp: int, pp: int, zero: int, schedule: str
) -> None:
    """Copies that passes do not hide, and what is on the device meanwhile; data-parallel devices share the state."""
    degrees = Degrees(
        dp=dp, pp=pp, zero=zero, schedule=schedule, recompute=recompute, offload=offload, microbatch=2,
        global_batch=2 * dp * 12,
    )  # fmt: skip

    _check(degrees, STACK, CLOSE, SHARED)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("dp", "shard", "tp", "pp"), [(24, 8, 1, 1), (24, 8, 4, 2), (16, 4, 1, 4), (8, 1, 2, 1), (12, 2, 8, 1)]
)
def test_estimates_where_some_share_are_close(dp: int, shard: int, tp: int, pp: int, zero: int) -> None:
    """Groups that share reduce among themselves, and then each part with the other groups."""
    degrees = Degrees(dp=dp, tp=tp, pp=pp, zero=zero, shard=shard, microbatch=2, global_batch=2 * dp * 8)

    _check(degrees, STACK, CLOSE, SHARED)


def test_parameters_that_do_not_divide_are_whole() -> None:
    """Seven devices share what has a dim of 7 × 256, and nothing else of a layer."""
    dims = {"num_layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1792, "seq": 128, "vocab": 4096}
    predictor = Predictor(open_workload("zoo:llama3-8b", dims=dims))
    degrees = Degrees(dp=56, zero=2, shard=7, global_batch=112)

    found = Estimator(predictor, CLUSTER, STACK).estimate([degrees])

    timeline = predictor.predict(degrees, CLUSTER, STACK).timeline
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=SHARED)


@cache
def _experts() -> Predictor:
    dims = {"num_layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 512, "seq": 128, "vocab": 1024}
    return Predictor(open_workload("zoo:mixtral-8x7b", dims=dims))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("dp", "ep", "tp", "pp"), [(2, 2, 1, 1), (8, 4, 1, 2), (16, 8, 2, 1), (8, 2, 4, 2)])
def test_estimates_of_experts_are_close(dp: int, ep: int, tp: int, pp: int, zero: int) -> None:
    """Experts are dealt out to part of the data-parallel devices; their table has two groups of these."""
    degrees = Degrees(dp=dp, ep=ep, tp=tp, pp=pp, zero=zero, microbatch=2, global_batch=2 * dp * 4)

    found = Estimator(_experts(), CLUSTER, STACK).estimate([degrees])

    timeline = _experts().predict(degrees, CLUSTER, STACK).timeline
    assert found.step_seconds[0] == pytest.approx(timeline.step_seconds, rel=EXPERTS)
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=SHARED)


@pytest.mark.slow
def test_estimates_of_experts_over_context_are_close() -> None:
    """A group of 8 devices, of which 4 are data parallel, twice."""
    dims = {"num_layers": 2, "hidden": 256, "heads": 8, "kv_heads": 4, "experts": 16, "seq": 128, "vocab": 1024}
    predictor = Predictor(open_workload("zoo:qwen3-30b-a3b", dims=dims))
    degrees = Degrees(dp=8, cp=2, ep=8, zero=1, microbatch=2, global_batch=64)

    found = Estimator(predictor, CLUSTER, STACK).estimate([degrees])

    timeline = predictor.predict(degrees, CLUSTER, STACK).timeline
    assert found.step_seconds[0] == pytest.approx(timeline.step_seconds, rel=EXPERTS)
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=SHARED)


@pytest.mark.parametrize(("dp", "tp", "pp"), [(4, 1, 1), (1, 2, 1), (2, 2, 4)])
def test_estimates_of_inference_are_close(dp: int, tp: int, pp: int) -> None:
    """There is nothing to run again, and nothing comes back."""
    dims = {"num_layers": 4, "hidden": 256, "heads": 8, "seq": 128, "vocab": 1024}
    predictor = Predictor(open_workload("zoo:gpt2", mode="infer", dims=dims))
    degrees = Degrees(dp=dp, tp=tp, pp=pp, schedule="forward-only", microbatch=2, global_batch=8 * dp)

    found = Estimator(predictor, CLUSTER, STACK).estimate([degrees])

    timeline = predictor.predict(degrees, CLUSTER, STACK).timeline
    assert found.step_seconds[0] == pytest.approx(timeline.step_seconds, rel=CLOSE)
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=SAME)


def test_plans_share_tables() -> None:
    """The degrees over which a table is shared do not make another one, and change no estimate.

    One table is for data-parallel groups within a node, one for those across nodes.
    """
    shared = [
        Degrees(dp=dp, tp=2, pp=pp, zero=1, recompute=recompute, microbatch=4, global_batch=256)
        for dp, pp, recompute in product((2, 4, 8), (1, 2, 4), ("none", "full"))
    ]
    estimator = Estimator(_predictor(), CLUSTER)

    together = estimator.estimate(shared)

    tables = {(degrees.dp * degrees.tp > CLUSTER.devices_per_node, id(estimator.table(degrees))) for degrees in shared}
    assert len(tables) == 2
    alone = [Estimator(_predictor(), CLUSTER).estimate([degrees]) for degrees in shared[::7]]
    assert np.array_equal(together.step_seconds[::7], [each.step_seconds[0] for each in alone])
    assert len(estimator.estimate([]).step_seconds) == 0


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (Degrees(dp=2, ep=2, global_batch=8), "no parameter holds one matrix per expert"),
        (Degrees(pp=2, schedule="zb-v", global_batch=8), "runs two stages"),
        (Degrees(pp=4, interleave=2, global_batch=6), "no whole number of rounds"),
        (Degrees(pp=16, global_batch=16), "cannot be cut into 16 stages"),
    ],
)
def test_what_has_no_estimate_is_refused(degrees: Degrees, message: str) -> None:
    with pytest.raises((JobError, TacticError), match=message):
        Estimator(_predictor(), CLUSTER).estimate([degrees])


@pytest.mark.parametrize("change", [{"recompute": "offload"}, {"offload": "optimizer"}])
def test_clusters_without_hosts_offload_nothing(change: dict[str, str]) -> None:
    degrees = replace(Degrees(dp=2, global_batch=8), **change)  # type: ignore[arg-type]

    with pytest.raises(ClusterError, match="does not say how its devices reach host memory"):
        Estimator(_predictor(), replace(CLUSTER, host=None)).estimate([degrees])


def test_the_microbatch_that_nobody_states_is_the_fastest_that_fits() -> None:
    """By formula, among the sizes that divide what a device has of a batch; in less memory a smaller one."""
    setting = Setting(_predictor(), CLUSTER, STACK, MIXED)
    degrees = Degrees(dp=2, tp=2, global_batch=16)
    sizes = [replace(degrees, microbatch=size) for size in (1, 2, 4, 8)]
    found = Estimator(_predictor(), CLUSTER, STACK).estimate(sizes)
    fastest = int(found.step_seconds.argmin())

    ample = choose_microbatch(setting, degrees)
    tight = choose_microbatch(setting, degrees, float(found.peak_bytes[1]) * 1.001)
    none = choose_microbatch(setting, degrees, float(found.peak_bytes[0]) / 2)

    assert fastest > 1, "small products are slow"
    assert (ample.degrees, ample.fits) == (sizes[fastest], True)
    assert (tight.degrees.microbatch, tight.fits) == (2, True)
    assert (none.degrees.microbatch, none.fits) == (1, False)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_estimates_are_close_above_the_number_of_key_heads(sequence_parallel: bool) -> None:
    """Keys and values are copied, in the tables of the estimates as in the program."""
    dims = {"num_layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 2, "ffn": 3072, "seq": 512, "vocab": 8192}
    predictor = Predictor(open_workload("zoo:llama3-8b", dims=dims))
    degrees = Degrees(tp=8, sequence_parallel=sequence_parallel, microbatch=4, global_batch=32)

    found = Estimator(predictor, CLUSTER).estimate([degrees])

    timeline = predictor.predict(degrees, CLUSTER).timeline
    assert found.step_seconds[0] == pytest.approx(timeline.step_seconds, rel=CLOSE)
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=SAME)


@pytest.mark.parametrize("synchronised", [False, True])
def test_estimates_of_batch_normalisation_are_close(synchronised: bool) -> None:
    """With the statistics of each device, and of the whole batch."""
    workload = open_workload("zoo:resnet50", dims={"image_size": 128}, sync_batchnorm=synchronised)
    predictor, degrees = Predictor(workload), Degrees(dp=4, microbatch=32, global_batch=128)

    found = Estimator(predictor, CLUSTER).estimate([degrees])

    timeline = predictor.predict(degrees, CLUSTER).timeline
    assert found.step_seconds[0] == pytest.approx(timeline.step_seconds, rel=CLOSE)
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=SAME)
