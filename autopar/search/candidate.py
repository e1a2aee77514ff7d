"""Candidate plans: configuration, placements, stages and step time by the cost formula, before a `Plan` is written.

Candidates are kept and sent between processes without tables, which take megabytes.
"""

from dataclasses import dataclass, field

from autopar.configuration import Configuration
from autopar.describe.axis_roles import AxisRole, roles_of_axes
from autopar.describe.block_decisions import assemble_blocks
from autopar.describe.signature import Signature, signature
from autopar.formulate.step_time import Split, StepTime
from autopar.formulate.tables import Tables
from autopar.plan import BlockPlan, StagePlan, Variant
from autopar.problem import Choice
from autopar.recompute import format_hosted, format_recompute
from autopar.schedule import SCHEDULES


@dataclass(frozen=True, slots=True)
class Draft:
    """The part of a candidate that a `Plan` is written from.

    Attributes:
        stages: The stages.
        blocks: Placements per distinct block.
        roles: Role of each mesh axis.
        signature: Key by which plans count as alike.
        variants: Further meshes with their own placements, if stages have different meshes.
        variant_roles: Role of each axis of each further mesh.
    """

    stages: tuple[StagePlan, ...]
    blocks: tuple[BlockPlan, ...]
    roles: tuple[AxisRole, ...]
    signature: Signature
    variants: tuple[Variant, ...] = ()
    variant_roles: tuple[tuple[AxisRole, ...], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A plan that the search found.

    Attributes:
        configuration: Pipeline degree, mesh, microbatches and schedule.
        tables: Placement decisions; drafted candidates have none.
        choice: One strategy per node of the tables.
        split: The stages.
        time: Step time by the planner's formula.
        draft: The part that a `Plan` is written from; None before it is needed.
    """

    configuration: Configuration
    tables: Tables = field(repr=False)
    choice: Choice
    split: Split
    time: StepTime
    draft: Draft | None = None

    @property
    def signature(self) -> Signature:
        """Key by which plans count as alike."""
        return (self.draft or draft_of(self)).signature

    def drafted(self) -> "Candidate":
        """Return the candidate with its draft and without its tables, so that their memory is freed."""
        return _drafted(*self._parts())

    def _parts(self) -> "tuple[Configuration, Choice, Split, StepTime, Draft]":
        return self.configuration, self.choice, self.split, self.time, self.draft or draft_of(self)

    def __reduce__(self) -> tuple[object, ...]:
        return _drafted, self._parts()

    @property
    def objective(self) -> float:
        """Step seconds by the planner's formula."""
        return self.time.seconds


def _drafted(configuration: Configuration, choice: Choice, split: Split, time: StepTime, draft: Draft) -> Candidate:
    """Return a candidate without tables."""
    candidate = object.__new__(Candidate)
    fields = {"configuration": configuration, "choice": choice, "split": split, "time": time, "draft": draft}
    for name, value in fields.items():
        object.__setattr__(candidate, name, value)
    return candidate


def draft_of(candidate: Candidate) -> Draft:
    """Return stages, placements, roles and signature of a candidate that has tables."""
    configuration, split = candidate.configuration, candidate.split
    devices = configuration.mesh.size
    groups = SCHEDULES[configuration.schedule].groups(configuration.num_stages, configuration.num_chunks)
    stages = tuple(
        StagePlan(
            blocks,
            (group * devices, (group + 1) * devices),
            format_recompute(recompute),
            offload=format_hosted(away, split.what),
        )
        for group, blocks, recompute, away in zip(groups, split.ranges, split.recompute, split.away, strict=True)
    )
    blocks = assemble_blocks(candidate.tables, candidate.choice)
    roles = roles_of_axes(configuration.mesh.axes, blocks, candidate.tables.folded)
    return Draft(stages, blocks, roles, signature(configuration, stages, blocks, roles))
