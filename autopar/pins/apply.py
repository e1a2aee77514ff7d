"""Pins applied to a job: the outer space that is left, and the constraints inside it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from autopar.configuration import Configuration
from autopar.describe.axis_roles import sequence_dim
from autopar.discover import Rules
from autopar.errors import PinError
from autopar.folding.expert_parameters import experts_of
from autopar.folding.fold import Folded
from autopar.formulate.constraints import Constraints
from autopar.formulate.data_major import is_data_major
from autopar.formulate.zero import LEVELS
from autopar.pins.hosting import hosting
from autopar.pins.records import AXIS_NAMES, Choices, Pins
from autopar.pins.restrict import SEQUENCE_RANK, PlacementPins, check_tactics
from autopar.pins.space import Frame, pinned_space
from autopar.recompute import LAST_RESERVE, RESERVE


def constrain(
    space: Sequence[Configuration],
    pins: Pins,
    frame: Frame,
    folded: Callable[[int], Folded],
    rules: Callable[[Folded], Rules],
    batch: Callable[[Folded], Mapping[str, int]],
    *,
    trains: bool,
    host: bool,
) -> tuple[list[Configuration], Constraints]:
    """Return what pins leave of the outer space, and what plans have to keep to inside it.

    Args:
        space: The space without pins.
        pins: The pins.
        frame: The job.
        folded: Returns the folded graph for a number of samples per microbatch.
        rules: Returns the discovered strategies of a folded graph.
        batch: Returns the batch dim of every value of a folded graph that has one.
        trains: Whether there is a backward pass and an update.
        host: Whether it is known how devices reach host memory.

    Raises:
        PinError: If a pin speaks of something that is not there, or nothing is left.
    """
    if not pins:
        opens = trains and host  # host memory, in need
        free = Constraints(reserve=RESERVE, last=LAST_RESERVE, batch=batch) if opens else Constraints(batch=batch)
        return list(space), free
    for section, choices in (("pin", pins.pin), ("forbid", pins.forbid)):
        for key in ("zero", "recompute", "offload"):
            if getattr(choices, key) and not trains:
                raise PinError(f"{section} {key}: inference has neither update nor backward pass", hint="leave it out")
    _check_experts(pins, folded(frame.fixed_batch or frame.global_batch))
    found = pinned_space(space, pins, frame)
    counts = [each.num_microbatches for each in found] or list(frame.unequal.microbatches if frame.unequal else ())
    graph = folded(frame.global_batch // counts[0])
    found = _following_sequence(pins, found, graph, batch)
    _check_context(pins, graph, batch)
    axes = [axis.name for configuration in found for axis in configuration.mesh.axes]
    for name in (*pins.pin.within_node, *pins.forbid.within_node):
        if name not in axes:
            raise PinError(
                f"within_node: there is no mesh axis {name!r}", hint=f"axes are {', '.join(sorted(set(axes)))}"
            )
    left = hosting(pins, graph, trains=trains, host=host)
    own = Constraints(
        restrict=_placements(pins, found, graph, rules, batch),
        zero=LEVELS & frozenset(pins.pin.zero or LEVELS) - frozenset(pins.forbid.zero),
        hybrid=frozenset(pins.pin.hybrid_zero or LEVELS - {0}) - frozenset(pins.forbid.hybrid_zero),
        cuts=_cuts(pins, frame.num_blocks),
        keeps=left.keeps,
        hosted=left.hosted,
        reserve=left.reserve,
        states=left.states,
        last=left.last,
        batch=batch,
    )
    if not own.zero:
        raise PinError("pin zero and forbid zero leave no level", hint="levels are 0, 1, 2 and 3")
    return found, own


def _following_sequence(
    pins: Pins,
    space: Sequence[Configuration],
    graph: Folded,
    batch: Callable[[Folded], Mapping[str, int]],
) -> list[Configuration]:
    """Return the configurations that can follow what is said of sequence parallelism.

    Raises:
        PinError: If what is said leaves nothing, or no configuration can follow it.
    """
    if not pins.sequence_parallel:
        raise PinError("sequence_parallel: neither true nor false is left", hint="drop one of them")
    if False in pins.sequence_parallel:
        return list(space)
    if not any(axis.name == "tp" for configuration in space for axis in configuration.mesh.axes):
        raise PinError(
            "sequence_parallel: no axis is named tp, whose ops it goes with",
            hint="pin a degree, tp: [2, 4, 8], or name the axes of the mesh: {dp: 4, tp: 2}",
        )
    lengths = _sequence_elements(graph, batch(graph))
    found = [configuration for configuration in space if _splits_sequence(configuration, lengths)]
    if not found:
        degrees = sorted({axis.size for each in space for axis in each.mesh.axes if axis.name == "tp"})
        most = max(lengths, key=lengths.__getitem__, default=0)
        raise PinError(
            f"sequence_parallel: {most} positions do not divide over tp of {', '.join(map(str, degrees))} devices",
            hint=f"pin a degree whose product with cp divides {most}",
        )
    return found


def _sequence_elements(graph: Folded, batch: Mapping[str, int]) -> Counter[int]:
    """Return the elements of values between blocks by the length of their sequence dim."""
    values = graph.graph.values
    arrivals = (values[arrival.value] for kind in graph.kinds for arrival in kind.arrivals if arrival.value in batch)
    found: Counter[int] = Counter()
    for value in arrivals:
        if len(value.shape) == SEQUENCE_RANK:
            found[value.shape[sequence_dim(batch[value.name])]] += value.size
    return found


def _splits_sequence(configuration: Configuration, lengths: Counter[int]) -> bool:
    """Return whether most elements of values between blocks have a sequence that divides over tp (and cp) devices."""
    sizes = {axis.name: axis.size for axis in configuration.mesh.axes}
    shares = sizes.get("tp", 1) * sizes.get("cp", 1)
    return sizes.get("tp", 1) == 1 or 2 * sum(lengths[own] for own in lengths if own % shares == 0) > lengths.total()


def _check_experts(pins: Pins, folded: Folded) -> None:
    """Raise an error if experts are to be split where there are none."""
    if _is_wanted(pins.pin.ep, pins.forbid.ep, pins, "ep") and not experts_of(folded):
        raise PinError("ep: the model has no experts", hint="leave it out")


def _check_context(pins: Pins, folded: Folded, batch: Callable[[Folded], Mapping[str, int]]) -> None:
    """Raise an error if a sequence is to be split where nothing is of samples, positions and features."""
    if _is_wanted(pins.pin.cp, pins.forbid.cp, pins, "cp"):
        values = folded.graph.values
        if not any(len(values[name].shape) == SEQUENCE_RANK for name in batch(folded)):
            raise PinError("cp: the model has no sequence", hint="leave it out")


def _is_wanted(pinned: Sequence[int], forbidden: Sequence[int], pins: Pins, axis: str) -> bool:
    """Whether plans are to have an axis of that name, given the degrees of its role that are pinned and forbidden."""
    named = (size for axes in pins.pin.mesh for name, size in axes if name == axis)
    return 1 in forbidden or any(degree > 1 for degree in (*pinned, *named))


def _placements(
    pins: Pins,
    space: Sequence[Configuration],
    graph: Folded,
    rules: Callable[[Folded], Rules],
    batch: Callable[[Folded], Mapping[str, int]],
) -> PlacementPins | None:
    meshes = list(dict.fromkeys(configuration.mesh for configuration in space))
    named = any(axis.name in AXIS_NAMES for mesh in meshes for axis in mesh.axes[is_data_major(mesh) :])
    if not (
        named
        or pins.roles
        or pins.pin.tactics
        or pins.forbid.tactics
        or len(pins.sequence_parallel) == 1
        or pins.limits_context
    ):
        return None
    check_tactics(pins, graph, rules(graph), meshes, batch(graph))
    return PlacementPins(pins, batch)


def _cuts(pins: Pins, num_blocks: int) -> frozenset[int] | None:
    if not (pins.pin.boundaries or pins.forbid.boundaries):
        return None
    return frozenset(pins.pin.boundaries or range(1, num_blocks)) - frozenset(pins.forbid.boundaries)


def words(pins: Pins) -> tuple[str, ...]:
    """Return pins in words, for the printed space."""

    def listed(choices: Choices) -> str:
        section = "pin" if choices is pins.pin else "forbid"
        return "; ".join(item.text for item in pins.items if item.section == section)

    found = []
    if pins.pin.named:
        found.append(f"pinned: {listed(pins.pin)}")
    if pins.forbid.named:
        found.append(f"forbidden: {listed(pins.forbid)}")
    return tuple(found)
