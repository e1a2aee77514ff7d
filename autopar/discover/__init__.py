"""ShardCombine: sharding rules found by executing each distinct op whole and on shards.

No op has a sharding rule of its own here. An op is shrunk to small proxy shapes (`sketch`, `shrink`), fed with data
that leaves no room for luck (`data`), run on shards, and the ways of putting the parts together again are recorded
(`search`). `discover` does it for all ops of a graph, each distinct one once, and keeps the result on disk (`store`).
"""

from autopar.discover.discovery import discover
from autopar.discover.notation import Notation, actions, format_rule, notate
from autopar.discover.rules import Halo, Local, Replaced, Rule, Rules, Scaled, Strategy
from autopar.discover.server import Isolation

__all__ = [
    "Halo",
    "Isolation",
    "Local",
    "Notation",
    "Replaced",
    "Rule",
    "Rules",
    "Scaled",
    "Strategy",
    "actions",
    "discover",
    "format_rule",
    "notate",
]
