"""Local search over trees: a tree of nodes takes its best labels by dynamic programming while all other nodes stay.

    total_v[x] = base_v[x] + sum over children c of min_y (table_vc[x, y] + total_c[y])

A tree grows from a seed over random edges and takes no node that would close a cycle. If its best labels break a limit,
the most broken segment gets a price that doubles until they do not. The neighbourhood is exponential and is searched in
linear time (very-large-scale neighbourhood search, Ahuja, Ergun, Orlin, Punnen 2002). The loops are compiled: a tree of
a hundred nodes takes well below a millisecond.
"""

from typing import NamedTuple

import numpy as np

from autopar.compiled import compiled, inner
from autopar.solvers.model.csr import FlatField, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Floats, Ints

TRIALS = 6
"""Most solves of a tree, with rising prices, until its labels are within the limits."""
VISITS = 4
"""Trees without a gain that contain a node before the node is closed."""
FOLLOWING = 8
"""Trees solved after a kick."""
ROUNDING = 1e-6
"""Tolerated rounding error of sums, relative to a limit."""
TINY = 1e-12
"""Gains below this relative size count as rounding."""


class _Graph(NamedTuple):
    """Adjacency with tables from either side: entry (x, y) of neighbour k is `entries[near[k] + x * width + y]`.

    Attributes:
        offsets: Where the labels of each node begin.
        at: Where the neighbours of each node begin, shape (num_nodes + 1,).
        other: Neighbours, concatenated by node.
        near: Per neighbour, where its table with the node's labels first begins.
        far: Per neighbour, where its table with the neighbour's labels first begins.
        entries: Entries of all tables and of all transposed tables.
    """

    offsets: Ints
    at: Ints
    other: Ints
    near: Ints
    far: Ints
    entries: Floats


class _Usages(NamedTuple):
    """The limits, as in `FlatMemory`."""

    limits: Floats
    scales: Floats
    node_at: Ints
    first: Ints
    last: Ints
    amount_at: Ints
    amounts: Floats


class _Workspace(NamedTuple):
    """Work arrays, reused by all trees.

    Attributes:
        stamp: Per node the last tree that visited it.
        met: Per node how many of its neighbours are in that tree.
        place: Per node its place in the tree, -1 if it is not in it.
        nodes: The tree, its root first, every node after its parent.
        parent: Per place the place of the parent.
        link: Per place the neighbour index of the parent's edge to it.
        frontier: Candidate edges: place of the parent, neighbour index.
        base_at: Per place where its labels begin in `base`.
        base: Costs of the tree's labels given all nodes outside the tree.
        total: `base` plus prices and the minima of the subtrees.
        taken: Per place the label of the new choice.
        change: Difference of use between adjacent segments.
        log: Changed nodes since the last kick, with their previous labels.
        tally: Number of trees so far; state of the random number generator.
    """

    stamp: Ints
    met: Ints
    place: Ints
    nodes: Ints
    parent: Ints
    link: Ints
    frontier: Ints
    base_at: Ints
    base: Floats
    total: Floats
    taken: Ints
    change: Floats
    log: Ints
    tally: Ints


