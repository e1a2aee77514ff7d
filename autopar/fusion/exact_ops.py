"""The best kernels of a small segment, by CP-SAT: the oracle that a search is held against.

    min  sum over kernels k of seconds(k) x_k
    s.t. sum of x_k over kernels with op o = 1                 for each op o that may share a kernel
         x_k -> place(o) = place(o')                           for ops o, o' of kernel k
         place(o) >= place(p) + 1 - sum of x_k with both       for each op o that reads from p

Kernels are enumerated: all connected sets of ops that may share a kernel, up to a number of ops. They compute nothing
twice, so that with duplication a search may find less than this optimum, and kernels larger than the number are left
out.
"""

from dataclasses import dataclass

from autopar.cost import CostModel
from autopar.cost.fusion import Kernel
from autopar.errors import JobError
from autopar.fusion.segment_kernels import Groups, SegmentKernels
from autopar.program.records import Segment

PICOSECONDS = 1e12
"""CP-SAT counts in whole numbers."""


@dataclass(frozen=True, slots=True)
class ExactKernels:
    """The best kernels of a segment.

    Attributes:
        kernels: Those of several ops.
        seconds: What all of its kernels take.
        bound: What they take at least, of the kernels that were enumerated.
        enumerated: Kernels that could be.
    """

    kernels: Groups
    seconds: float
    bound: float
    enumerated: int


def enumerate_kernels(segment: SegmentKernels, most_ops: int, limit: int) -> list[Kernel]:
    """Return all kernels of a segment that may be, and wait for nothing of their own.

    Args:
        segment: The segment.
        most_ops: Ops of a kernel.
        limit: Sets of ops that are looked at.

    Raises:
        JobError: If there are more.
    """
    near: dict[str, dict[str, None]] = {name: {} for name in segment.fusible}
    for first, second in segment.pairs():
        near[first][second] = None
        near[second][first] = None
    seen = {frozenset((name,)) for name in segment.fusible}
    open_sets, found = list(seen), [Kernel((name,)) for name in segment.fusible]
    while open_sets:
        names = open_sets.pop()
        if len(names) == most_ops:
            continue
        for other in sorted({two for one in names for two in near[one]} - names):
            larger = names | {other}
            if larger in seen:
                continue
            seen.add(larger)
            if len(seen) > limit:
                raise JobError(f"more than {limit:,} sets of ops could share a kernel", hint="take a smaller segment")
            open_sets.append(larger)
            kernel = segment.kernel(larger)
            if segment.are_lawful((kernel,)):
                found.append(kernel)
    return found


def best_kernels(
    segment: Segment, costs: CostModel, *, most_ops: int = 8, limit: int = 50_000, time_limit: float = 60.0
) -> ExactKernels:
    """Return the best kernels of a segment.

    Args:
        segment: The segment.
        costs: What its ops cost.
        most_ops: Ops of a kernel.
        limit: Sets of ops that are looked at.
        time_limit: Seconds for CP-SAT.

    Raises:
        JobError: If there are more sets of ops than the limit.
    """
    from ortools.sat.python import cp_model

    own = SegmentKernels(segment, costs)
    kernels = enumerate_kernels(own, most_ops, limit)
    model = cp_model.CpModel()
    chosen = [model.new_bool_var(f"k{number}") for number in range(len(kernels))]
    last = len(own.computes)
    place = {name: model.new_int_var(0, last, name) for name in own.computes}
    holding: dict[str, list[int]] = {name: [] for name in own.fusible}
    for number, kernel in enumerate(kernels):
        for name in kernel.ops:
            holding[name].append(number)
        for name in kernel.ops[1:]:
            model.add(place[name] == place[kernel.ops[0]]).only_enforce_if(chosen[number])
    for numbers in holding.values():
        model.add_exactly_one(chosen[number] for number in numbers)
    makers = {out: name for name, compute in own.computes.items() for out in compute.op.outputs if out}
    for name, compute in own.computes.items():
        for before in dict.fromkeys(makers[read] for read in compute.op.inputs if read in makers):
            together = set(holding.get(name, ())) & set(holding.get(before, ()))
            model.add(place[name] >= place[before] + 1 - sum(chosen[number] for number in together))
    weights = [round(own.seconds(kernel) * PICOSECONDS) for kernel in kernels]
    model.minimize(sum(weight * choice for weight, choice in zip(weights, chosen, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), "kernels of one op each are a solution"
    best = own.ordered(kernel for kernel, choice in zip(kernels, chosen, strict=True) if solver.value(choice))
    return ExactKernels(best, own.cost(best), solver.best_objective_bound / PICOSECONDS, len(kernels))
