"""Profiles: distinct events of plans, prices made of their seconds, and what they change of a prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost import CostModel, load_policy, prices_of
from autopar.cost.collectives import Collective
from autopar.cost.pricing import as_op, formula_seconds, in_pieces, measured_host, priced
from autopar.degrees import Degrees
from autopar.errors import JobError
from autopar.events import (
    Database,
    LaunchEvent,
    Machine,
    Measurement,
    OpEvent,
    PieceEvent,
    Profile,
    TensorType,
    TransferEvent,
    event_id,
)
from autopar.ir.graph import Op
from autopar.prediction import Setting, open_setting
from autopar.profile import worker
from autopar.profile.actions import Place, launch_work, model_action, products_work
from autopar.profile.extract import Extraction
from autopar.profile.plans import every_split, extract_degrees, parse_degrees
from autopar.profile.suite import suite
from autopar.ranks.communicator import Communicator
from autopar.ranks.compiled_models import Engine
from autopar.sharding import Axis
from autopar.simulate import simulate
from autopar.task import job_machine
from tests.executions import TINY
from tests.local_ranks import NumpyMemory

HERE = Machine("here", "gloo", 1, 2, (), 8e9)
CLUSTER = "a100"


@cache
def _setting(cache_dir: Path, layers: int = 2) -> Setting:
    dims = {**TINY["gpt2"], "num_layers": layers}
    return open_setting("zoo:gpt2", cluster=CLUSTER, stack="ideal", dims=dims, precision="fp32", cache_dir=cache_dir)


def _extracted(setting: Setting, *plans: Degrees) -> Extraction:
    found = Extraction()
    extract_degrees(setting, plans, found)
    return found


def _counts(setting: Setting, plans: Sequence[Degrees]) -> list[dict[str, int]]:
    return [dict(_extracted(setting, plan).counts) for plan in plans]


def _profile(found: Extraction, seconds: float | None = None, *, factor: float = 1.0, costs: CostModel) -> Profile:
    """Return a profile that says of every event `seconds`, or `factor` times what the formulas do."""
    events = [task.event for task in found.tasks.values()]
    measured = {}
    for event in events:
        own = seconds
        if own is None:
            match event:
                case OpEvent():
                    own = factor * formula_seconds(event, costs)
                case TransferEvent(operation="send", bytes=nbytes, inside=inside):
                    own = factor * costs.send_seconds(nbytes, int(inside < 2))
                case TransferEvent(operation=operation, bytes=nbytes, members=members):
                    axis = Axis("x", members, 1)
                    own = factor * costs.collective_seconds(Collective(operation), nbytes, axis)
                case _:
                    continue
        if own > 0:
            measured[event_id(event)] = Measurement(HERE.id, 2, own, own, own, 10, 3, "2026-01-01")
    database = Database().with_events(events, "fp32").with_measurements(HERE, measured)
    return Profile("test", database, database.digest)


class _Bimodal:
    """A clock by which every third call takes five times as long as the others."""

    def times(self, call: Callable[[], Any], repeats: int) -> list[float]:
        return [5e-3 if number % 3 == 2 else 1e-3 for number in range(repeats)]


@pytest.mark.parametrize(("typical", "seconds"), [(median, 1e-3), (fmean, 7e-3 / 3)])
def test_of_collectives_the_mean_counts(
    typical: Callable[[list[float]], float], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits for dozens of them, so that the slow ones among them count, too."""
    monkeypatch.setattr(worker, "clock_of", lambda _: _Bimodal())
    memory = NumpyMemory()
    ranks = worker.Ranks(Place(memory, Engine(memory, 1), cast(Communicator, object()), 0), (0,))

    sample = ranks.timed(lambda: None, (0,), 0.3, typical, first=False)

    assert sample.repeats % 3 == 0
    assert sample.seconds == pytest.approx(seconds)