class TreeDescent:
    """Tree descent on one field under limits; it holds no choice."""

    def __init__(self, flat: FlatField, memory: FlatMemory) -> None:
        nodes = flat.num_nodes
        self._flat = flat
        self._memory = memory
        self._sizes = np.diff(flat.offsets)
        first, second = flat.edges[:, 0], flat.edges[:, 1]
        turned = flat.at + len(flat.tables)
        owner = np.concatenate([first, second])
        order = np.argsort(owner, kind="stable")
        self._graph = _Graph(
            flat.offsets,
            np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(owner, minlength=nodes))]),
            np.concatenate([second, first])[order],
            np.concatenate([flat.at, turned])[order],
            np.concatenate([turned, flat.at])[order],
            flat.entries,
        )
        self._use = _Usages(
            memory.limits, memory.scales, memory.node_at, memory.first, memory.last, memory.amount_at, memory.amounts
        )
        links = len(owner)
        self._workspace = _Workspace(
            np.full(nodes, -1),
            np.zeros(nodes, np.int64),
            np.full(nodes, -1),
            np.zeros(nodes, np.int64),
            np.zeros(nodes, np.int64),
            np.zeros(nodes, np.int64),
            np.zeros(2 * links + 2, np.int64),
            np.zeros(nodes + 1, np.int64),
            np.zeros(int(flat.offsets[-1])),
            np.zeros(int(flat.offsets[-1])),
            np.zeros(nodes, np.int64),
            np.zeros(len(memory.limits) + 1),
            np.zeros(2 * nodes * (FOLLOWING + 1) + 2, np.int64),
            np.zeros(2, np.int64),
        )

    def descend(self, unary: Floats, labels: Ints, open_: Ints, seeds: Ints, most: int, random: int) -> int:
        """Solve a tree around each seed; change `labels` where that is cheaper, and return the number of gains.

        Args:
            unary: Costs of labels, in place of the field's.
            labels: A choice. Limits it breaks may stay broken, but not by more.
            open_: Per node, how many more trees may visit it without a gain; seeds at 0 are skipped. Every tree without
                a gain decrements its nodes, a change resets the changed node and its neighbours.
            seeds: Roots of the trees, in turn.
            most: Most nodes of a tree.
            random: Random seed of the trees' growth.
        """
        profile, limits = self._limits_to_keep(labels, random)
        before = labels.copy()
        gains = int(
            _descend(self._graph, self._use, self._workspace, unary, limits, labels, profile, open_, seeds, most)
        )
        return gains if self._commit(before, labels, profile, limits) else 0

    def kick(self, unary: Floats, labels: Ints, seeds: Ints, forced: Ints, most: int, random: int) -> float:
        """Force a label on each seed in turn, keep improvements; return the total decrease of the cost."""
        profile, limits = self._limits_to_keep(labels, random)
        before = labels.copy()
        gain = float(
            _kick(self._graph, self._use, self._workspace, unary, limits, labels, profile, seeds, forced, most)
        )
        return gain if self._commit(before, labels, profile, limits) else 0.0

    def _limits_to_keep(self, labels: Ints, random: int) -> tuple[Floats, Floats]:
        """Return the use of a choice, and the limits to keep: the larger of the limit and the present use."""
        self._workspace.tally[1] = random
        profile = self._memory.profile(indicator(self._flat.offsets, labels))
        return profile, np.maximum(self._memory.limits, profile)

    def _commit(self, before: Ints, labels: Ints, profile: Floats, limits: Floats) -> bool:
        """Undo the changes if rounding has hidden a broken limit; return whether they stay."""
        used = self._memory.profile(indicator(self._flat.offsets, labels))
        room = ROUNDING * (np.abs(limits) + self._memory.scales)
        assert (np.abs(used - profile) <= room).all(), "the profile follows the labels"
        broken = bool((used > limits).any())
        if broken:
            labels[:] = before
        return not broken


@compiled
def _descend(
    graph: _Graph,
    use: _Usages,
    work: _Workspace,
    unary: Floats,
    limits: Floats,
    labels: Ints,
    profile: Floats,
    open_: Ints,
    seeds: Ints,
    most: int,
) -> int:
    """Change `labels`, `profile` and `open_` in place; return the number of trees with a gain."""
    prices = np.zeros(TRIALS)
    priced = np.zeros(TRIALS, np.int64)
    gains = 0
    for seed in seeds:
        if open_[seed] == 0:
            continue
        count = _grow(graph, work, seed, most)
        if _move_tree(graph, use, work, unary, limits, labels, profile, count, -1, prices, priced, 0) > 0.0:
            gains += 1
            entry = 0
            while work.log[2 * entry] >= 0:
                node = work.log[2 * entry]
                open_[node] = VISITS
                for k in range(graph.at[node], graph.at[node + 1]):
                    open_[graph.other[k]] = VISITS
                entry += 1
        else:
            for p in range(count):
                open_[work.nodes[p]] = max(0, open_[work.nodes[p]] - 1)
    return gains


@compiled
def _kick(
    graph: _Graph,
    use: _Usages,
    work: _Workspace,
    unary: Floats,
    limits: Floats,
    labels: Ints,
    profile: Floats,
    seeds: Ints,
    forced: Ints,
    most: int,
) -> float:
    """Force a label on each seed, solve trees around it, and undo all of it without a gain; return the total gain."""
    prices = np.zeros(TRIALS)
    priced = np.zeros(TRIALS, np.int64)
    total = 0.0
    for s in range(len(seeds)):
        if labels[seeds[s]] == forced[s]:
            continue
        count = _grow(graph, work, seeds[s], most)
        gain = _move_tree(graph, use, work, unary, limits, labels, profile, count, forced[s], prices, priced, 0)
        if gain == -np.inf:
            continue
        entries = 0
        while work.log[2 * entries] >= 0:
            entries += 1
        size = abs(gain)
        for _ in range(FOLLOWING):
            seed = work.log[2 * _draw(work, entries)]
            if _draw(work, 2) == 0:
                links = graph.at[seed + 1] - graph.at[seed]
                if links > 0:
                    seed = graph.other[graph.at[seed] + _draw(work, links)]
            count = _grow(graph, work, seed, most)
            more = _move_tree(graph, use, work, unary, limits, labels, profile, count, -1, prices, priced, entries)
            if more > 0.0:
                gain += more
                while work.log[2 * entries] >= 0:
                    entries += 1
        if gain >= -TINY * size:
            total += gain
            continue
        for e in range(entries - 1, -1, -1):
            node, label = work.log[2 * e], work.log[2 * e + 1]
            for u in range(use.node_at[node], use.node_at[node + 1]):
                more = use.amounts[use.amount_at[u] + label] - use.amounts[use.amount_at[u] + labels[node]]
                if more != 0.0:
                    for t in range(use.first[u], use.last[u]):
                        profile[t] += more
            labels[node] = label
    return total


