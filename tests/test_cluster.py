"""Clusters: presets hold the published figures, files round-trip, errors name the field and its unit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autopar.cluster import (
    PRESETS,
    Cluster,
    Domain,
    Nics,
    NodeGroup,
    cluster_from_dict,
    cluster_schema,
    format_cluster,
    load_cluster,
    parse_cluster,
    sources,
)
from autopar.cluster.host import Host
from autopar.cost import CostModel, Stack, default_limit, load_policy, stage_limit
from autopar.cost.collectives import Collective
from autopar.cost.stack import parse_stack
from autopar.errors import AutoparError, ClusterError, StackError
from autopar.ir.graph import Op
from autopar.sharding import Axis

DOCS = Path(__file__).parents[1] / "docs" / "clusters.md"

SMALL = """\
name: small
devices_per_node: 2
device:
  name: card
  peaks: {half: 100 TFLOP/s}
  memory: 16 GB
  memory_bandwidth: 500 GB/s
intra: {tier: PCIe, bandwidth: 20 GB/s, latency: 10 us}
inter: {tier: Ethernet, bandwidth: 1 GB/s, latency: 50 us, ramp: 2 MB}
"""


@pytest.mark.parametrize(
    ("name", "half", "memory", "memory_bandwidth"),
    [
        ("a100", 312e12, 80e9, 2.039e12),
        ("a100-40", 312e12, 40e9, 1.555e12),
        ("h100", 989e12, 80e9, 3.35e12),
        ("h200", 989e12, 141e9, 4.8e12),
        ("v100", 125e12, 32e9, 900e9),
        ("b200", 2.25e15, 180e9, 8e12),
        ("gb200", 2.5e15, 186e9, 8e12),
        ("l4", 121e12, 24e9, 300e9),
        ("rtx4090", 165.2e12, 24e9, 1.008e12),
        ("mi300x", 1307.4e12, 192e9, 5.3e12),
        ("tpu-v5p", 459e12, 95 * 2.0**30, 2.765e12),
    ],
)
def test_presets_have_the_figures_of_the_data_sheets(
    name: str, half: float, memory: float, memory_bandwidth: float
) -> None:
    cluster = load_cluster(name)

    assert cluster.device.peak("half") == half
    assert cluster.device.memory == memory
    assert cluster.device.memory_bandwidth == memory_bandwidth


@pytest.mark.parametrize(
    ("name", "devices", "count", "rate"),
    [
        ("a100", 8, 8, 25e9),
        ("a100-4hdr", 8, 4, 25e9),
        ("a100-opa", 8, 4, 12.5e9),
        ("h100", 8, 8, 50e9),
        ("b300", 8, 8, 100e9),
        ("gb200", 72, 72, 50e9),
        ("v100", 8, 4, 12.5e9),
        ("v100-aws", 8, 1, 3.125e9),
    ],
)
def test_presets_share_the_nics_of_a_node(name: str, devices: int, count: int, rate: float) -> None:
    cluster = load_cluster(name)

    assert (cluster.devices_per_node, cluster.inter.nics) == (devices, Nics(count, rate))
    assert cluster.inter.bandwidth == count * rate * 0.955 / devices


@pytest.mark.parametrize("cluster", PRESETS.values(), ids=PRESETS.keys())
def test_every_part_of_a_preset_has_a_source(cluster: Cluster) -> None:
    assert "stated by the user" not in sources(cluster).values()
    assert set(sources(cluster)) >= {"device", "intra", "inter"}


def test_slices_of_tpus_are_named_by_their_shape() -> None:
    cluster = load_cluster("tpu-v5p-4x4x8")

    assert (cluster.devices_per_node, cluster.intra.torus) == (128, (4, 4, 8))
    with pytest.raises(ClusterError, match="a slice of tpu-v5p has 3 axes"):
        load_cluster("tpu-v5p-4x4")
    with pytest.raises(ClusterError, match="no cluster 'h100-2x4'"):
        load_cluster("h100-2x4")


def test_a100_means_the_80_gb_version() -> None:
    assert load_cluster("A100") is load_cluster("a100-80")


@pytest.mark.parametrize("cluster", PRESETS.values(), ids=PRESETS.keys())
def test_clusters_survive_being_written_and_read(cluster: Cluster) -> None:
    assert parse_cluster(format_cluster(cluster)) == cluster
    assert cluster_from_dict(cluster.to_dict()) == cluster


def test_files_take_quantities_with_units(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)

    cluster = load_cluster(path)

    assert cluster.device.peak("half") == 100e12
    assert cluster.intra.latency == pytest.approx(10e-6)
    assert (cluster.intra.ramp, cluster.inter.ramp) == (0.0, 2e6)


def test_the_example_of_the_docs_is_a_cluster() -> None:
    """The cluster files of docs/clusters.md: the first has the NICs of a100-4hdr, the second has groups."""
    _, first, second = DOCS.read_text(encoding="utf-8").split("```yaml\n# cluster file\n")

    cluster, mixed = (parse_cluster(text.split("```")[0]) for text in (first, second))

    assert cluster.device == load_cluster("a100-4hdr").device
    assert cluster.inter.nics == load_cluster("a100-4hdr").inter.nics
    assert [tuning.operation for tuning in cluster.intra.tunings] == ["all_reduce", "send"]
    assert [group.devices for group in mixed.groups] == [32, 64]


def test_files_without_newer_fields_stay_readable() -> None:
    """The cluster of the published runs on a CPU states bandwidths per device and no tunings."""
    cluster = load_cluster(DOCS.parent / "benchmarks" / "cpu2.yaml")

    assert cluster.devices_per_node == 2
    assert not cluster.intra.tunings


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("16 GB", "16 Gb", "device.memory: '16 Gb' is not in B"),
        ("16 GB", "16", "device.memory: 16 has no unit"),
        ("100 TFLOP/s", "100.5", "device.peaks.half: 100.5 has no unit"),
        ("100 TFLOP/s", "100 TFLOPS", "device.peaks.half: '100 TFLOPS' is not in FLOP/s"),
        ("10 us", "10 GB", "intra.latency: '10 GB' is not a time"),
        ("1 GB/s", "8 Gb/s", "inter.bandwidth: '8 Gb/s' is not in B/s"),
        ("1 GB/s", "0 GB/s", "link 'Ethernet': bandwidth is 0"),
        ("devices_per_node: 2", "devices_per_node: 0", "cluster 'small': devices_per_node is 0"),
        ("devices_per_node: 2", "devices_per_node: two", "Expected `int | null`, got `str` - at `$.devices_per_node`"),
        ("  memory: 16 GB\n", "", "missing required field `memory` - at `$.device`"),
        ("memory:", "mem: 1 B\n  memory:", "unknown field `mem` - at `$.device`"),
        ("peaks: {half: 100 TFLOP/s}", "peaks: {}", "device 'card' has no peaks"),
        ("memory: 16 GB", "memory: 16 GB\n  gemm_efficiency: 1.5", "device 'card': gemm_efficiency is 1.5"),
        ("ramp: 2 MB", "ramp_exponent: 1", "link 'Ethernet': ramp_exponent is 1"),
        ("{half", "[half", "small.yaml"),
        ("ramp: 2 MB", "nics: {count: 2, rate: 100 Gb/s}", "inter states bandwidth and nics"),
        ("bandwidth: 1 GB/s, ", "", "inter states no bandwidth"),
        ("bandwidth: 1 GB/s", "nics: {count: 0, rate: 100 Gb/s}", "nics: count is 0"),
        ("bandwidth: 1 GB/s", "nics: {count: 1, rate: 100 Xb/s}", "inter.nics.rate: '100 Xb/s' has the unknown prefix"),
        ("bandwidth: 1 GB/s", "nics: {count: 1, rate: 100}", "inter.nics.rate: 100 has no unit"),
        (
            "ramp: 2 MB",
            "tunings: [{operation: reduce, bandwidth: 1 GB/s, latency: 1 us}]",
            "there is a tuning of 'reduce'",
        ),
        (
            "ramp: 2 MB",
            "tunings: [{operation: send, bandwidth: 1 GB, latency: 1 us}]",
            "inter.tunings[0].bandwidth: '1 GB' is not in B/s",
        ),
        ("latency: 10 us}", "latency: 10 us, torus: [2, 2]}", "the torus of intra has 4 devices"),
        ("latency: 10 us}", "latency: 10 us, overlap_slowdown: 0.5}", "overlap_slowdown is 0.5"),
        (
            "inter:",
            "domains: [{devices: 5, link: {tier: WAN, bandwidth: 1 GB/s, latency: 1 ms}}]\ninter:",
            "a domain of 5 devices does not consist of domains of 2",
        ),
        ("device:", "groups: [{nodes: 2, cluster: a100}]\ndevice:", "devices_per_node: the cluster has groups"),
        ("device:", "between: {tier: WAN, bandwidth: 1 GB/s, latency: 1 ms}\ndevice:", "between: there are no groups"),
    ],
)
def test_errors_name_file_field_and_unit(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace(old, new))

    with pytest.raises(ClusterError) as caught:
        load_cluster(path)

    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("read", "error"), [(parse_cluster, ClusterError), (parse_stack, StackError)], ids=["cluster", "stack"]
)
def test_a_text_that_is_no_yaml_is_said_so_in_one_line(read: Callable[..., object], error: type[AutoparError]) -> None:
    """With the name of its file and the line; as for pins."""
    for text, message in (
        ("name: x\ndevice: [1, 2\nintra: 3\n", "own.yaml, line 3: expected ',' or ']', but got ':'"),
        ("name: \x01", "own.yaml: unacceptable character #x0001: special characters are not allowed"),
    ):
        with pytest.raises(error) as caught:
            read(text, "own.yaml")

        assert caught.value.args[0] == message


def test_unknown_names_get_the_nearest_known_one_as_hint() -> None:
    with pytest.raises(ClusterError, match="there is no cluster 'h10'") as caught:
        load_cluster("h10")

    assert caught.value.hint.startswith("did you mean h100")


def test_missing_files_are_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"nowhere\.yaml cannot be read"):
        load_cluster(tmp_path / "nowhere.yaml")


def test_a_missing_peak_is_an_error_that_lists_the_others() -> None:
    with pytest.raises(ClusterError, match="no peak for 'fp8'") as caught:
        load_cluster("v100").device.peak("fp8")

    assert caught.value.hint == "it has half, single"


BETWEEN = load_cluster("v100").inter
MIXED = Cluster.mixed("mixed", (NodeGroup(4, load_cluster("a100")), NodeGroup(8, load_cluster("h100"))), BETWEEN)


def test_mixed_clusters_survive_being_written_and_read() -> None:
    assert parse_cluster(format_cluster(MIXED)) == MIXED
    assert cluster_from_dict(MIXED.to_dict()) == MIXED


def test_price_of_a_mixed_cluster_is_that_of_the_devices_used() -> None:
    """Group by group; unknown if it is of one that is used. It survives being written and read."""
    cheap, dear = (replace(load_cluster(name), gpu_hour_price=price) for name, price in (("a100", 1.5), ("h100", 3.0)))
    both = Cluster.mixed("mixed", (NodeGroup(1, cheap), NodeGroup(2, dear)), BETWEEN)
    partly = Cluster.mixed("mixed", (NodeGroup(1, cheap), NodeGroup(2, load_cluster("h100"))), BETWEEN)

    assert [both.hour_price(devices) for devices in (4, 8, 16)] == [6.0, 12.0, 12.0 + 24.0]
    assert [partly.hour_price(devices) for devices in (8, 16)] == [12.0, None]
    assert cheap.hour_price(4) == 6.0
    assert load_cluster("h100").hour_price(4) is None
    assert parse_cluster(format_cluster(both)) == both
    with pytest.raises(ClusterError, match="gpu_hour_price"):
        replace(cheap, gpu_hour_price=0.0)


def test_devices_of_a_mixed_cluster_belong_to_their_group() -> None:
    """4 nodes of 8 A100, then 8 nodes of 8 H100: devices 0 to 31 and 32 to 95."""
    assert [MIXED.group_of(device).name for device in (0, 31, 32, 95)] == ["a100", "a100", "h100", "h100"]
    assert [MIXED.on(range(*ends)).name for ends in ((0, 32), (32, 96), (24, 40))] == ["a100", "h100", "mixed"]
    assert [MIXED.tier(*pair) for pair in ((0, 7), (0, 8), (31, 32), (32, 39), (39, 40))] == [0, 1, 1, 0, 1]
    with pytest.raises(ClusterError, match="has 96 devices, none with number 96"):
        MIXED.group_of(96)


def test_what_holds_on_all_devices_of_a_mixed_cluster_is_the_least_of_each_figure() -> None:
    a100, h100 = load_cluster("a100"), load_cluster("h100")

    assert MIXED.device.peaks == a100.device.peaks
    assert MIXED.device.launch == max(a100.device.launch, h100.device.launch)
    assert MIXED.device.gemm_efficiency == min(a100.device.gemm_efficiency, h100.device.gemm_efficiency)
    assert MIXED.intra.bandwidth == a100.intra.bandwidth
    assert MIXED.inter.bandwidth == BETWEEN.bandwidth
    assert replace(MIXED, name="other") != MIXED


def test_equal_nodes_are_their_own_group() -> None:
    cluster = load_cluster("h100")

    assert cluster.group_of(10_000) is cluster.on(range(8, 24)) is cluster


def test_devices_that_start_inside_a_node_work_on_smaller_ones() -> None:
    """No node is shared by a part of their mesh; a domain that is no larger than its nodes is none."""
    h100 = load_cluster("h100")
    far = replace(h100.inter, bandwidth=1e9, nics=None)
    wide = replace(h100, domains=(Domain(32, far),))

    assert [h100.on(range(*ends)).devices_per_node for ends in ((2, 6), (4, 12), (6, 30), (8, 20))] == [8, 4, 2, 8]
    assert wide.on(range(4, 36)).tiers == ((1, h100.intra), (4, far))
    assert wide.on(range(4, 20)).tiers == ((1, h100.intra), (4, replace(h100.inter, nics=None)), (32, far))
    assert MIXED.on(range(36, 44)).devices_per_node == 4


def test_groups_need_numbers_in_common_and_cannot_be_nested() -> None:
    single = replace(load_cluster("a100"), device=replace(load_cluster("a100").device, peaks=(("single", 1e12),)))
    half = replace(single, device=replace(single.device, peaks=(("half", 1e12),)))

    with pytest.raises(ClusterError, match="no class of numbers in common"):
        Cluster.mixed("mixed", (NodeGroup(1, single), NodeGroup(1, half)), BETWEEN)
    with pytest.raises(ClusterError, match="has groups of its own"):
        NodeGroup(1, MIXED)
    with pytest.raises(ClusterError, match="has no groups"):
        Cluster.mixed("mixed", (), BETWEEN)


def test_the_schema_lists_the_fields_of_a_cluster_file() -> None:
    definitions = cluster_schema()["$defs"]

    assert isinstance(definitions, dict)
    assert {"name", "intra", "inter", "domains", "groups", "between"} <= set(definitions["_ClusterFile"]["properties"])


@pytest.mark.parametrize(
    ("name", "devices", "per_node", "torus"),
    [
        ("tpu-v5p", 128, 128, (4, 4, 8)),
        ("tpu-v5p", 4096, 4096, (16, 16, 16)),
        ("tpu-v5e", 16, 16, (4, 4)),
        ("tpu-v5p", 7, 7, (1, 1, 7)),
        ("tpu-v5p", 10_000, 6144, (16, 16, 24)),
        ("h100", 6, 6, ()),
        ("h100", 4, 8, ()),
        ("h100", 64, 8, ()),
        ("gb200", 64, 64, ()),
        ("gb200", 128, 64, ()),
        ("gb200", 144, 72, ()),
        ("gb200", 36, 72, ()),
        ("h100", 12, 8, ()),
        ("a100-4hdr", 3, 3, ()),
    ],
)
def test_a_job_gets_a_slice_of_its_size_or_part_of_a_node(
    name: str, devices: int, per_node: int, torus: tuple[int, ...]
) -> None:
    """Slices are as close to cubes of whole rings as can be; 4 devices divide a node of 8, 6 do not."""
    cluster = load_cluster(name).of_job(devices)

    assert (cluster.devices_per_node, cluster.intra.torus) == (per_node, torus)
    assert cluster_from_dict(cluster.to_dict()) == cluster
    assert MIXED.of_job(40) is MIXED


def test_a_part_of_a_node_has_no_more_than_a_nic_per_device() -> None:
    """3 of 8 devices with 8 NICs have one each; with 4 NICs they share four, and use three."""
    assert load_cluster("a100").of_job(3).inter.bandwidth == load_cluster("a100").inter.bandwidth
    assert load_cluster("a100-4hdr").of_job(3).inter.bandwidth == load_cluster("a100").inter.bandwidth


@pytest.mark.parametrize("cluster", [load_cluster("h100"), load_cluster("a100-pcie"), MIXED], ids=lambda c: c.name)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
def test_stages_meet_on_the_widest_tier_of_any_pair_of_devices(cluster: Cluster, size: int) -> None:
    for start in range(0, 48, size):
        pairs = [cluster.tier(device, device + size) for device in range(start, start + size)]

        assert cluster.boundary_tier(start, size) == max(pairs)


def test_the_peak_of_a_mixed_cluster_is_that_of_the_devices_used() -> None:
    """32 A100 of 312 TFLOP/s, then 8 H100 of 989 TFLOP/s."""
    assert MIXED.total_peak("half", 40) == pytest.approx(32 * 312e12 + 8 * 989e12)
    assert load_cluster("h100").total_peak("half", 16) == pytest.approx(16 * 989e12)


def test_a_job_inside_the_first_group_has_nothing_to_do_with_the_others() -> None:
    """It gets the devices, links and memory of its own nodes."""
    assert MIXED.of_job(32) == load_cluster("a100")
    assert MIXED.of_job(4) == load_cluster("a100").of_job(4)
    assert MIXED.of_job(40) == MIXED


def test_each_group_of_a_mixed_cluster_may_use_its_own_memory() -> None:
    """Unless a limit was given, which holds for all; devices of two groups have what the smaller one has."""
    small, large = replace(load_cluster("a100-40"), name="small"), load_cluster("h100")
    mixed = Cluster.mixed("mixed", (NodeGroup(1, small), NodeGroup(1, large)), BETWEEN)
    usual = default_limit(mixed)

    assert [stage_limit(mixed, usual, range(*ends)) for ends in ((0, 8), (8, 16), (4, 12))] == [
        default_limit(small),
        default_limit(large),
        default_limit(small),
    ]
    assert stage_limit(mixed, 30e9, range(8, 16)) == 30e9


def _costs(cluster: Cluster) -> list[float]:
    """Return what a cluster makes of ops, collectives, sends, host copies, memory and prices."""
    found = [default_limit(cluster), cluster.hour_price(8) or 0.0]
    if "fp8" in dict(cluster.device.peaks):
        found.append(CostModel(cluster, load_policy("fp8")).policy.copies)
    for attention in ("fused", "unfused"):
        for numbers in ("mixed", "fp32"):
            costs = CostModel(cluster, load_policy(numbers), Stack("any", attention))
            for kind, shapes in _OPS:
                inputs = [np.array([shape]) for shape in shapes]
                op = Op("op", kind, tuple(f"x{i}" for i in range(len(shapes))), ("y",), (("q_num_heads", 4),))
                sizes = dict.fromkeys((*op.inputs, "y"), 2.0)
                found.append(float(costs.op_seconds(op, inputs, [inputs[0]], sizes)[0]))
    costs = CostModel(cluster)
    node = cluster.devices_per_node
    tiers = len(cluster.tiers)
    spans = [2, node, *(2 * inner for inner, _ in cluster.tiers[1:])]
    axes = [Axis("a", size, 1) for size in spans] + [Axis("a", count, node) for count in (2, 32)]
    for nbytes in (64.0, 1e8):
        for axis in axes:
            found += [costs.collective_seconds(kind, nbytes, axis) for kind in Collective]
            found += [costs.exchange_seconds(nbytes, axis), costs.overlap_slowdown(axis)]
        found += [costs.send_seconds(nbytes, tier) for tier in range(tiers)]
    if cluster.host is not None:
        found += [float(value) for value in vars_of(cluster.host)]
    return found


def vars_of(host: Host) -> tuple[float, ...]:
    """Return what copies to a host are priced by."""
    return host.usable, host.to_host, host.to_device, host.latency, host.sharing, host.full_duplex, host.devices


_OPS = (
    ("MatMul", ((4096, 4096), (4096, 4096))),
    ("MatMul", ((8, 8), (8, 8))),
    ("MatMul", ((64, 128, 64), (64, 64, 128))),
    ("Add", ((4096, 4096), (4096, 4096))),
    ("Attention", ((4, 16, 1024, 64), (4, 16, 1024, 64), (4, 16, 1024, 64))),
)
"""Large and small products, batches of them, and what is bound by memory: kinds and input shapes."""


def _edited(content: Any, path: tuple[Any, ...]) -> Any:
    """Return a file's content with one value changed by a half: a number, a quantity, a size of a torus."""
    if path:
        if isinstance(content, list):
            return [_edited(own, path[1:]) if index == path[0] else own for index, own in enumerate(content)]
        return {key: _edited(own, path[1:]) if key == path[0] else own for key, own in content.items()}
    if isinstance(content, bool):
        return not content
    if isinstance(content, int):
        return max(1, content // 2) if content > 1 else 2
    if isinstance(content, float):
        return content / 2
    number, _, unit = content.partition(" ")
    return f"{float(number) / 2:.17g} {unit}" if float(number) else f"1 {unit}"


def _leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values that are no names, but for tunings, which have tests of their own."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in ("name", "tier", "operation", "tunings", "tuned_at"):
                yield from _leaves(value, (*path, key))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from _leaves(value, (*path, index))
    else:
        yield path


_WITHOUT_EFFECT = {"tf32", "fp8", "fp4", "int8", "wraps"}
"""Not held here: classes of numbers below 16 bits (`test_precision.py`), and which axes of a torus are rings."""


@pytest.mark.parametrize("name", ["a100", "b200-efa", "a100-pcie", "tpu-v5p"])
def test_every_field_of_a_file_counts_when_it_is_edited(name: str) -> None:
    """As the tutorial says: take the nearest cluster, change what differs; each edit changes a cost or is refused."""
    content = yaml.safe_load(format_cluster(load_cluster(name)))
    content["gpu_hour_price"] = 2.0
    before = _costs(cluster_from_dict(content))

    unchanged = []
    for path in _leaves(content):
        if _WITHOUT_EFFECT.isdisjoint(path):
            try:
                edited = cluster_from_dict(_edited(content, path))
            except ClusterError:
                continue
            if _costs(edited) == before:
                unchanged.append(path)

    assert not unchanged


@pytest.mark.parametrize("name", PRESETS)
def test_all_operations_follow_a_slower_link(name: str) -> None:
    """A link edited to a fortieth of its bandwidth takes about forty times as long for much data, whatever is tuned."""
    content = yaml.safe_load(format_cluster(load_cluster(name)))
    preset = load_cluster(name)
    costs = CostModel(preset)
    inter = content["inter"]
    if "nics" in inter:
        inter["nics"]["rate"] = f"{preset.inter.nics.rate / 40:.17g} B/s" if preset.inter.nics else ""
    else:
        inter["bandwidth"] = f"{preset.inter.bandwidth / 40:.17g} B/s"

    edited = CostModel(cluster_from_dict(content))

    axis = Axis("a", 2, preset.devices_per_node)
    for kind in Collective:
        ratio = edited.collective_seconds(kind, 1e10, axis) / costs.collective_seconds(kind, 1e10, axis)
        assert 35 < ratio < 40.1, kind
    assert 35 < edited.send_seconds(1e10, 1) / costs.send_seconds(1e10, 1) < 40.1


def test_tunings_that_exceed_their_link_are_refused() -> None:
    """A file from before `tuned_at` whose link was edited: 48 GB/s over NICs of 1.25 GB/s."""
    content = load_cluster("a100").to_dict()
    inter: Any = content["inter"]
    inter["nics"] = {"count": 1, "rate": "1.25 GB/s"}

    with pytest.raises(ClusterError, match=r"inter.tunings\[0\]: all_reduce reaches .* over a link of") as caught:
        cluster_from_dict(content)

    assert "tuned_at" in (caught.value.hint or "")
