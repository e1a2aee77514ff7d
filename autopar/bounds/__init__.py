"""Lower bounds on the step time and the memory of configurations, from cheap to dear.

`docs/bounds.md` lists them with their formulas. `roofline` is the simplest; `transfer` tries bounds without placement
problems in order of effort.
"""
