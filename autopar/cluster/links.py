"""Links: one tier of the network, what it reaches by operation and group size, and the NICs behind it.

Seconds, bytes and bytes/s. A link's `bandwidth` is an *algorithm* bandwidth: what one device reaches in one direction
inside a collective, as measured, and not the figure of the data sheet (`autopar.cost.collectives` has the formula it is
used in).
"""

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster.checks import require_not_negative, require_positive, require_share, require_whole
from autopar.errors import ClusterError
from autopar.units import format_quantity

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "dispatch", "send")
"""What a link may have constants of its own for; "dispatch" is an all-to-all of tokens that are sent once."""
_LIKE = {"dispatch": "all_to_all"}
"""Operations without constants of their own that take those of another."""

_MAX_SLOWDOWN = 1000
"""Of work on a device while others communicate."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of one operation over groups of `members` and more; the nearest such number below counts.

    Libraries change the algorithm with operation and group size: NCCL reduces in the switches (NVLS) only all-reduces
    of more than four H200, and a hybrid cube mesh has more rings the more devices take part.

    Attributes:
        operation: One of `OPERATIONS`.
        members: Least number of members of a group on this tier: devices in a node, nodes between nodes.
        bandwidth: As in `Link`.
        latency: As in `Link`.
        ramp: As in `Link`.
        ramp_exponent: As in `Link`.
        latency_per_member: As in `Link`.
    """

    operation: str
    members: int
    bandwidth: float
    latency: float
    ramp: float = 0.0
    ramp_exponent: float = 0.5
    latency_per_member: float = 0.0

    def __post_init__(self) -> None:
        owner = f"tuning of {self.operation}"
        if self.operation not in OPERATIONS:
            raise ClusterError(
                f"there is a tuning of {self.operation!r}", hint=f"operation is one of {', '.join(OPERATIONS)}"
            )
        require_whole(owner, 2, members=self.members)
        _check_constants(owner, self)

    def to_dict(self) -> dict[str, object]:
        """Return the tuning as the mapping a cluster file holds."""
        return {"operation": self.operation, "members": self.members, **_constants(self)}


@dataclass(frozen=True, slots=True)
class Nics:
    """The network cards of a node, by their data sheet.

    Attributes:
        count: Cards of a node.
        rate: Bytes/s of one card in one direction.
        efficiency: Share of it that collectives reach when nothing else runs.
    """

    count: int
    rate: float
    efficiency: float = 0.955

    def __post_init__(self) -> None:
        require_whole("nics", 1, count=self.count)
        require_positive("nics", rate=self.rate)
        require_share("nics", efficiency=self.efficiency)

    def share(self, devices: int) -> float:
        """Return the bytes/s that each of the devices of a node reaches while all of them communicate."""
        return self.count * self.rate * self.efficiency / devices

    def to_dict(self) -> dict[str, object]:
        """Return the cards as the mapping a cluster file holds."""
        return {"count": self.count, "rate": format_quantity(self.rate, "B/s"), "efficiency": self.efficiency}


