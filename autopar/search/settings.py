"""The constants that steer the search: one record, which a caller may replace (`autopar.solve(settings=...)`).

They divide the time of the search between its parts. No setting changes which plans or bounds are valid. Tolerances of
numerics stay in the modules that need them. A row is one of docs/benchmarks/ablation.md: what the search loses without.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Constants of the work on one node: relaxation, memory fitting, cuts and proof (`node_solver.py`).

    Attributes:
        heavy_kinds: Kinds of blocks whose own least time is solved for; the others count as free in that bound.
        relaxed_steps: Column-generation steps of a relaxation. Row 1: with one step the bound of bert-large-16 is 0.6 %
            lower.
        hurried_steps: Column-generation steps while there is no plan at all.
        memory_steps: Column-generation steps of one task under the memory limit.
        most_steps: Column-generation steps of a node, at most.
        closed_gap: Relative gap between a node's bound and its best plan at which the node is done.
        corrections: Times a placement problem under memory limits is solved, each with room for what the last missed.
            Row 9: with one time the plan of gpt3-175b-16 takes 1.9 % longer.
        memory_gap: Relative gap to which these problems are solved; their bounds are not used.
        priced_work: Units of work of a pricing problem per second of a time limit: 1/200 of it.
        priced_gap: Relative gap to which pricing problems are solved: half of `column_generation.CLOSE`.
        least_cut_rise: Relative rise of a bound by cuts of blocks after which the task ends.
        cut_steps: Rounds of the cut LP in one task. Row 10, on weak evidence: with one round the plan of
            deepseek-v3-256 takes 2.1 times as long.
        most_tried_choices: Choices of a cut LP that are tried as plans, the most frequent ones.
        block_work: Units of work of a placement problem of single blocks; most take a twentieth.
        block_gap: Relative gap to which these problems are solved; their bounds are used.
        shift_excess: Relative excess over the incumbent up to which a plan's blocks are moved between stages.
    """

    heavy_kinds: int = 3
    relaxed_steps: int = 4
    hurried_steps: int = 6
    memory_steps: int = 4
    most_steps: int = 60
    closed_gap: float = 1e-4
    corrections: int = 3
    memory_gap: float = 0.005
    priced_work: float = 5e6
    priced_gap: float = 5e-5
    least_cut_rise: float = 2e-3
    cut_steps: int = 2
    most_tried_choices: int = 8
    block_work: float = 2e8
    block_gap: float = 5e-4
    shift_excess: float = 0.02


