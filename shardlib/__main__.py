"""`python -m shardlib`: the command, where it is not installed."""

import sys

from shardlib.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
