"""Collectives of tactics against counts derived by hand.

A decoder of L layers has 9 parameters a layer, 4 of them matrices, and an embedding that is also the head. Gradients of
all 9L + 1 parameters and the loss are summed over the batch axis; a pair of products costs one sum forward and one
backward. ZeRO-2 turns the sums of the 4L + 1 matrices into reduce-scatters and gathers what the update made; ZeRO-3
gathers each matrix of a layer forward and backward, and the embedding at each of its three uses.
"""

from pathlib import Path

import pytest

from autopar.sharding import Mesh
from autopar.tactics import DataParallel, Megatron, Shard, Tactic, ZeRO
from tests.tactic_models import chain, counts, decoder, draft

B, M, Z2, Z3 = DataParallel("b"), Megatron("m"), ZeRO(2, "b"), ZeRO(3, "b")
EMBEDDING = Shard({"embed": 1}, "m")
MESH = Mesh.of(b=8, m=4)
SCHEDULES: dict[str, tuple[Tactic, ...]] = {
    "BP": (B,),
    "MP": (M,),
    "BP+MP": (B, M),
    "BP+MP+Z2": (B, M, Z2),
    "BP+MP+Z3": (B, M, Z3),
    "BP+MP+Z3+EMB": (B, M, Z3, EMBEDDING),
    "MP+EMB": (M, EMBEDDING),
}


@pytest.mark.parametrize("num_layers", [4, 32, 48])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_decoder_has_the_collectives_partir_counts(num_layers: int, norm: str, cache_dir: Path) -> None:
    n = num_layers
    expected = {
        "BP": (0, 9 * n + 2, 0, 0),
        "MP": (0, 4 * n, 0, 0),
        "BP+MP": (0, 13 * n + 2, 0, 0),
        "BP+MP+Z2": (4 * n + 1, 9 * n + 1, 4 * n + 1, 0),
        "BP+MP+Z3": (8 * n + 3, 9 * n + 1, 4 * n + 1, 0),
    }
    workload = decoder(n, norm=norm)

    found = {name: counts(draft(workload, MESH, 16, cache_dir), SCHEDULES[name]) for name in expected}

    assert found == expected


@pytest.mark.parametrize("num_layers", [4, 32, 48])
def test_an_embedding_split_along_its_width_splits_the_residual_stream(num_layers: int, cache_dir: Path) -> None:
    """Each of 4 products a layer gathers forward or backward twice; the means of an RMSNorm are summed 4 times."""
    n = num_layers
    workload = decoder(n, norm="rms")

    with_zero = counts(draft(workload, MESH, 16, cache_dir), SCHEDULES["BP+MP+Z3+EMB"])
    alone = counts(draft(workload, MESH, 16, cache_dir), SCHEDULES["MP+EMB"])

    # PartIR's table has the same gathers and scatters; its sums depend on how the norm is written.
    assert with_zero == (16 * n + 3, 9 * n + 2, 8 * n + 1, 0)
    assert alone == (8 * n, 4 * n + 1, 4 * n, 0)


X_ON_B, W1_ON_M, Z3_CHAIN = Shard({"x": 0}, "b"), Shard({"w1": 1}, "m"), Shard({"w1": 0, "w2": 1}, "b")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ((X_ON_B,), (0, 0, 0, 0)),
        ((X_ON_B, W1_ON_M), (0, 1, 0, 0)),  # the rows of w2 follow the columns of w1
        ((X_ON_B, W1_ON_M, Z3_CHAIN), (2, 1, 0, 0)),  # each weight is gathered once, just before use
        # The columns of w2 were split first, so the result is: h is gathered instead of w2. Shardy gathers w2 and
        # exchanges the result (2 gathers and an all-to-all), which moves more.
        ((Z3_CHAIN, X_ON_B, W1_ON_M), (2, 1, 0, 0)),
    ],
)
def test_two_products(schedule: tuple[Tactic, ...], expected: tuple[int, int, int, int], cache_dir: Path) -> None:
    assert counts(draft(chain(), Mesh.of(b=4, m=2), 256, cache_dir), schedule) == expected


def test_the_earlier_tactic_wins(cache_dir: Path) -> None:
    first = draft(chain(), Mesh.of(b=4, m=2), 256, cache_dir)
    counts(first, (X_ON_B, W1_ON_M, Z3_CHAIN))
    second = draft(chain(), Mesh.of(b=4, m=2), 256, cache_dir)
    counts(second, (Z3_CHAIN, X_ON_B, W1_ON_M))

    splits = [draft.state.split("y", 0) for draft in (first, second)]

    assert [split.dim for split in splits if split is not None] == [0, 1]
    assert not first.steps[-1].conflicts
    assert [conflict.op for step in second.steps for conflict in step.conflicts] == ["y"]
