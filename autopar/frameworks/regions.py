"""Kernels of several ops that a plan states, in PyTorch: the modules that `torch.compile` gets as regions."""

from dataclasses import dataclass

from autopar.folding.fold import Folded
from autopar.frameworks.facts import block_modules
from autopar.plan import Plan


@dataclass(frozen=True, slots=True)
class Regions:
    """Modules that `torch.compile` turns into kernels one by one, for a plan that states kernels of several ops.

    Attributes:
        modules: Their names, in the order of the blocks.
        lost: What is lost by that, sentences.
    """

    modules: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def compiled_regions(plan: Plan, folded: Folded) -> Regions:
    """Return the regions of a plan for `torch.compile`; none if the plan states no kernels.

    Args:
        plan: The plan.
        folded: The graph of one of its microbatches.
    """
    if plan.fusion is None or not plan.fusion.groups:
        return Regions()
    groups = plan.fusion.groups
    kinds = {group.kind for group in groups}
    again = sum(bool(group.again) for group in groups)
    duplicates = f", {again} of which compute something again" if again else ""
    lost = [
        f"{len(groups)} kernels of several ops{duplicates}: compile_regions compiles the modules they are in, each as "
        f"a region, which cuts none of them apart; Inductor chooses the kernels of a region, and recomputes inside "
        f"one of its own only"
    ]
    modules = block_modules(folded)
    apart = sorted({kind for index, kind in enumerate(folded.chain) if index not in modules} & kinds)
    if apart:
        lost.append(
            f"kernels of blocks of kind {', '.join(map(str, apart))}, which are no module by themselves: compile the "
            f"functions that hold their ops"
        )
    named = [modules[index] for index, kind in enumerate(folded.chain) if kind in kinds and index in modules]
    return Regions(tuple(named), tuple(lost))
