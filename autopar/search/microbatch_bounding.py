"""Bounds on microbatches on meshes of three axes, before any of these meshes is worked on.

Few meshes of two free axes and few numbers of samples serve many meshes of three, numbers of stages and schedules: what
is found on outer × inner with s samples (`bounds/submesh.py`) holds on dp × outer × inner with dp s samples for every
dp, and something follows for divisors of s (`bounds/transfer.py`).
"""

from collections.abc import Sequence
from math import inf

from autopar.bounds.submesh_tables import minor_mesh
from autopar.bounds.transfer import ALL, Carried
from autopar.configuration import Configuration, Family
from autopar.search.context import SearchContext
from autopar.search.frontier import Series
from autopar.search.outcome import Outcome
from autopar.search.reporting import tell
from autopar.search.tasks import Finding, Piece, Work
from autopar.sharding import Mesh


class Pacing(Series):
    """Finds what microbatches take at least on pairs of free axes where that may exclude something, least floors first.

    Args:
        search: What it is part of.
        outcome: What is known, and is added to.
        space: The configurations, on meshes of three axes.
        carried: What follows from what is known of others; added to.
        elsewhere: No plan of the other configurations has a lower objective, in seconds.

    Attributes:
        count: How many pairs of free axes and numbers of samples there are.
    """

    def __init__(
        self, search: SearchContext, outcome: Outcome, space: Sequence[Family], carried: Carried, elsewhere: float
    ) -> None:
        self._search, self._outcome, self._space, self._carried = search, outcome, space, carried
        self._elsewhere = elsewhere
        floors = sorted((search.least(family), number) for number, family in enumerate(space))
        self._bounds = [*floors]
        few, many = search.floor.samples
        takes_any = few < many  # else there may be no graph of a part of the only number of samples
        self._alike: dict[tuple[Mesh, int], list[tuple[float, int]]] = {}
        for floor, number in floors:
            if takes_any and floor < outcome.best and self._has_samples(space[number]):
                self._alike.setdefault(self._key(space[number]), []).append((floor, number))
        self._keys = list(self._alike)
        self.count = len(self._keys)

    def raised(self, enough: float, most: int = ALL, *, ends: bool = False) -> float:
        """Return the least bound of these configurations, raised until it is enough or nothing raises it.

        Args:
            enough: A bound that is enough, in seconds.
            most: How much is looked for, as of `Carried.raise_least`: with `ROOM` it takes a second or two.
            ends: Whether this is the last look.
        """
        self._carried.raise_least(self._bounds, self._space, enough, lambda number: False, most, ends=ends)
        return self._bounds[0][0] if self._bounds else inf

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        return False

    def piece(self, index: int) -> Piece | None:
        """See `Series.piece`: there is nothing to find out where all are excluded by what is known."""
        best = self._outcome.best
        if all(self._is_excluded(*known) for known in self._alike[self._keys[index]]):
            return None
        mesh, samples = self._keys[index]
        alone = Configuration(1, mesh, self._search.global_batch // samples, "1f1b")
        return Piece(Work.PACE, (alone,), 0.0, best)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        if finding is None:
            return
        mesh, samples = self._keys[index]
        self._carried.learn_minor(mesh, samples, finding)
        self._outcome.cut += finding.cut
        self._outcome.work += finding.work
        detail = f"{samples} samples on {mesh}"
        tell(self._search, self._outcome, "third axis", index + 1, self.count, self._elsewhere, detail)

    def _key(self, family: Family) -> tuple[Mesh, int]:
        """Return the free axes, and the samples that each group of devices along them works on."""
        mesh = family[0].mesh
        return minor_mesh(mesh), self._search.global_batch // family[0].num_microbatches // mesh.shape[0]

    def _has_samples(self, family: Family) -> bool:
        """Whether there are samples for all devices of the major axis, which a pinned mesh may lack."""
        return self._search.global_batch // family[0].num_microbatches % family[0].mesh.shape[0] == 0

    def _is_excluded(self, known: float, number: int) -> bool:
        """Whether what is known of a family, or follows from others, excludes it."""
        best = self._outcome.best
        return known >= best or self._carried.least(self._space[number], best) >= best
