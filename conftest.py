"""What pytest leaves out where an optional package is missing: examples of modules that import it."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["autopar/ranks/torch_world.py"]