@dataclass(frozen=True)
class Link:
    """One tier of the network: between the devices of a node, between nodes, or between larger domains.

    A transfer of S bytes takes `latency + S / bandwidth * (1 + (ramp / S) ** ramp_exponent)` seconds.

    Attributes:
        tier: Name of the technology ("NVLink3", "InfiniBand HDR").
        bandwidth: Bytes/s each device reaches in each direction while all of them communicate; between nodes that is
            its share of the node's NICs. On a torus it is that of one direction of one axis.
        latency: Seconds of an empty collective of two members.
        ramp: Bytes at which the bandwidth is half of `bandwidth`; 0 if it does not depend on the size.
        ramp_exponent: How fast the bandwidth approaches its limit, at least 0 and below 1.
        latency_per_member: Seconds that every further member adds to the latency.
        overlap_slowdown: Factor, at least 1, on compute and on communication over this link while both run.
        tunings: Constants that hold for one operation instead of the above.
        nics: The cards `bandwidth` is a share of; None if it was measured or stated per device.
        torus: Sizes of the axes of a torus, major first; empty if every device reaches every other alike.
        wraps: A torus axis is closed to a ring if its size is a multiple of this, else it is a line.
    """

    tier: str
    bandwidth: float
    latency: float
    ramp: float = 0.0
    ramp_exponent: float = 0.5
    latency_per_member: float = 0.0
    overlap_slowdown: float = 1.0
    tunings: tuple[Tuning, ...] = ()
    nics: Nics | None = None
    torus: tuple[int, ...] = ()
    wraps: int = 4

    def __post_init__(self) -> None:
        owner = f"link {self.tier!r}"
        _check_constants(owner, self)
        if not 1 <= self.overlap_slowdown <= _MAX_SLOWDOWN:
            raise ClusterError(
                f"{owner}: overlap_slowdown is {self.overlap_slowdown:g}",
                hint=f"it is a factor, from 1 to {_MAX_SLOWDOWN}",
            )
        require_whole(owner, 1, wraps=self.wraps)
        for size in self.torus:
            require_whole(owner, 1, torus=size)
        seen = [(tuning.operation, tuning.members) for tuning in self.tunings]
        if len(set(seen)) < len(seen):
            twice = next(key for key in seen if seen.count(key) > 1)
            raise ClusterError(
                f"{owner}: two tunings are of {twice[0]} from {twice[1]} members on", hint="keep one of them"
            )

    @cached_property
    def plain(self) -> "Tuning":
        """The constants of operations without a tuning of their own."""
        return Tuning("send", 2, self.bandwidth, self.latency, self.ramp, self.ramp_exponent, self.latency_per_member)

    def tuning(self, operation: str, members: int) -> Tuning:
        """Return the constants of an operation over groups of `members`.

        >>> link = Link("NVLink", 360e9, 3e-5, tunings=(Tuning("all_reduce", 5, 480e9, 3e-5),))
        >>> [link.tuning("all_reduce", members).bandwidth / 1e9 for members in (4, 5, 8)]
        [360.0, 480.0, 480.0]
        """
        for name in (operation, _LIKE.get(operation)):
            known = [tuning for tuning in self.tunings if tuning.operation == name and tuning.members <= members]
            if known:
                return max(known, key=lambda tuning: tuning.members)
        return self.plain

    def retuned(self, at: Tuning) -> "Link":
        """Return the link with tunings of a link with other constants, changed in proportion to these.

        Args:
            at: The constants of that link, as `plain` gives them.

        >>> fitted = Link("NIC", 48e9, 2e-5, tunings=(Tuning("send", 2, 36e9, 1e-5),))
        >>> slower = Link("NIC", 12e9, 4e-5, tunings=fitted.tunings).retuned(fitted.plain)
        >>> slower.tunings[0].bandwidth / 1e9, slower.tunings[0].latency
        (9.0, 2e-05)
        """
        now = self.plain

        def changed(tuning: Tuning) -> Tuning:
            same = now.ramp_exponent == at.ramp_exponent
            return replace(
                tuning,
                bandwidth=_in_proportion(tuning.bandwidth, at.bandwidth, now.bandwidth),
                latency=_in_proportion(tuning.latency, at.latency, now.latency),
                ramp=_in_proportion(tuning.ramp, at.ramp, now.ramp),
                ramp_exponent=tuning.ramp_exponent if same else now.ramp_exponent,
                latency_per_member=_in_proportion(
                    tuning.latency_per_member, at.latency_per_member, now.latency_per_member
                ),
            )

        return replace(self, tunings=tuple(map(changed, self.tunings)))

    def at(self, bandwidth: float, nics: Nics | None = None) -> "Link":
        """Return the link with another bandwidth, the bandwidths of its tunings changed in proportion.

        Args:
            bandwidth: Bytes/s each device reaches in each direction.
            nics: The cards that is a share of, if it is.

        >>> link = Link("NVLink", 360e9, 3e-5, tunings=(Tuning("all_reduce", 5, 480e9, 3e-5),)).at(180e9)
        >>> link.bandwidth / 1e9, link.tunings[0].bandwidth / 1e9
        (180.0, 240.0)
        """
        return replace(self, bandwidth=bandwidth, nics=nics).retuned(self.plain)

    def to_dict(self, *, editable: bool = False) -> dict[str, object]:
        """Return the link as the mapping a cluster file holds.

        Args:
            editable: Whether to say which constants the tunings belong to, so that they follow when these are edited.
        """
        data: dict[str, object] = {"tier": self.tier, **_constants(self)}
        if self.nics is not None:
            del data["bandwidth"]
            data["nics"] = self.nics.to_dict()
        if self.overlap_slowdown != 1.0:
            data["overlap_slowdown"] = self.overlap_slowdown
        if self.torus:
            data["torus"] = list(self.torus)
            data["wraps"] = self.wraps
        if self.tunings:
            if editable:
                data["tuned_at"] = _constants(self)
            data["tunings"] = [tuning.to_dict() for tuning in self.tunings]
        return data


def _in_proportion(value: float, at: float, now: float) -> float:
    """Return a value that belongs to one constant as it is for another; what was 0 has the difference added."""
    if now == at:
        return value
    return value * now / at if at else value + now


def _check_constants(owner: str, constants: Link | Tuning) -> None:
    require_positive(owner, bandwidth=constants.bandwidth)
    require_not_negative(
        owner, latency=constants.latency, ramp=constants.ramp, latency_per_member=constants.latency_per_member
    )
    if not 0 <= constants.ramp_exponent < 1:
        raise ClusterError(
            f"{owner}: ramp_exponent is {constants.ramp_exponent:g}", hint="it is at least 0 and below 1"
        )


def _constants(constants: Link | Tuning) -> dict[str, object]:
    data: dict[str, object] = {
        "bandwidth": format_quantity(constants.bandwidth, "B/s"),
        "latency": format_quantity(constants.latency, "s"),
    }
    if constants.ramp or constants.ramp_exponent != 0.5:
        data["ramp"] = format_quantity(constants.ramp, "B")
        data["ramp_exponent"] = constants.ramp_exponent
    if constants.latency_per_member:
        data["latency_per_member"] = format_quantity(constants.latency_per_member, "s")
    return data
