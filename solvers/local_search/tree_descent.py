"""Fast local search: one tree of nodes after another takes its best labels while all other nodes stay.

A tree grows from a seed over edges, and takes no node that would close a circle, so its best labels follow from a
dynamic program: up from the leaves to the seed, and down again. Those that break a limit are looked for again with a
price on the segment that is broken most, which doubles as long as it is not enough. All of it is compiled: a tree of a
hundred nodes takes well below a millisecond.
"""

from typing import NamedTuple

import numpy as np

from autopar.compiled import compiled
from autopar.solvers.model.csr import Flat, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Floats, Ints

TRIALS = 6
"""How often a tree is solved, with prices, until its labels fit."""
LOOKS = 4
"""Trees that look at a node, without a gain, before it is left alone."""
FOLLOWING = 8
"""Trees that follow a kick."""
ROUNDING = 1e-6
"""What sums of many numbers may be wrong by, in parts of a limit."""
TINY = 1e-12
"""Gains below this part of what is compared are rounding."""


class _Graph(NamedTuple):
    """Adjacency with tables on either side: entry (x, y) of neighbour k is `entries[near[k] + x * width + y]`.

    Attributes:
        offsets: Where the labels of each node begin.
        at: Where the neighbours of each node begin, shape (num_nodes + 1,).
        other: Neighbours, one node after another.
        near: Per neighbour, where its table begins, labels of the node first.
        far: The same, labels of the neighbour first.
        entries: Of all tables, both ways round.
    """

    offsets: Ints
    at: Ints
    other: Ints
    near: Ints
    far: Ints
    entries: Floats


class _Use(NamedTuple):
    """Limits, as in `FlatMemory`."""

    limits: Floats
    scales: Floats
    node_at: Ints
    first: Ints
    last: Ints
    amount_at: Ints
    amounts: Floats