def test_events_do_not_grow_with_replicas_microbatches_or_layers(cache_dir: Path) -> None:
    """DistSim's first observation: replicas, microbatches and layers repeat themselves."""
    setting = _setting(cache_dir)
    of_replicas = [Degrees(dp=dp, microbatch=2, global_batch=2 * dp) for dp in (2, 4)]
    of_microbatches = [Degrees(pp=2, microbatch=2, global_batch=2 * count) for count in (2, 4)]

    replicas, microbatches = _counts(setting, of_replicas), _counts(setting, of_microbatches)
    layers = [_counts(_setting(cache_dir, number), of_replicas[:1])[0] for number in (2, 3)]

    assert replicas[0] == replicas[1]
    assert microbatches[0] == microbatches[1]
    assert layers[0] == layers[1]


def test_unrolled_steps_grow_with_all_of_them(cache_dir: Path) -> None:
    """What would have to be timed if every instruction were an event of its own."""
    setting = _setting(cache_dir)
    plans = [Degrees(dp=dp, microbatch=2, global_batch=2 * dp * count) for dp, count in ((2, 1), (4, 1), (2, 2))]

    small, wide, long = (_extracted(setting, plan) for plan in plans)

    assert wide.naive == 2 * small.naive
    assert small.naive < long.naive < 2 * small.naive  # the update runs once
    assert long.tasks.keys() == small.tasks.keys()
    assert small.naive > 3 * len(small.tasks)


def test_further_plans_add_few_events(cache_dir: Path) -> None:
    """Of plans for one number of devices many ops are the same."""
    setting = _setting(cache_dir)
    plans = [replace(plan, microbatch=1) for plan in every_split(2, 4)]
    found = Extraction()

    extract_degrees(setting, plans, found)

    alone = [len(_extracted(setting, plan).tasks) for plan in plans]
    assert max(alone) < len(found.tasks) < sum(alone)


def test_ops_of_pieces_are_events(cache_dir: Path) -> None:
    """The seconds of a piece can then be divided among its ops."""
    found = _extracted(_setting(cache_dir), Degrees(tp=2, global_batch=2))
    pieces = [task.event for task in found.tasks.values() if isinstance(task.event, PieceEvent)]

    assert len(pieces) > 4
    for piece in pieces:
        assert all(name in found.tasks for name, _ in piece.ops)


def test_known_ops_cost_what_was_measured_and_others_follow_their_class(cache_dir: Path) -> None:
    """Twice the formula everywhere: so are known ops, and unknown ones by their class."""
    setting = _setting(cache_dir)
    costs = CostModel(job_machine(2, setting.cluster), setting.policy, setting.stack)
    found = _extracted(setting, Degrees(dp=2, global_batch=2))
    prices = prices_of(_profile(found, factor=2.0, costs=costs), costs)
    with_prices = replace(costs, prices=prices)

    for task in found.tasks.values():
        if isinstance(task.event, OpEvent):
            op, inputs, outputs, sizes = as_op(task.event)
            said = costs.op_seconds(op, inputs, outputs, sizes)
            assert with_prices.op_seconds(op, inputs, outputs, sizes) == pytest.approx(2 * said)
            assert prices.knows_op(op, inputs, outputs, sizes) == bool(said[0] > 0)
    op = Op("new", "MatMul", ("a", "b"), ("y",))
    shapes = [np.array([[64, 32]]), np.array([[32, 96]])], [np.array([[64, 96]])]
    sizes = dict.fromkeys("aby", 4.0)
    assert not prices.knows_op(op, *shapes, sizes)
    assert with_prices.op_seconds(op, *shapes, sizes) == pytest.approx(2 * costs.op_seconds(op, *shapes, sizes))


