"""Collectives of tactics against counts derived by hand.

A decoder of L layers has 9 parameters a layer, 4 of them matrices, and an embedding that is also the head. Gradients of
all 9L + 1 parameters and the loss are summed over the batch axis; a pair of products costs one sum forward and one
backward. ZeRO-2 turns the sums of the 4L + 1 matrices into reduce-scatters and gathers what the update made; ZeRO-3
gathers each matrix of a layer forward and backward, and the embedding at each of its three uses.
"""

from pathlib import Path

import pytest

from autopar.errors import TacticError
from autopar.sharding import Mesh
from autopar.tactics import DataParallel, ExpertParallel, Megatron, Replicate, Shard, Tactic, ZeRO
from autopar.workload import open_workload
from tests.executions import TINY
from tests.shares import one_in
from tests.tactic_models import chain, counts, decode_step, decoder, draft, fork, graph_network, unet

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


@pytest.mark.parametrize("num_layers", one_in(2, [4, 32, 48]))
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


@pytest.mark.parametrize("num_layers", one_in(2, [4, 32, 48]))
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


def test_terms_that_one_reader_needs_reduced_are_reduced_once_for_all(cache_dir: Path) -> None:
    """Passed on to the other reader they would be reduced again behind it."""
    assert counts(draft(fork(), Mesh.of(b=4, m=2), 256, cache_dir), (W1_ON_M,)) == (0, 1, 0, 0)


def test_the_earlier_tactic_wins(cache_dir: Path) -> None:
    first = draft(chain(), Mesh.of(b=4, m=2), 256, cache_dir)
    counts(first, (X_ON_B, W1_ON_M, Z3_CHAIN))
    second = draft(chain(), Mesh.of(b=4, m=2), 256, cache_dir)
    counts(second, (Z3_CHAIN, X_ON_B, W1_ON_M))

    splits = [draft.state.split("y", 0) for draft in (first, second)]

    assert [split.dim for split in splits if split is not None] == [0, 1]
    assert not first.steps[-1].conflicts
    assert [conflict.op for step in second.steps for conflict in step.conflicts] == ["y"]


MQ = (
    Replicate("*.new_*", "m"),  # one head of keys and values: every device makes it for all samples
    Shard({"*.wq": 2, "*.scores": 0, "*.attended": 0, "*.merged": 2}, "m"),
)


@pytest.mark.parametrize("num_layers", [2, 32])
@pytest.mark.parametrize("trips", [1, 1536])
def test_a_decoding_loop_counts_every_trip(num_layers: int, trips: int, cache_dir: Path) -> None:
    """Two sums a layer; with one head of keys split along the batch, two exchanges a layer as well.

    Exchanged are the queries, which come by heads, and what they attend to, which goes on by heads. PartIR has 98,304
    sums for 32 layers and 1536 trips, too, and exchanges in all trips but the first, which gathers.
    """
    model, n = decode_step(num_layers), num_layers * trips

    def count(*schedule: Tactic) -> tuple[int, int, int, int]:
        return counts(draft(model, Mesh.of(b=2, m=2), 16, cache_dir, trips=trips), schedule)

    assert count(B) == (0, 0, 0, 0)
    assert count(M) == (0, 2 * n, 0, 0)
    assert count(B, M) == (0, 2 * n, 0, 0)
    assert count(B, *MQ, M) == (0, 2 * n, 0, 2 * n)


def test_training_steps_run_in_no_loop(cache_dir: Path) -> None:
    with pytest.raises(TacticError, match="2 trips"):
        draft(decoder(2), MESH, 16, cache_dir, trips=2)


@pytest.mark.parametrize("depth", [2, 4])
def test_unet(depth: int, cache_dir: Path) -> None:
    """A stem and four convolutions a level, each with a bias: n of both.

    ZeRO-3 gathers weights forward and backward, but for the backward of the stem: an image needs no gradient.
    """
    model, n = unet(depth), 4 * depth + 1

    def count(*schedule: Tactic) -> tuple[int, int, int, int]:
        return counts(draft(model, Mesh.of(b=8), 8, cache_dir), schedule)

    assert count(B) == (0, 2 * n + 1, 0, 0)
    assert count(B, ZeRO(2, "b")) == (n, n + 1, n, 0)
    assert count(B, ZeRO(2, "b", min_dims=1)) == (2 * n, 1, 2 * n, 0)
    assert count(B, ZeRO(3, "b")) == (2 * n - 1, n + 1, n, 0)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_graph_network_by_edges(steps: int, cache_dir: Path) -> None:
    """Summed over edges are, per step, what nodes hear and the gradients of the two parameters of edges.

    So is the gradient of the nodes, which comes in terms from senders and from receivers and is summed once; the first
    nodes are data and need none.
    """
    edges = Shard({"edges": 1, "senders": 1, "receivers": 1}, "b")
    model = graph_network(steps)

    assert counts(draft(model, Mesh.of(b=4), 16, cache_dir), (edges,)) == (0, 4 * steps - 1, 0, 0)
    # The batch sums the gradients of all four parameters of a step, and the loss.
    assert counts(draft(model, Mesh.of(b=4), 16, cache_dir), (B,)) == (0, 4 * steps + 1, 0, 0)


@pytest.mark.parametrize("num_layers", [2, 3])
def test_experts_exchange_tokens(num_layers: int, cache_dir: Path) -> None:
    """Nine exchanges a layer, counted per use; no expert and no token is gathered.

    Forward, tokens go to two products and come back from one. Backward, the gradient of what came back goes to two
    products, the tokens go to two gradients of weights, and the gradient of the tokens comes back in two terms. Summed
    are the gradients of the 7 other parameters of a layer, of 3 outside the layers, and the loss.
    """
    model = open_workload("zoo:mixtral-8x7b", dims={**TINY["mixtral-8x7b"], "num_layers": num_layers})

    found = counts(draft(model, Mesh.of(e=4), 8, cache_dir), (ExpertParallel("e"),))

    assert found == (0, 7 * num_layers + 4, 0, 9 * num_layers)
