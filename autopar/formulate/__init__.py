"""The optimisation model: placement decisions, their costs and memory, and the step time of a pipeline (docs/model.md).

`building.py` writes the decisions of one mesh, `linear_weights.py` turns them into the `Problem` that a solver gets,
`step_time.py` and `scheduled_step.py` compute the objective of a complete plan.
"""