class _Desk(NamedTuple):
    """Room to work in, reused from tree to tree.

    Attributes:
        stamp: Per node the last tree that looked at it.
        met: Per node how many neighbours it has in that tree.
        place: Per node its place in the tree, -1 if it is not in it.
        nodes: The tree, its root first, every node after its parent.
        parent: Per place the place of the parent.
        link: Per place which neighbour of its node the parent is.
        frontier: Links to nodes that may be next: place of the parent, position among its neighbours.
        base_at: Per place where its labels begin in `base`.
        base: What the labels of the tree cost given all other nodes.
        total: The same and their subtrees.
        taken: Per place the label it takes.
        change: Change of use, per segment.
        log: Nodes that have changed since a kick, and the labels they had.
        tally: Number of trees so far; state of the random numbers.
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


class Trees:
    """The search on one field under limits; it keeps no choice."""

    def __init__(self, flat: Flat, memory: FlatMemory) -> None:
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
        self._use = _Use(
            memory.limits, memory.scales, memory.node_at, memory.first, memory.last, memory.amount_at, memory.amounts
        )
        links = len(owner)
        self._desk = _Desk(
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
        """Solve a tree around each seed; change `labels` where that is cheaper, and return how often it was.

        Args:
            unary: Costs of labels, in place of the field's.
            labels: A choice. Limits that it breaks may stay broken, but no further.
            open_: Per node, how many more trees should look at it; seeds without any are skipped. Trees that gain
                nothing count down, changes start again for what is joined to them.
            seeds: Where trees grow from, in turn.
            most: Nodes of a tree at most.
            random: Seed of how they grow.
        """
        profile, limits = self._begin(labels, random)
        before = labels.copy()
        gains = int(_descend(self._graph, self._use, self._desk, unary, limits, labels, profile, open_, seeds, most))
        return gains if self._end(before, labels, profile, limits) else 0

    def kick(self, unary: Floats, labels: Ints, seeds: Ints, forced: Ints, most: int, random: int) -> float:
        """Force a label on each of some nodes in turn, keep what becomes cheaper; return by how much it has."""
        profile, limits = self._begin(labels, random)
        before = labels.copy()
        gain = float(_kick(self._graph, self._use, self._desk, unary, limits, labels, profile, seeds, forced, most))
        return gain if self._end(before, labels, profile, limits) else 0.0

    def _begin(self, labels: Ints, random: int) -> tuple[Floats, Floats]:
        """Return the use of a choice and the limits it must keep: those of the problem, or what it uses already."""
        self._desk.tally[1] = random
        profile = self._memory.profile(indicator(self._flat.offsets, labels))
        return profile, np.maximum(self._memory.limits, profile)

    def _end(self, before: Ints, labels: Ints, profile: Floats, limits: Floats) -> bool:
        """Take changes back if rounding has hidden that they break a limit; return whether they stay."""
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
    use: _Use,
    desk: _Desk,
    unary: Floats,
    limits: Floats,
    labels: Ints,
    profile: Floats,
    open_: Ints,
    seeds: Ints,
    most: int,
) -> int:
    """Change `labels`, `profile` and `open_` in place; return the number of trees that became cheaper."""
    prices = np.zeros(TRIALS)
    priced = np.zeros(TRIALS, np.int64)
    gains = 0
    for seed in seeds:
        if open_[seed] == 0:
            continue
        count = _grow(graph, desk, seed, most)
        if _take(graph, use, desk, unary, limits, labels, profile, count, -1, prices, priced, 0) > 0.0:
            gains += 1
            entry = 0
            while desk.log[2 * entry] >= 0:
                node = desk.log[2 * entry]
                open_[node] = LOOKS
                for k in range(graph.at[node], graph.at[node + 1]):
                    open_[graph.other[k]] = LOOKS
                entry += 1
        else:
            for p in range(count):
                open_[desk.nodes[p]] = max(0, open_[desk.nodes[p]] - 1)
    return gains


@compiled
def _kick(
    graph: _Graph,
    use: _Use,
    desk: _Desk,
    unary: Floats,
    limits: Floats,
    labels: Ints,
    profile: Floats,
    seeds: Ints,
    forced: Ints,
    most: int,
) -> float:
    """Force a label on each seed, let the trees around it follow, and undo what has not become cheaper by that."""
    prices = np.zeros(TRIALS)
    priced = np.zeros(TRIALS, np.int64)
    total = 0.0
    for s in range(len(seeds)):
        if labels[seeds[s]] == forced[s]:
            continue
        count = _grow(graph, desk, seeds[s], most)
        gain = _take(graph, use, desk, unary, limits, labels, profile, count, forced[s], prices, priced, 0)
        if gain == -np.inf:
            continue
        entries = 0
        while desk.log[2 * entries] >= 0:
            entries += 1
        size = abs(gain)
        for _ in range(FOLLOWING):
            seed = desk.log[2 * _draw(desk, entries)]
            if _draw(desk, 2) == 0:
                links = graph.at[seed + 1] - graph.at[seed]
                if links > 0:
                    seed = graph.other[graph.at[seed] + _draw(desk, links)]
            count = _grow(graph, desk, seed, most)
            more = _take(graph, use, desk, unary, limits, labels, profile, count, -1, prices, priced, entries)
            if more > 0.0:
                gain += more
                while desk.log[2 * entries] >= 0:
                    entries += 1
        if gain >= -TINY * size:
            total += gain
            continue
        for e in range(entries - 1, -1, -1):
            node, label = desk.log[2 * e], desk.log[2 * e + 1]
            for u in range(use.node_at[node], use.node_at[node + 1]):
                more = use.amounts[use.amount_at[u] + label] - use.amounts[use.amount_at[u] + labels[node]]
                if more != 0.0:
                    for t in range(use.first[u], use.last[u]):
                        profile[t] += more
            labels[node] = label
    return total


@compiled
def _take(
    graph: _Graph,
    use: _Use,
    desk: _Desk,
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
    """Give the tree on the desk its best labels that fit, if they are cheaper, and return by how much; 0 if none are.

    If `forced` is a label, not -1, the root takes it whatever it costs; minus infinity if nothing fits then.
    What changes is written into the log from `entries` on.
    """
    _price(graph, desk, unary, labels, count)
    present = _value(graph, desk, labels, count, True)
    if forced >= 0:
        for x in range(desk.base_at[1]):
            if x != forced:
                desk.base[x] = np.inf
    num_priced = 0
    for _ in range(TRIALS):
        _solve(graph, use, desk, labels, count, prices, priced, num_priced)
        value = _value(graph, desk, labels, count, False)
        gain = present - value
        if forced < 0 and not gain > TINY * (abs(present) + abs(value)):
            return 0.0
        worst = _fit(use, desk, limits, profile, labels, count)
        if worst < 0:
            for p in range(count):
                node = desk.nodes[p]
                if labels[node] != desk.taken[p]:
                    desk.log[2 * entries] = node
                    desk.log[2 * entries + 1] = labels[node]
                    entries += 1
                    labels[node] = desk.taken[p]
            desk.log[2 * entries] = -1
            return gain
        excess = desk.change[len(limits)]
        desk.change[len(limits)] = 0.0
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


@compiled
def _draw(desk: _Desk, below: int) -> int:
    """Return a random number from 0 to below - 1 (a linear congruential generator modulo 2^31)."""
    desk.tally[1] = (desk.tally[1] * 1103515245 + 12345) % 2147483648
    drawn: int = (desk.tally[1] >> 8) % below
    return drawn


@compiled
def _grow(graph: _Graph, desk: _Desk, seed: int, most: int) -> int:
    """Grow a tree from a node; return how many nodes it has."""
    desk.tally[0] += 1
    number = desk.tally[0]
    count = 0
    waiting = 0
    node, parent, link = seed, -1, -1
    if desk.stamp[node] != number:
        desk.stamp[node] = number
        desk.met[node] = 0
        desk.place[node] = -1
    while True:
        desk.place[node] = count
        desk.nodes[count] = node
        desk.parent[count] = parent
        desk.link[count] = link
        for k in range(graph.at[node], graph.at[node + 1]):
            other = graph.other[k]
            if desk.stamp[other] != number:
                desk.stamp[other] = number
                desk.met[other] = 0
                desk.place[other] = -1
            desk.met[other] += 1
            if desk.place[other] < 0 and desk.met[other] == 1:
                desk.frontier[2 * waiting] = count
                desk.frontier[2 * waiting + 1] = k
                waiting += 1
        count += 1
        if count == most:
            return count
        found = False
        while waiting > 0 and not found:
            pick = _draw(desk, waiting)
            parent, link = desk.frontier[2 * pick], desk.frontier[2 * pick + 1]
            waiting -= 1
            desk.frontier[2 * pick] = desk.frontier[2 * waiting]
            desk.frontier[2 * pick + 1] = desk.frontier[2 * waiting + 1]
            node = graph.other[link]
            found = desk.met[node] == 1 and desk.place[node] < 0 and graph.offsets[node + 1] - graph.offsets[node] > 1
        if not found:
            return count


@compiled
def _price(graph: _Graph, desk: _Desk, unary: Floats, labels: Ints, count: int) -> None:
    """Set `base`: what the labels of the tree cost given the nodes outside."""
    number = desk.tally[0]
    position = 0
    for p in range(count):
        node = desk.nodes[p]
        begin = graph.offsets[node]
        size = graph.offsets[node + 1] - begin
        desk.base_at[p] = position
        for x in range(size):
            desk.base[position + x] = unary[begin + x]
        for k in range(graph.at[node], graph.at[node + 1]):
            other = graph.other[k]
            if desk.stamp[other] == number and desk.place[other] >= 0:
                continue
            row = graph.far[k] + labels[other] * size
            for x in range(size):
                desk.base[position + x] += graph.entries[row + x]
        position += size
    desk.base_at[count] = position


@compiled
def _value(graph: _Graph, desk: _Desk, labels: Ints, count: int, present: bool) -> float:
    """Return what the tree costs with its present labels, or with those it takes."""
    total = 0.0
    for p in range(count):
        x = labels[desk.nodes[p]] if present else desk.taken[p]
        total += desk.base[desk.base_at[p] + x]
        above = desk.parent[p]
        if above >= 0:
            y = labels[desk.nodes[above]] if present else desk.taken[above]
            k = desk.link[p]
            total += graph.entries[graph.far[k] + x * (desk.base_at[above + 1] - desk.base_at[above]) + y]
    return total


@compiled
def _solve(
    graph: _Graph, use: _Use, desk: _Desk, labels: Ints, count: int, prices: Floats, priced: Ints, num_priced: int
) -> None:
    """Set `taken` to the cheapest labels of the tree at prices per use in some segments; present ones win ties."""
    for p in range(count):
        node = desk.nodes[p]
        begin, end = desk.base_at[p], desk.base_at[p + 1]
        for x in range(begin, end):
            desk.total[x] = desk.base[x]
        for k in range(num_priced):
            for u in range(use.node_at[node], use.node_at[node + 1]):
                if use.first[u] <= priced[k] and priced[k] < use.last[u]:
                    for x in range(end - begin):
                        desk.total[begin + x] += prices[k] * use.amounts[use.amount_at[u] + x]
    for p in range(count - 1, 0, -1):
        begin, end = desk.base_at[p], desk.base_at[p + 1]
        above = desk.parent[p]
        start = desk.base_at[above]
        size = desk.base_at[above + 1] - start
        row = graph.near[desk.link[p]]
        for y in range(size):
            source = row + y * (end - begin)
            least = np.inf
            for x in range(end - begin):
                least = min(least, graph.entries[source + x] + desk.total[begin + x])
            desk.total[start + y] += least
    for p in range(count):
        begin, end = desk.base_at[p], desk.base_at[p + 1]
        above = desk.parent[p]
        source = graph.near[desk.link[p]] + desk.taken[above] * (end - begin) if above >= 0 else 0
        best = labels[desk.nodes[p]]
        least = desk.total[begin + best] + (graph.entries[source + best] if above >= 0 else 0.0)
        for x in range(end - begin):
            cost = desk.total[begin + x] + (graph.entries[source + x] if above >= 0 else 0.0)
            if cost < least:
                least = cost
                best = x
        desk.taken[p] = best


@compiled
def _fit(use: _Use, desk: _Desk, limits: Floats, profile: Floats, labels: Ints, count: int) -> int:
    """Return the segment where the labels taken break a limit most, -1 if nowhere; `profile` then follows them.

    The excess there is left at the end of `change`.
    """
    low, high = len(limits), 0
    for p in range(count):
        node = desk.nodes[p]
        old, new = labels[node], desk.taken[p]
        if old == new:
            continue
        for u in range(use.node_at[node], use.node_at[node + 1]):
            more = use.amounts[use.amount_at[u] + new] - use.amounts[use.amount_at[u] + old]
            if more != 0.0:
                desk.change[use.first[u]] += more
                desk.change[use.last[u]] -= more
                low, high = min(low, use.first[u]), max(high, use.last[u])
    desk.change[len(limits)] = 0.0
    worst = -1
    highest = 0.0
    more = 0.0
    for t in range(low, high):
        more += desk.change[t]
        excess = (profile[t] + more - limits[t]) / use.scales[t]
        if more > 0.0 and excess > highest:
            highest = excess
            worst = t
    more = 0.0
    for t in range(low, high):
        more += desk.change[t]
        desk.change[t] = 0.0
        if worst < 0:
            profile[t] += more
    desk.change[high] = 0.0
    if worst >= 0:
        desk.change[len(limits)] = highest * use.scales[worst]
    return worst