def test_strategies_are_priced_row_by_row() -> None:
    """Known and unknown shapes of one op in one call."""
    costs = CostModel(load_cluster(CLUSTER), load_policy("fp32"))
    tensors = [TensorType(shape, 4.0, "float32") for shape in ((8, 4), (4, 2), (8, 2))]
    event = OpEvent("MatMul", (tensors[0], tensors[1]), (tensors[2],))
    found = Extraction()
    database = Database().with_events([event], "fp32")
    one = Measurement(HERE.id, 2, 0.5, 0.5, 0.5, 10, 3, "2026-01-01")
    database = database.with_measurements(HERE, {event_id(event): one})
    profile = Profile("one", database, database.digest)

    seconds = priced(costs, profile).op_seconds(
        Op("m", "MatMul", ("a", "b"), ("y",)),
        [np.array([[8, 4], [16, 4]]), np.array([[4, 2], [4, 2]])],
        [np.array([[8, 2], [16, 2]])],
        dict.fromkeys("aby", 4.0),
    )

    assert not found.tasks
    assert seconds[0] == pytest.approx(0.5)
    assert seconds[1] == pytest.approx(0.5, rel=0.1)  # by the factor of products, of which this is the only one


def test_transfers_are_interpolated_between_measured_sizes() -> None:
    """By powers of the bytes; beyond the largest in proportion; never shorter for more bytes."""
    costs = CostModel(job_machine(2, load_cluster(CLUSTER)), load_policy("fp32"))
    times = {1e3: 1e-4, 1e5: 1e-3, 1e6: 0.9e-3}
    events = {nbytes: TransferEvent("all_reduce", nbytes, 2, 2) for nbytes in times}
    measured = {
        event_id(event): Measurement(HERE.id, 2, times[nbytes], 0.0, 1.0, 10, 3, "2026-01-01")
        for nbytes, event in events.items()
    }
    database = Database().with_events(events.values(), "fp32").with_measurements(HERE, measured)
    with_prices = priced(costs, Profile("links", database, database.digest))
    axis = Axis("dp", 2, 1)

    nbytes = np.array([10.0, 1e3, 1e4, 1e5, 1e6, 1e7])
    seconds = with_prices.collective_seconds("all_reduce", nbytes, axis)

    assert seconds == pytest.approx([1e-4, 1e-4, 10**-3.5, 1e-3, 1e-3, 1e-2])
    assert with_prices.collective_seconds("all_reduce", 1e4, axis) == pytest.approx(10**-3.5)
    ratio = with_prices.collective_seconds("all_reduce", 1e4, Axis("dp", 4, 1))
    assert ratio != costs.collective_seconds("all_reduce", 1e4, Axis("dp", 4, 1))  # scaled by the operation's factor


@pytest.mark.parametrize("busy", [2, 8])
def test_copies_to_the_host_cost_what_was_measured(busy: int) -> None:
    """20 us and 10 GB/s out, 5 GB/s back: the link of the cluster says that to solver, formula and simulator alike."""
    costs = CostModel(load_cluster(CLUSTER), load_policy("fp32"))
    host = costs.cluster.known_host()
    times = {
        TransferEvent(operation, nbytes, 1, 1): 20e-6 + nbytes / rate
        for operation, rate in (("offload", 10e9), ("fetch", 5e9))
        for nbytes in (1e5, 1e6, 1e8)
    }
    measured = {
        event_id(event): Measurement(HERE.id, busy, own, own, own, 10, 3, "2026-01-01") for event, own in times.items()
    }
    database = Database().with_events(times, "fp32").with_measurements(HERE, measured)
    profile = Profile("copies", database, database.digest)

    found = priced(costs, profile).cluster.known_host()

    assert found.out_seconds(3e7) == pytest.approx(20e-6 + 3e7 / 10e9)
    assert found.back_seconds(3e7) == pytest.approx(20e-6 + 3e7 / 5e9)
    assert (found.memory, found.devices, found.sharing) == (host.memory, host.devices, host.sharing)
    again = priced(priced(costs, profile), profile)
    assert again.cluster.known_host().latency == pytest.approx(20e-6)


