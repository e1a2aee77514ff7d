"""Profile databases in Aceso's form: read, priced by Aceso's cost model, and planned with a bound on all plans."""

from autopar.aceso.cost import Configuration, CostModel, Estimate, Stage
from autopar.aceso.planner import Found, plan
from autopar.aceso.profile_database import Database

__all__ = ["Configuration", "CostModel", "Database", "Estimate", "Found", "Stage", "plan"]
