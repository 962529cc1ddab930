"""Entry point of ``python -m gdpo_nemo``, which is the same as the command ``gdpo-nemo``."""

import sys

from gdpo_nemo.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
