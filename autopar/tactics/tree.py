"""Monte-Carlo tree search over shards of data and parameters: how PartIR completes what tactics leave open.

An action splits one input of the model along a dim over an axis, and propagates. A path through the tree is a list of
actions; what it comes to is the simulated step, and bytes too many count as time (Automap, arXiv:2112.02958). It is a
baseline: solvers look at all ops at once and know a bound.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autopar.ir.graph import Role
from autopar.tactics.propagate import propagate
from autopar.tactics.state import State

ITERATIONS = 400
"""Paths that are tried if no time is given."""
LONGEST = 10
"""Actions of a path at most."""
EXPLORATION = 0.5
"""Weight of what has hardly been tried (UCT), in units of the reward, which is 1 for the state at the start."""
STOP = 0.25
"""Chance that a random path ends after any of its actions."""

Action = tuple[str, int, int]
"""Name of a value, dim, index of the mesh axis."""


@dataclass(eq=False)
class _Node:
    """A state that actions lead to.

    Attributes:
        state: What is decided.
        untried: Actions that have not been tried from here, in random order.
        children: Nodes by action.
        visits: Paths that led through here.
        total: Their rewards, added up.
    """

    state: State
    untried: list[Action]
    children: dict[Action, "_Node"] = field(default_factory=dict)
    visits: int = 0
    total: float = 0.0


class TreeSearch:
    """A search for a completion of a state.

    Args:
        state: What has been decided; not changed.
        axes: The mesh axes that may be used where something is open.
        tactic: Number of the tactic that asks.
        cost: What a state costs: bytes too many, and seconds.
        memory_limit: Bytes a device may use; as many bytes too many double the seconds.
        seed: Of what is random.
    """

    def __init__(
        self,
        state: State,
        axes: frozenset[int],
        tactic: int,
        cost: Callable[[State], tuple[float, float]],
        memory_limit: float,
        seed: int,
    ) -> None:
        self._axes, self._tactic, self._cost, self._limit = sorted(axes), tactic, cost, memory_limit
        self._rng = np.random.default_rng(seed)
        self._known: dict[frozenset[tuple[str, int, int]], float] = {}
        folded = state.topology.folded
        names = [*folded.graph.inputs, *(s.input for s in folded.graph.states if s.role is Role.PARAMETER)]
        self._names = list(dict.fromkeys(state.topology.of(name) for name in names))
        self.best, self._least = state, math.inf
        self._start = self._seconds(state)

    def run(self, time_limit: float | None) -> State:
        """Return the best state found within some seconds, or in `ITERATIONS` paths."""
        end = math.inf if time_limit is None else time.monotonic() + time_limit
        root = self._node(self.best)
        iterations = 0
        while time.monotonic() < end and (time_limit is not None or iterations < ITERATIONS):
            self._follow(root)
            iterations += 1
        return self.best

    def _follow(self, root: _Node) -> None:
        """Go down the tree to a new node, on at random, and tell every node on the way what that came to."""
        node, path = root, [root]
        while not node.untried and node.children:
            visits = node.visits
            node = max(node.children.values(), key=lambda child: _promise(child, visits))
            path.append(node)
        if node.untried and len(path) <= LONGEST:
            action = node.untried.pop()
            child = self._node(self._act(node.state, action))
            node.children[action] = child
            node = child
            path.append(node)
        reward = self._start / self._seconds(node.state)
        state, length = node.state, len(path)
        while length < LONGEST and self._rng.random() > STOP:
            actions = self._actions(state)
            if not actions:
                break
            state = self._act(state, actions[int(self._rng.integers(len(actions)))])
            length += 1
        reward = max(reward, self._start / self._seconds(state))
        for passed in path:
            passed.visits += 1
            passed.total += reward

    def _node(self, state: State) -> _Node:
        actions = self._actions(state)
        return _Node(state, [actions[index] for index in self._rng.permutation(len(actions))])

    def _actions(self, state: State) -> list[Action]:
        return [
            (name, dim, axis)
            for axis in self._axes
            for name in self._names
            if state.split(name, axis) is None
            for dim in range(state.topology.rank(name))
            if state.divides(name, dim, axis)
        ]

    def _act(self, state: State, action: Action) -> State:
        name, dim, axis = action
        found = state.copy()
        found.decide(name, axis, dim, self._tactic)
        propagate(found, axis, [name], self._tactic)
        return found

    def _seconds(self, state: State) -> float:
        """Return what a state costs in seconds, what it needs too much of memory included; remember the best one."""
        key = frozenset((name, axis, own.dim) for name, axes in state.splits.items() for axis, own in axes.items())
        if key not in self._known:
            excess, seconds = self._cost(state)
            self._known[key] = seconds * (1.0 + excess / self._limit)
            if self._known[key] < self._least:
                self.best, self._least = state, self._known[key]
        return self._known[key]


def _promise(child: _Node, visits: int) -> float:
    """Return the upper confidence bound of a node's reward."""
    return child.total / child.visits + EXPLORATION * math.sqrt(math.log(visits) / child.visits)
