"""The constants that steer the search: one record, which a caller may replace.

They decide how long the search works on what. No setting changes what is a plan or a valid bound.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Constants of the search.

    Attributes:
        overtime_seconds: Seconds that a search without a plan goes on after its time limit.
        late_seconds: Seconds before the end of a time limit that are kept for raising bounds by transfer, at most.
        late_share: Share of a time limit that is kept for that, at most.
        tries_worse: Numbers of stages in a row without a better plan after which construction ends.
        settled: Constructed plans that are improved before the frontier opens, at most.
        improve_every: One task in so many goes to a relaxed node: to that of the best plan, or to the least bound.
        patience: Tasks in a row without a better plan after which nodes wait that cannot raise the least bound.
        far: A relaxation also looks for a plan that fits where the incumbent is so many times its bound.
        outer_tasks: Tasks on meshes with an outer data-parallel axis that are always allowed.
        outer_share: Further such tasks, per task on other meshes.
        outer_times: Factor on both while the least bound is theirs and the gap is above `outer_gap`.
        outer_gap: Relative gap.
        climb_share: Share of the time left that the local search over configurations may take.
        climb_reach: Distance from the incumbent's configuration that it covers, in factors of two.
        climb_turns: Tasks per configuration beyond the relaxation.
        climb_failures: Configurations in a row without a better plan after which it ends.
        heavy_op_seconds: Seconds that a relaxation takes per op of distinct blocks, about.
        heavy_nodes: With a time limit that suffices for no more relaxations, local search comes first.
        runners_up_share: Share of a time limit that is kept for runners-up.
        runners_up_work: Work on runners-up, relative to that on the best plan.
        runners_up_least_work: Units of work that are always allowed for them: a few seconds.
        runners_up_retries: Tasks in a row on waiting nodes without a wanted plan after which these are left.
        unequal_share: Share of a time limit that is kept for stages with different meshes where devices differ.
    """

    overtime_seconds: float = 30.0
    late_seconds: float = 2.5
    late_share: float = 0.05
    tries_worse: int = 2
    settled: int = 3
    improve_every: int = 4
    patience: int = 16
    far: float = 1.25
    outer_tasks: int = 6
    outer_share: float = 0.1
    outer_times: float = 5.0
    outer_gap: float = 0.01
    climb_share: float = 0.5
    climb_reach: float = 2.0
    climb_turns: int = 3
    climb_failures: int = 12
    heavy_op_seconds: float = 1e-3
    heavy_nodes: int = 100
    runners_up_share: float = 0.1
    runners_up_work: float = 0.5
    runners_up_least_work: float = 3e9
    runners_up_retries: int = 4
    unequal_share: float = 0.25


DEFAULT_SETTINGS = SearchSettings()
"""The settings of the command line."""
