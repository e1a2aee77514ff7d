"""How much can be planned at all: beyond these numbers lists would be made that no machine holds.

They are far above what anybody asks for; what is above them is a slip of the pen, and an error before any work.
"""

MAX_DEVICES = 1 << 20
"""Devices of a job or a node. The largest clusters have a tenth."""
MAX_MICROBATCHES = 1 << 20
"""Microbatches of a step; the simulator looks at each of them."""
MAX_BATCH = 1 << 30
"""Samples of a step."""
MAX_LAYERS = 10_000
"""Layers of a model that is built from sizes."""
MAX_SIZE = 10**9
"""Any other size in a model's configuration."""
