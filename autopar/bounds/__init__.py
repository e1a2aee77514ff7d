"""Lower bounds on the step time and the memory of configurations, from cheap to dear."""