def test_one_measured_copy_says_nothing_of_the_other_way() -> None:
    """Of one size only, the latency stays that of the cluster file."""
    host = load_cluster(CLUSTER).known_host()

    found = measured_host(host, {TransferEvent("offload", 1e8, 1, 1): 0.02})

    assert found.latency == host.latency
    assert found.out_seconds(1e8) == pytest.approx(0.02)
    assert found.to_device == host.to_device
    assert measured_host(host, {TransferEvent("send", 1e8, 2, 2): 0.02}) == host


def test_prices_of_ops_add_up_to_their_pieces() -> None:
    """Two pieces that share an op: 1 + 2 x 1 alone, 6 together; 1 + 3 alone, 8 together."""
    types = [TensorType((size,), 4.0, "float32") for size in (1, 2, 3)]
    ops = [OpEvent("Relu", (own,), (own,)) for own in types]
    names = [event_id(op) for op in ops]
    pieces = [
        PieceEvent("forward", ((names[0], 1), (names[1], 2)), "a"),
        PieceEvent("forward", ((names[0], 1), (names[2], 1)), "b"),
    ]
    database = Database().with_events([*ops, *pieces])
    alone = dict(zip(names, (1.0, 1.0, 3.0), strict=True))
    seconds = {**alone, event_id(pieces[0]): 6.0, event_id(pieces[1]): 8.0}

    found = in_pieces(alone, database, seconds)

    assert found[names[0]] + 2 * found[names[1]] == pytest.approx(6.0, rel=2e-3)
    assert found[names[0]] + found[names[2]] == pytest.approx(8.0, rel=2e-3)
    assert found == pytest.approx(dict(zip(names, (2.0, 2.0, 6.0), strict=True)), rel=2e-3)


def test_simulator_formula_and_solver_read_the_same_prices(cache_dir: Path) -> None:
    """With twice the seconds of every event a step takes twice as long; the formula follows.

    A tenth is for ops that are fused where formulas are asked, and measured alone.
    """
    from autopar.estimates.estimator import Estimator

    setting = _setting(cache_dir)
    degrees = setting.predictor.settled(Degrees(dp=2, tp=2, microbatch=1, global_batch=4))
    machine = job_machine(degrees.gpus, setting.cluster)
    costs = CostModel(machine, setting.policy, setting.stack)
    profile = _profile(_extracted(setting, degrees), factor=2.0, costs=costs)

    alone = setting.predict(degrees)
    twice = replace(setting, profile=profile).predict(degrees)
    formulas = [
        Estimator(setting.predictor, setting.cluster, setting.stack, setting.policy, own).estimate([degrees])
        for own in (None, profile)
    ]

    assert alone.timeline.measured is None
    assert twice.timeline.measured == pytest.approx(1.0)
    assert twice.timeline.step_seconds == pytest.approx(2 * alone.timeline.step_seconds, rel=0.1)
    assert formulas[1].step_seconds[0] == pytest.approx(2 * formulas[0].step_seconds[0], rel=0.1)
    assert twice.plan.simulated is not None
    assert any(remark.text.startswith("100 % of the seconds") for remark in twice.plan.simulated.remarks)


def test_bounds_stay_below_measured_prices(cache_dir: Path) -> None:
    """A profile with ops that are faster than the formula says must not make bounds exceed prices."""
    setting = _setting(cache_dir)
    costs = CostModel(job_machine(2, setting.cluster), setting.policy, setting.stack)
    found = _extracted(setting, Degrees(dp=2, global_batch=2))
    fast = priced(costs, _profile(found, factor=0.25, costs=costs))

    for task in found.tasks.values():
        if isinstance(task.event, OpEvent):
            op, inputs, outputs, sizes = as_op(task.event)
            price = fast.op_seconds(op, inputs, outputs, sizes)[0]
            formula = costs.op_seconds(op, inputs, outputs, sizes)[0]
            if formula > 0:
                assert fast.launch_seconds(op) <= price * (1 + 1e-9)
                assert fast.least_compute_seconds(op, inputs, outputs)[0] <= price * (1 + 1e-9)
                assert fast.bytes_per_second(op) >= costs.bytes_per_second(op)


