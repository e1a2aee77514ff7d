"""Clusters: presets hold the published figures, files round-trip, errors name the field and its unit."""

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import PRESETS, Cluster, cluster_from_dict, format_cluster, load_cluster, parse_cluster
from autopar.errors import ClusterError

DOCS = Path(__file__).parents[1] / "docs" / "cost_model.md"

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
    ],
)
def test_presets_have_the_figures_of_the_data_sheets(
    name: str, half: float, memory: float, memory_bandwidth: float
) -> None:
    cluster = load_cluster(name)

    assert cluster.device.peak("half") == half
    assert cluster.device.memory == memory
    assert cluster.device.memory_bandwidth == memory_bandwidth
    assert cluster.devices_per_node == 8


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
    """The YAML block of docs/cost_model.md states every field, and it is the a100 preset."""
    example = DOCS.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]

    cluster = parse_cluster(example)

    assert replace(cluster, name="a100") == load_cluster("a100")


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
