"""`python -m executorch_mlx`: the same as the command `executorch-mlx`."""

import sys

from .cli.main import console

if __name__ == "__main__":
    sys.exit(console())
