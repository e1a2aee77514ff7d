"""What pytest leaves out where an optional package is missing: examples of modules that import it."""

from importlib.util import find_spec

_OPTIONAL = (
    ("torch", "autopar/ranks/torch_world.py"),
    ("ray", "autopar/ray_cluster.py"),
    ("ray", "autopar/search/ray_executor.py"),
    ("ray", "autopar/selection/ray_crew.py"),
    ("matplotlib", "autopar/page/figures.py"),
)
collect_ignore = [module for package, module in _OPTIONAL if find_spec(package) is None]