@inner
def _move_tree(
    graph: _Graph,
    use: _Usages,
    work: _Workspace,
    unary: Floats,
    limits: Floats,
    labels: Ints,
    profile: Floats,
    count: int,
    forced: int,
    prices: Floats,
    priced: Ints,
    entries: int,
) -> float:
    """Move the tree to its best labels within the limits if they are cheaper; return the gain, 0 without a move.

    If `forced` is a label, not -1, the root takes it at any cost; minus infinity if no labels are within the limits.
    Changes are appended to the log from `entries` on.
    """
    _base_costs(graph, work, unary, labels, count)
    present = _tree_cost(graph, work, labels, count, True)
    if forced >= 0:
        for x in range(work.base_at[1]):
            if x != forced:
                work.base[x] = np.inf
    num_priced = 0
    for _ in range(TRIALS):
        _solve(graph, use, work, labels, count, prices, priced, num_priced)
        value = _tree_cost(graph, work, labels, count, False)
        gain = present - value
        if forced < 0 and not gain > TINY * (abs(present) + abs(value)):
            return 0.0
        worst = _worst_segment(use, work, limits, profile, labels, count)
        if worst < 0:
            for p in range(count):
                node = work.nodes[p]
                if labels[node] != work.taken[p]:
                    work.log[2 * entries] = node
                    work.log[2 * entries + 1] = labels[node]
                    entries += 1
                    labels[node] = work.taken[p]
            work.log[2 * entries] = -1
            return gain
        excess = work.change[len(limits)]
        work.change[len(limits)] = 0.0
        known = -1
        for k in range(num_priced):
            if priced[k] == worst:
                known = k
        if known >= 0:
            prices[known] *= 2.0
        else:
            priced[num_priced] = worst
            prices[num_priced] = max(abs(gain), TINY) / excess
            num_priced += 1
    return -np.inf if forced >= 0 else 0.0


@inner
def _draw(work: _Workspace, below: int) -> int:
    """Return a random integer from 0 to below - 1 (linear congruential generator modulo 2^31)."""
    work.tally[1] = (work.tally[1] * 1103515245 + 12345) % 2147483648
    drawn: int = (work.tally[1] >> 8) % below
    return drawn


@inner
def _grow(graph: _Graph, work: _Workspace, seed: int, most: int) -> int:
    """Grow a tree from a seed; return its number of nodes."""
    work.tally[0] += 1
    number = work.tally[0]
    count = 0
    waiting = 0
    node, parent, link = seed, -1, -1
    if work.stamp[node] != number:
        work.stamp[node] = number
        work.met[node] = 0
        work.place[node] = -1
    while True:
        work.place[node] = count
        work.nodes[count] = node
        work.parent[count] = parent
        work.link[count] = link
        for k in range(graph.at[node], graph.at[node + 1]):
            other = graph.other[k]
            if work.stamp[other] != number:
                work.stamp[other] = number
                work.met[other] = 0
                work.place[other] = -1
            work.met[other] += 1
            if work.place[other] < 0 and work.met[other] == 1:
                work.frontier[2 * waiting] = count
                work.frontier[2 * waiting + 1] = k
                waiting += 1
        count += 1
        if count == most:
            return count
        found = False
        while waiting > 0 and not found:
            pick = _draw(work, waiting)
            parent, link = work.frontier[2 * pick], work.frontier[2 * pick + 1]
            waiting -= 1
            work.frontier[2 * pick] = work.frontier[2 * waiting]
            work.frontier[2 * pick + 1] = work.frontier[2 * waiting + 1]
            node = graph.other[link]
            found = work.met[node] == 1 and work.place[node] < 0 and graph.offsets[node + 1] - graph.offsets[node] > 1
        if not found:
            return count


