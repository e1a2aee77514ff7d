"""Discovery of the rules of a whole graph."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from autopar.discover.guard import Searching, Shrinking, Task
from autopar.discover.rules import Rule, Rules
from autopar.discover.search import no_rule, signature
from autopar.discover.server import Isolation, Report
from autopar.discover.sketch import Sketch, sketch_op
from autopar.discover.store import Store
from autopar.discover.workers import Answer, Workers
from autopar.ir.graph import Graph
from autopar.progress import TROUBLE, Progress, ProgressCallback, silent


def discover(
    graph: Graph,
    *,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
    isolation: Isolation | None = None,
) -> Rules:
    """Discover how each op of a graph can be sharded over one mesh axis.

    Each distinct op is executed on small shapes, so that the time depends neither on the size nor on the depth of the
    model. It is executed in processes of their own: a kernel that crashes or hangs on a shard costs the strategy that
    was being tried, and the rule says so.

    Args:
        graph: A model or a training step; no data is needed.
        cache_dir: Folder of the rule cache; None keeps nothing.
        progress: Called after each distinct op.
        isolation: The processes; None for one per core, at most 4.

    Returns:
        The rules of all ops of the graph. An op that could not be analysed has a rule that only replicates and says
        why.

    Raises:
        UnsupportedOpError: If an op has no implementation to execute.
        ExecutionError: If no process can be started.
    """
    start = perf_counter()
    sketches = {op.name: sketch_op(graph, op) for op in graph.ops}
    discovery = _Discovery(list(dict.fromkeys(sketches.values())), Store(cache_dir), progress)
    discovery.run(isolation or Isolation())
    rules = discovery.rules()
    return Rules(
        by_op={op.name: rules[sketches[op.name]] for op in graph.ops},
        num_executions=sum(rule.num_executions for rule in discovery.searched.values()),
        num_cached=len({rule.signature for rule in rules.values()} - discovery.searched.keys()),
        seconds=perf_counter() - start,
        executed=frozenset(discovery.searched),
    )


class _Discovery:
    """The rules of distinct ops, as they become known.

    Attributes:
        searched: Rules by signature that did not come from the cache.
    """

    def __init__(self, sketches: list[Sketch], store: Store, progress: ProgressCallback) -> None:
        self.searched: dict[str, Rule] = {}
        self._sketches = sketches
        self._store = store
        self._progress = progress
        self._found: dict[Sketch, Rule] = {}
        self._waiting: dict[str, list[Sketch]] = {}
        self._troubles: dict[str, list[str]] = {}

    def run(self, isolation: Isolation) -> None:
        """Find the rules of all ops."""
        try:
            with Workers(isolation) as workers:
                for sketch in self._sketches:
                    rule = self._store.by_sketch(sketch.digest)
                    if rule is None:
                        workers.submit(Shrinking(sketch))
                    else:
                        self._settle(sketch, rule)
                for task, answer, report in workers.answers():
                    following = self._take(task, answer, report)
                    if following is not None:
                        workers.submit(following)
        finally:
            trouble = self._store.save()  # also when interrupted: what was found is not lost
            if trouble:
                self._progress(Progress(TROUBLE, detail=trouble))

    def rules(self) -> dict[Sketch, Rule]:
        """Return the rule of each op; what went wrong for one of a signature is told by all of it."""
        told: dict[str, Rule] = {}
        for rule in self._found.values():
            reasons = [*([rule.reason] if rule.reason else []), *self._troubles.get(rule.signature, [])]
            told[rule.signature] = replace(rule, reason="; ".join(reasons))
        return {sketch: told[rule.signature] for sketch, rule in self._found.items()}

    def _take(self, task: Task, answer: Answer, report: Report) -> Task | None:
        """Take an answer; return what has to be done next for the same op."""
        match task, answer:
            case Shrinking(sketch), (even, triple):
                proxies = (even, triple)
                number = signature(proxies)
                self._note(number, report)
                known = self._store.by_signature(number) or self.searched.get(number)
                if known is not None:
                    self._settle(sketch, known)
                elif number in self._waiting:
                    self._waiting[number].append(sketch)
                else:
                    self._waiting[number] = [sketch]
                    return Searching(proxies)
            case Shrinking(sketch), _:
                rule = answer if isinstance(answer, Rule) else no_rule(sketch)
                self._note(rule.signature, report)
                self.searched[rule.signature] = rule
                self._settle(sketch, rule)
            case Searching(proxies), _:
                number = signature(proxies)
                self._note(number, report)
                rule = answer if isinstance(answer, Rule) else replace(no_rule(proxies[0].sketch), signature=number)
                self.searched[number] = rule
                for sketch in self._waiting.pop(number):
                    self._settle(sketch, rule)
        return None

    def _note(self, number: str, report: Report) -> None:
        """Remember what went wrong on the way to a rule."""
        if report.deaths:
            causes = Counter(death.cause for death in report.deaths)
            told = ", ".join(f"{count} {cause}" for cause, count in causes.items())
            self._troubles.setdefault(number, []).append(f"runs that ended their process count as failed: {told}")

    def _settle(self, sketch: Sketch, rule: Rule) -> None:
        """Take a rule for an op. One with troubles is not kept: they may have been the machine's."""
        self._found[sketch] = rule
        if rule.signature not in self._troubles and self._store.by_sketch(sketch.digest) is None:
            self._store.add(sketch.digest, rule)
        self._progress(Progress("discover", len(self._found), len(self._sketches), detail=sketch.kind))