def test_other_precisions_are_refused(cache_dir: Path) -> None:
    """Ops of 2-byte numbers are other ops; the hint says what to give."""
    setting = _setting(cache_dir)
    costs = CostModel(job_machine(2, setting.cluster), setting.policy, setting.stack)
    profile = _profile(_extracted(setting, Degrees(dp=2, global_batch=2)), 1e-3, costs=costs)

    with pytest.raises(JobError, match="measured in fp32, the job is planned in mixed") as caught:
        priced(replace(costs, policy=load_policy("mixed")), profile)

    assert "--precision fp32" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=two", "no whole number"),
        ("banana=2", "'banana=2' is no degree"),
        ("dp", "'dp' is no degree"),
        ("sequence_parallel=maybe", "'maybe'"),
        ("dp=0", "dp is 0"),
    ],
)
def test_wrong_degrees_are_refused(text: str, message: str) -> None:
    """With what is wrong and how to write it."""
    with pytest.raises(JobError, match=message):
        parse_degrees(text)


def test_degrees_are_read_as_they_are_written() -> None:
    """Between commas or spaces, with dashes or without."""
    found = parse_degrees("dp=2, tp=2 sequence-parallel=true schedule=gpipe", global_batch=8)

    assert found == Degrees(dp=2, tp=2, sequence_parallel=True, schedule="gpipe", global_batch=8)


def test_the_suite_has_distinct_events_that_run() -> None:
    """Every op runs in ONNX Runtime on numpy arrays; the larger ones are left out here."""
    tasks = list(suite(2, 2, "fp32"))
    place = Place(NumpyMemory(), Engine(NumpyMemory()), None, 0)

    assert len({task.id for task in tasks}) == len(tasks)
    kinds = set()
    for task in tasks:
        if task.work is not None and sum(np.prod(feed.shape) for feed in task.work.inputs) < 1e6:
            model_action(task.work, place)()
            assert isinstance(task.event, OpEvent)
            kinds.add(task.event.kind)
    assert kinds == {"MatMul", "Add", "Gelu", "Softmax", "LayerNormalization", "Transpose", "Attention"}


def test_models_of_events_run(cache_dir: Path) -> None:
    """Ops and pieces of a training step, a call of nothing, and products one after the other."""
    place = Place(NumpyMemory(), Engine(NumpyMemory()), None, 0)
    found = _extracted(_setting(cache_dir), Degrees(tp=2, global_batch=2))

    for task in found.tasks.values():
        if task.work is not None:
            results = model_action(task.work, place)()
            assert isinstance(results, dict)
            assert results.keys() == {port.name for port in task.work.outputs}
    assert model_action(launch_work(), place)() is not None
    assert model_action(products_work(8, 3), place)() is not None
    assert LaunchEvent() == LaunchEvent()


def test_measured_share_counts_only_what_is_known(cache_dir: Path) -> None:
    """Without transfers the share is what compute has of the step."""
    setting = _setting(cache_dir)
    degrees = setting.predictor.settled(Degrees(dp=2, global_batch=2))
    machine = job_machine(2, setting.cluster)
    costs = CostModel(machine, setting.policy, setting.stack)
    found = _extracted(setting, degrees)
    some = Extraction({name: task for name, task in found.tasks.items() if isinstance(task.event, OpEvent)})
    program, _ = setting.predictor.lowered(degrees, machine, setting.stack, policy=setting.policy)

    share = simulate(program, priced(costs, _profile(some, factor=1.0, costs=costs))).measured

    assert share is not None
    assert 0.01 < share < 0.95
