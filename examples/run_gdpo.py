"""Train a language model with several rewards.

    uv run examples/run_gdpo.py                                        the demo on a CPU
    uv run examples/run_gdpo.py --config configs/X.yaml a.b=c --dry-run

The same command resumes an interrupted run. ``gdpo-nemo explain KEY`` describes a config key.
"""

from __future__ import annotations

import sys

from gdpo_nemo.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], alone=True))
