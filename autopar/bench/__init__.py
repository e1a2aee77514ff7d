"""Our planner against the baselines: same graph, same costs, same simulator, one table.

>>> from autopar.bench.specs import SPECS
>>> SPECS["llama3-8b"].model
'zoo:llama3-8b'
"""

from autopar.bench.compare import compare
from autopar.bench.records import Comparison, PlanFigures, Result
from autopar.bench.usual import usual_practice, usual_preview

__all__ = ["Comparison", "PlanFigures", "Result", "compare", "usual_practice", "usual_preview"]
