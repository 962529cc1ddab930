"""``python -m gdpo_nemo`` is ``gdpo-nemo``."""

import sys

from gdpo_nemo.cli import main

if __name__ == "__main__":
    sys.exit(main())
