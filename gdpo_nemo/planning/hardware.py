"""Peak rates of devices from ``gpus.yaml``, and the assumed or measured efficiency of each phase."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from gdpo_nemo.data.prefixes import TYPICAL_SHARE
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import parse_json, read_text

_TABLE = Path(__file__).with_name("gpus.yaml")


@dataclass(frozen=True)
class Device:
    """Memory and peak rates of one rank's device, in bytes, bytes per second and FLOP/s."""

    name: str
    memory: float
    compute: float
    bandwidth: float
    nvlink: float
    """Bandwidth to other ranks on the same node, in one direction."""
    network: float
    """Bandwidth to other nodes, in one direction, per rank."""
    source: str = ""
    host_link: float = 64.0e9
    """Bandwidth to host memory, in one direction."""


def device(name: str, link: float | None = None) -> Device:
    """Return the GPU ``name`` from ``gpus.yaml``. ``link`` (bytes per second) replaces its network bandwidth.

    Raises:
        ConfigError: if the GPU is unknown. The message lists all known GPUs.
    """
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        raise ConfigError(
            f"--gpu: {name!r} is unknown{f', did you mean {near[0]}?' if near else ''} (known: {', '.join(table)})"
        )
    found = Device(**table[name])
    return replace(found, network=link) if link else found


def host() -> Device:
    """Return this machine as a device, for runs without a GPU. The speeds are rough estimates for one core."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        name="this machine's CPU",
        memory=float(memory),
        compute=3.8e10,
        bandwidth=1.0e10,
        nvlink=2.0e9,
        network=1.0e9,
        source="estimated per core; use --calibrate",
    )


@dataclass(frozen=True)
class Phase:
    """Linear time model of a phase: ``fixed`` seconds per unit plus ``factor`` x ideal seconds.

    Ideal seconds assume the device's peak rates. A unit is a decoding step, a micro-batch or a weight update.
    """

    fixed: float
    factor: float

    def seconds(self, units: float, ideal: float) -> float:
        """Return the seconds of ``units`` units whose work takes ``ideal`` seconds at the device's peak rates."""
        return self.fixed * units + self.factor * ideal


@dataclass(frozen=True)
class Rates:
    """Time model of each phase, and typical sample lengths.

    The values are assumptions unless ``measured`` lists runs.
    """

    generation: Phase = Phase(0.003, 1.7)
    """Time model of generation. The default is 3 ms per decoding step and 60 % of the memory bandwidth."""
    training: Phase = Phase(0.0, 1.0)
    """Time model of training. The default is the time of the micro-batches (``speed.MicroBatch``)."""
    sync: Phase = Phase(0.5, 2.0)
    """Time model of weight updates. The default is 0.5 s per update and half of the link's bandwidth."""
    verify: float = 0.0
    """Seconds of verification per sample that do not overlap with other work."""
    completion_share: float = TYPICAL_SHARE
    """Mean completion length as a fraction of policy.generation.max_new_tokens."""
    longest_share: float = 1.0
    """Length of a step's longest completion as a fraction of policy.generation.max_new_tokens."""
    prompt_share: float = TYPICAL_SHARE
    """Mean prompt length as a fraction of policy.max_total_sequence_length minus max_new_tokens."""
    measured: list[str] = field(default_factory=list)
    """Folders of the runs on which the values were measured."""

    def describe(self) -> str:
        """Describe all values in one sentence."""
        origin = (
            f"measured on {', '.join(self.measured)}" if self.measured else "assumed; --calibrate RUN measures them"
        )
        return (
            f"generation {self.generation.fixed * 1e3:.3g} ms per decoding step + {self.generation.factor:.3g} x "
            f"roofline, training {self.training.fixed:.3g} s per micro-batch + {self.training.factor:.3g} x its time, "
            f"weights {self.sync.fixed:.3g} s + {self.sync.factor:.3g} x link, completions of "
            f"{self.completion_share:.0%} of max_new_tokens (longest {self.longest_share:.0%}), prompts of "
            f"{self.prompt_share:.0%} of the remaining tokens ({origin})"
        )


CPU_RATES = Rates(generation=Phase(0.006, 3.0), training=Phase(0.03, 2.1), sync=Phase(0.05, 2.0))
"""Assumed rates for a CPU."""


def assumed_rates(target: Device) -> Rates:
    """Return the assumed rates of a device, without measurements."""
    return CPU_RATES if target.name == host().name else Rates()


def save_rates(rates: Rates, path: str | Path) -> None:
    """Write a calibration file (JSON)."""
    Path(path).write_text(json.dumps(asdict(rates), indent=1) + "\n", encoding="utf-8")


def load_rates(path: str | Path) -> Rates:
    """Read a calibration file.

    Raises:
        ConfigError: if the file is missing or not a calibration file.
    """
    try:
        content: dict[str, Any] = parse_json(read_text(path))
        phases: dict[str, Any] = {name: Phase(**content.pop(name)) for name in ("generation", "training", "sync")}
        unknown = set(content) - {f.name for f in fields(Rates)}
        if unknown:
            raise KeyError(sorted(unknown)[0])
        return Rates(**phases, **content)
    except FileNotFoundError:
        raise ConfigError(
            f"--calibration: {path} not found; create the file with `gdpo-nemo plan --calibrate RUN --out {path}`"
        ) from None
    except OSError as error:
        raise ConfigError(f"--calibration: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--calibration: {path} is not a calibration file ({error})") from None
