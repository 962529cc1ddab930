"""Fill a disk of 64 MiB with a run, make it larger, and let the run go on: it must be the run that always had room.

    unshare --mount --map-root-user python tests/chaos/small_disk.py

It mounts a tmpfs, for which it needs a mount namespace of its own, or root. Status 0: the run ended in one sentence
that names the lack of space, left a folder that resumes, and then did the same steps with equal weights, bit for bit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from gdpo_nemo.models.hf_folder import differences
from gdpo_nemo.tools.drill.exercise import differing_steps
from gdpo_nemo.training.replay import audit_run

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 16
SMALL, LARGE = "64m", "1g"


def train(run_dir: Path, overrides: list[str]) -> subprocess.CompletedProcess[str]:
    """A run of the demo that keeps every checkpoint, 12 MB each."""
    command = [
        sys.executable, "-m", "gdpo_nemo", "train", "--config", str(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml"),
        f"run.dir={run_dir}", f"gdpo.max_num_steps={STEPS}", "gdpo.num_prompts_per_step=4", "gdpo.val_period=0",
        "gdpo.val_at_start=false", "checkpointing.save_period=2", "checkpointing.keep_last=100",
        "checkpointing.metric_name=null", "logger.console=plain", *overrides,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=1800)


def mount(folder: Path, *options: str) -> None:
    """Mount a tmpfs, or change one."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)], check=True)


def check(good: bool, what: str, done: subprocess.CompletedProcess[str]) -> None:
    """Print what was found, and end where it is not good."""
    print(f"{'ok  ' if good else 'BAD '} {what}", flush=True)
    if not good:
        raise SystemExit(f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    overrides = parser.parse_args().overrides
    with tempfile.TemporaryDirectory() as scratch:
        disk, roomy = Path(scratch) / "disk", Path(scratch) / "roomy"
        disk.mkdir()
        mount(disk, f"size={SMALL}")
        try:
            compare(disk, roomy, overrides)
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def compare(disk: Path, roomy: Path, overrides: list[str]) -> None:
    """The run on the small disk, then on a larger one, and the one that has room."""
    run_dir = disk / "run"
    full = train(run_dir, overrides)
    errors = [line for line in full.stderr.splitlines() if line.startswith("error: ")]
    for line in errors:
        print(line)
    check(full.returncode == 1 and len(errors) == 1, "a full disk ends the run with one sentence", full)
    check("No space left on device" in errors[0] and "Traceback" not in full.stderr, "which names the reason", full)
    mount(disk, "remount", f"size={LARGE}")
    resumed = train(run_dir, overrides)
    check(resumed.returncode == 0, "with more space the same command goes on to the end", resumed)
    check("resuming from" in resumed.stdout + resumed.stderr, "from a checkpoint", resumed)
    check(audit_run(run_dir).found == [], "every prompt was trained once", resumed)
    undisturbed = train(roomy, overrides)
    check(undisturbed.returncode == 0, "a run that has room from the start", undisturbed)
    check(differing_steps(roomy, run_dir) == [], "has the same losses and gradients", undisturbed)
    check(differences(roomy / "model", run_dir / "model") == [], "and the same weights, bit for bit", undisturbed)


if __name__ == "__main__":
    main()
