"""`python -m autopar` is the command line; `torchrun -m autopar run PLAN` starts it once per rank."""

import sys

from autopar.cli import main

if __name__ == "__main__":
    sys.exit(main())