@dataclass(frozen=True, slots=True)
class UnequalSettings:
    """Constants of the work on stages with different meshes (`heterogeneous_nodes.py`).

    Attributes:
        opening_ratio: Incumbent over the floor of unequal stages from which on these are opened, where all devices are
            alike.
        most_counts: Numbers of microbatches that are worked on, those of the least floors.
        most_blocks: Longest chain of blocks, where all devices are alike: tables of ranges of blocks take gigabytes
            above, and equal stages of long chains are nearly as even.
        most_work: Units of work on one number of microbatches after which no placements are added.
        rounds: Times a staging problem is solved, each with placements for the stages that the last solution has.
        free_steps: Column-generation steps for placements of a mesh without a price on memory.
        priced_steps: Such steps with one.
        most_choices: Placements kept per mesh.
        ample_memory_share: Share of the memory limit that a mean stage uses up to which no placement for less memory is
            needed.
        light_share: Share of the model's time below which a kind of block is bounded by its fastest ops.
        heavy_kinds: Kinds of blocks whose least time is solved for; the others are bounded by their fastest ops.
    """

    opening_ratio: float = 1.15
    most_counts: int = 3
    most_blocks: int = 256
    most_work: float = 4e10
    rounds: int = 4
    free_steps: int = 2
    priced_steps: int = 3
    most_choices: int = 8
    ample_memory_share: float = 0.3
    light_share: float = 0.02
    heavy_kinds: int = 6


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Constants of the search.

    Attributes:
        overtime_seconds: Seconds that a search without a plan continues after its time limit.
        transfer_seconds: Seconds before the end of a time limit that are kept for raising bounds by transfer, at most.
        transfer_share: Share of a time limit that is kept for that, at most.
        construction_failures: Numbers of stages in a row without a better plan after which construction ends.
        most_improved: Constructed plans that are improved before the frontier opens, at most. Row 4: without, the plan
            of deepseek-v3-256 takes 1.98 times as long.
        incumbent_turn_every: Tasks of which one goes to a relaxed node: to that of the best plan, or to the least
            bound. Row 6: without, the plan of gpt3-175b-1024 takes 1.6 % longer.
        patience: Tasks in a row without a better plan after which nodes wait that cannot raise the least bound. Row 8:
            it ends long searches without a limit, and brings nothing on other jobs.
        plain_lead: Under a time limit, how far the least bound of plain nodes that are not relaxed may be above that of
            other nodes, relatively, for plain ones to come first.
        weak_bound_ratio: Incumbent over the bound of a relaxation from which on it also looks for a plan that fits. Row
            5: without, the plan of deepseek-v3-256 takes 2.1 times as long.
        outer_tasks: Tasks on meshes with an outer data-parallel axis that are always allowed. Row 2: without such tasks
            the bound of bert-large-16 is 4.9 % lower. Row 3: without a limit bounds rise by 0.5 % in the mean.
        outer_share: Further such tasks, per task on other meshes.
        outer_factor: Factor on both while the least bound is theirs and the gap is above `outer_gap`.
        outer_gap: Relative gap.
        descent_share: Share of the time left that the local search over configurations may take. Row 7: without this
            search the plan of gpt3-175b-16 takes 1.43 times as long.
        descent_reach: Distance from the incumbent's configuration that it covers, in factors of two.
        descent_turns: Tasks per configuration beyond the relaxation.
        descent_failures: Configurations in a row without a better plan after which it ends.
        relaxation_op_seconds: Seconds that a relaxation takes per op of distinct blocks, about.
        few_relaxations: With a time limit that suffices for no more relaxations, local search comes first.
        runners_up_share: Share of a time limit that is kept for runners-up.
        runners_up_work: Work on runners-up, relative to that on the best plan.
        runners_up_least_work: Units of work that are always allowed for them: a few seconds.
        runners_up_retries: Tasks in a row on waiting nodes without a wanted plan after which these are left.
        unequal_share: Share of a time limit that is kept for stages with different meshes where devices differ.
        most_shares: Meshes and microbatches of rows with different shares that are worked on: those of least floors.
        share_rounds: Times that such placements are solved, each for the shares that the last ones ask for.
        runner_up_ratio: Objective of a runner-up over that of the best plan, at most.
        kept_per_plan: Candidates kept per plan wanted: the simulator ranks them, and some do not fit when simulated.
        node: Constants of the work on one node.
        unequal: Constants of the work on stages with different meshes.
    """

    overtime_seconds: float = 30.0
    transfer_seconds: float = 2.5
    transfer_share: float = 0.05
    construction_failures: int = 2
    most_improved: int = 3
    incumbent_turn_every: int = 4
    patience: int = 16
    plain_lead: float = 0.15
    weak_bound_ratio: float = 1.25
    outer_tasks: int = 6
    outer_share: float = 0.1
    outer_factor: float = 5.0
    outer_gap: float = 0.01
    descent_share: float = 0.5
    descent_reach: float = 2.0
    descent_turns: int = 3
    descent_failures: int = 12
    relaxation_op_seconds: float = 1e-3
    few_relaxations: int = 100
    runners_up_share: float = 0.1
    runners_up_work: float = 0.5
    runners_up_least_work: float = 3e9
    runners_up_retries: int = 4
    unequal_share: float = 0.25
    most_shares: int = 24
    share_rounds: int = 2
    runner_up_ratio: float = 1.05
    kept_per_plan: int = 8
    node: NodeSettings = NodeSettings()
    unequal: UnequalSettings = UnequalSettings()


DEFAULT_SETTINGS = SearchSettings()
"""Settings of the command line."""
