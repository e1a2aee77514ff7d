"""Discovery of the rules of a whole graph."""

from pathlib import Path
from time import perf_counter

from autopar.discover.rules import Rule, Rules
from autopar.discover.search import find_rule, no_rule, signature
from autopar.discover.shrink import shrink
from autopar.discover.sketch import Sketch, sketch_op
from autopar.discover.store import Store
from autopar.execute import Executor
from autopar.ir.graph import Graph
from autopar.progress import Progress, ProgressCallback, silent


def discover(graph: Graph, *, cache_dir: Path | None = None, progress: ProgressCallback = silent) -> Rules:
    """Discover how each op of a graph can be sharded over one mesh axis.

    Each distinct op is executed on small shapes, so that the time depends neither on the size nor on the depth of the
    model.

    Args:
        graph: A model or a training step; no data is needed.
        cache_dir: Folder of the rule cache; None keeps nothing.
        progress: Called after each distinct op.

    Returns:
        The rules of all ops of the graph. An op that could not be analysed has a rule that only replicates and says
        why.

    Raises:
        UnsupportedOpError: If an op has no implementation to execute.
        OSError: If the cache cannot be written.
    """
    start = perf_counter()
    executor, store = Executor(), Store(cache_dir)
    sketches = {op.name: sketch_op(graph, op) for op in graph.ops}
    distinct = {sketch: op for op in reversed(graph.ops) if (sketch := sketches[op.name])}
    found: dict[Sketch, Rule] = {}
    executed: dict[str, int] = {}
    try:
        for done, (sketch, op) in enumerate(reversed(distinct.items()), start=1):
            rule, fresh = _rule(sketch, store, executor)
            found[sketch] = rule
            if fresh:
                executed[rule.signature] = rule.num_executions
            progress(Progress("discover", done, len(distinct), detail=op.kind))
    finally:
        store.save()  # also when interrupted: what was found is not lost
    return Rules(
        by_op={op.name: found[sketches[op.name]] for op in graph.ops},
        num_executions=sum(executed.values()),
        num_cached=len({rule.signature for rule in found.values()} - executed.keys()),
        seconds=perf_counter() - start,
    )


def _rule(sketch: Sketch, store: Store, executor: Executor) -> tuple[Rule, bool]:
    """Return the rule of a sketch, and whether it had to be searched for."""
    digest = sketch.digest
    rule = store.by_sketch(digest)
    if rule is not None:
        return rule, False
    proxies = shrink(sketch, executor)
    fresh = proxies is None
    if proxies is None:
        rule = no_rule(sketch)
    else:
        rule = store.by_signature(signature(proxies))
        if rule is None:
            rule, fresh = find_rule(sketch, proxies, executor), True
    store.add(digest, rule)
    return rule, fresh
