"""Train a language model against several rewards.

    uv run examples/run_gdpo.py                                        the demo on a CPU
    uv run examples/run_gdpo.py --config configs/X.yaml a.b=c --dry-run

Starting again on the same run folder resumes. ``gdpo-nemo explain KEY`` says what a key does.
"""

from __future__ import annotations

import sys

from gdpo_nemo.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], alone=True))