@inner
def _base_costs(graph: _Graph, work: _Workspace, unary: Floats, labels: Ints, count: int) -> None:
    """Set `base`: costs of the tree's labels given the nodes outside."""
    number = work.tally[0]
    position = 0
    for p in range(count):
        node = work.nodes[p]
        begin = graph.offsets[node]
        size = graph.offsets[node + 1] - begin
        work.base_at[p] = position
        for x in range(size):
            work.base[position + x] = unary[begin + x]
        for k in range(graph.at[node], graph.at[node + 1]):
            other = graph.other[k]
            if work.stamp[other] == number and work.place[other] >= 0:
                continue
            row = graph.far[k] + labels[other] * size
            for x in range(size):
                work.base[position + x] += graph.entries[row + x]
        position += size
    work.base_at[count] = position


@inner
def _tree_cost(graph: _Graph, work: _Workspace, labels: Ints, count: int, present: bool) -> float:
    """Return the cost of the tree with its present labels, or with the new ones."""
    total = 0.0
    for p in range(count):
        x = labels[work.nodes[p]] if present else work.taken[p]
        total += work.base[work.base_at[p] + x]
        above = work.parent[p]
        if above >= 0:
            y = labels[work.nodes[above]] if present else work.taken[above]
            k = work.link[p]
            total += graph.entries[graph.far[k] + x * (work.base_at[above + 1] - work.base_at[above]) + y]
    return total


@inner
def _solve(
    graph: _Graph,
    use: _Usages,
    work: _Workspace,
    labels: Ints,
    count: int,
    prices: Floats,
    priced: Ints,
    num_priced: int,
) -> None:
    """Set `taken` to the cheapest labels of the tree at prices in some segments; present labels win ties."""
    for p in range(count):
        node = work.nodes[p]
        begin, end = work.base_at[p], work.base_at[p + 1]
        for x in range(begin, end):
            work.total[x] = work.base[x]
        for k in range(num_priced):
            for u in range(use.node_at[node], use.node_at[node + 1]):
                if use.first[u] <= priced[k] and priced[k] < use.last[u]:
                    for x in range(end - begin):
                        work.total[begin + x] += prices[k] * use.amounts[use.amount_at[u] + x]
    for p in range(count - 1, 0, -1):
        begin, end = work.base_at[p], work.base_at[p + 1]
        above = work.parent[p]
        start = work.base_at[above]
        size = work.base_at[above + 1] - start
        row = graph.near[work.link[p]]
        for y in range(size):
            source = row + y * (end - begin)
            least = np.inf
            for x in range(end - begin):
                least = min(least, graph.entries[source + x] + work.total[begin + x])
            work.total[start + y] += least
    for p in range(count):
        begin, end = work.base_at[p], work.base_at[p + 1]
        above = work.parent[p]
        source = graph.near[work.link[p]] + work.taken[above] * (end - begin) if above >= 0 else 0
        best = labels[work.nodes[p]]
        least = work.total[begin + best] + (graph.entries[source + best] if above >= 0 else 0.0)
        for x in range(end - begin):
            cost = work.total[begin + x] + (graph.entries[source + x] if above >= 0 else 0.0)
            if cost < least:
                least = cost
                best = x
        work.taken[p] = best


@inner
def _worst_segment(use: _Usages, work: _Workspace, limits: Floats, profile: Floats, labels: Ints, count: int) -> int:
    """Return the segment where the new labels break a limit most; -1 if none, and `profile` is updated.

    The excess in that segment is written to the end of `change`.
    """
    low, high = len(limits), 0
    for p in range(count):
        node = work.nodes[p]
        old, new = labels[node], work.taken[p]
        if old == new:
            continue
        for u in range(use.node_at[node], use.node_at[node + 1]):
            more = use.amounts[use.amount_at[u] + new] - use.amounts[use.amount_at[u] + old]
            if more != 0.0:
                work.change[use.first[u]] += more
                work.change[use.last[u]] -= more
                low, high = min(low, use.first[u]), max(high, use.last[u])
    work.change[len(limits)] = 0.0
    worst = -1
    highest = 0.0
    more = 0.0
    for t in range(low, high):
        more += work.change[t]
        excess = (profile[t] + more - limits[t]) / use.scales[t]
        if more > 0.0 and excess > highest:
            highest = excess
            worst = t
    more = 0.0
    for t in range(low, high):
        more += work.change[t]
        work.change[t] = 0.0
        if worst < 0:
            profile[t] += more
    work.change[high] = 0.0
    if worst >= 0:
        work.change[len(limits)] = highest * use.scales[worst]
    return worst
