"""Pipeline stages of a plan, and the meshes and placements that some stages share and others do not."""

from dataclasses import dataclass

from autopar.plan.block_placements import BlockPlan
from autopar.recompute import Hosted, Recompute, hosted_state, parse_hosted, parse_recompute
from autopar.sharding import Axis, Mesh


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A pipeline stage.

    Attributes:
        blocks: Half-open range in the chain of blocks.
        devices: Half-open range of device numbers. Stages may take turns as the schedule says: with p different
            ranges, interleaved stage i has those of stage i - p, and of 2p stages in the shape of a V stages i and
            2p - 1 - i have the same.
        recompute: "none", "selective" (the ops that `BlockPlan.selective` names run again) or "full" (only block
            inputs are kept, the forward runs again) for all its blocks, or "offload" (what is kept lies in host memory
            between the passes); or runs of blocks, "full*4 none*2".
        variant: Which mesh and placements it has: 0 for `Plan.mesh` and `Plan.blocks`, i > 0 for
            `Plan.variants[i - 1]`.
        offload: What lies in host memory between steps: "" for nothing, "optimizer" for the state of the optimizer
            (moments and master copies) of all its blocks, which passes over the host link in the update; or runs of
            blocks, "optimizer*4 none*2".
    """

    blocks: tuple[int, int]
    devices: tuple[int, int]
    recompute: str
    variant: int = 0
    offload: str = ""

    @property
    def flavours(self) -> tuple[Recompute, ...]:
        """What each of its blocks keeps.

        Raises:
            PlanError: If `recompute` does not say.
        """
        return parse_recompute(self.recompute, self.blocks[1] - self.blocks[0])

    @property
    def hosted_state(self) -> Hosted:
        """What of its state lies in host memory."""
        return hosted_state(self.offload)

    @property
    def hosted(self) -> tuple[bool, ...]:
        """Whether state of each of its blocks lies in host memory.

        Raises:
            PlanError: If `offload` does not say.
        """
        return parse_hosted(self.offload, self.blocks[1] - self.blocks[0])


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What a mesh axis does to most of what it could split.

    Attributes:
        role: "dp", "tp", "ep", "cp", "spatial" or "idle" (`autopar.describe.axis_roles`).
        zero: The level of ZeRO it amounts to, 0 to 3.
    """

    role: str
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """A mesh, and how blocks lie on it: what some stages of a plan have in common and others do not.

    Attributes:
        mesh: Devices of one stage.
        blocks: Placements per distinct block; at least of the kinds that stages of the variant have. `instances` of a
            block are all those in the chain, whatever stage they are on.
    """

    mesh: tuple[Axis, ...]
    blocks: tuple[BlockPlan, ...]

    @property
    def device_mesh(self) -> Mesh:
        """The mesh of one stage."""
        return Mesh(self.mesh)
