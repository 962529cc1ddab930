"""What a step runs on, and at which share of its peak: figures from ``gpus.yaml``, shares assumed or measured."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from gdpo_nemo.config.reading import parse_json, read_text
from gdpo_nemo.errors import ConfigError

_TABLE = Path(__file__).with_name("gpus.yaml")


@dataclass(frozen=True)
class Device:
    """What one rank computes on. Bytes, bytes per second, floating-point operations per second."""

    name: str
    memory: float
    compute: float
    bandwidth: float
    nvlink: float
    """To other ranks of its node, one direction."""
    network: float
    """To other nodes, one direction, per rank."""
    source: str = ""
    host_link: float = 64.0e9
    """To the host's memory, one direction."""


def device(name: str, link: float | None = None) -> Device:
    """A GPU of the table; ``link`` (bytes per second) replaces its network figure.

    Raises:
        ConfigError: no such GPU; the text lists those there are.
    """
    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        raise ConfigError(
            f"--gpu: {name!r} is not known{f', did you mean {near[0]}?' if near else ''} (known: {', '.join(table)})"
        )
    found = Device(**table[name])
    return replace(found, network=link) if link else found


def host() -> Device:
    """This machine, for runs without a GPU. Speeds are guesses about one core; only a calibration makes them facts."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("this machine's CPU", float(memory), 3.0e10, 1.0e10, 2.0e9, 1.0e9, "a guess per core; calibrate")


@dataclass(frozen=True)
class Phase:
    """Seconds of a phase: ``fixed`` per unit (a decoding step, a micro-batch, a publication) + ``factor`` x ideal
    seconds."""

    fixed: float
    factor: float

    def seconds(self, units: float, ideal: float) -> float:
        """For ``units`` units whose work would take ``ideal`` seconds at the device's peak."""
        return self.fixed * units + self.factor * ideal


@dataclass(frozen=True)
class Rates:
    """How far from the peak each phase is, and what samples look like. Assumed unless ``measured`` names runs."""

    generation: Phase = Phase(0.003, 1.7)
    """3 ms per decoding step besides 60 % of the memory bandwidth."""
    training: Phase = Phase(0.05, 2.9)
    """35 % of the peak."""
    sync: Phase = Phase(0.5, 2.0)
    """Half of the link."""
    verify: float = 0.0
    """Seconds per sample that nothing hides."""
    completion_share: float = 0.5
    """Mean completion as a share of policy.generation.max_new_tokens."""
    longest_share: float = 1.0
    """Longest completion of a step as a share of max_new_tokens."""
    prompt_share: float = 0.5
    """Mean prompt as a share of the tokens that max_new_tokens leaves."""
    measured: list[str] = field(default_factory=list)
    """The runs these figures were measured on."""

    def describe(self) -> str:
        """One sentence with every figure."""
        origin = (
            f"measured on {', '.join(self.measured)}" if self.measured else "assumed; --calibrate RUN replaces them"
        )
        return (
            f"generation {self.generation.fixed * 1e3:.3g} ms a decoding step + {self.generation.factor:.3g} x "
            f"roofline, training {self.training.fixed:.3g} s a micro-batch + {self.training.factor:.3g} x roofline, "
            f"weights {self.sync.fixed:.3g} s + {self.sync.factor:.3g} x link, completions of "
            f"{self.completion_share:.0%} of max_new_tokens (longest {self.longest_share:.0%}), prompts of "
            f"{self.prompt_share:.0%} of the rest ({origin})"
        )


CPU_RATES = Rates(generation=Phase(0.006, 3.0), training=Phase(0.03, 3.0), sync=Phase(0.05, 2.0))
"""Starting guesses for a CPU."""


def save_rates(rates: Rates, path: str | Path) -> None:
    """Write a calibration file."""
    Path(path).write_text(json.dumps(asdict(rates), indent=1) + "\n", encoding="utf-8")


def load_rates(path: str | Path) -> Rates:
    """Read a calibration file.

    Raises:
        ConfigError: it is missing or is not one.
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
            f"--calibration: {path} does not exist; `gdpo-nemo plan --calibrate RUN --out {path}` makes it"
        ) from None
    except OSError as error:
        raise ConfigError(f"--calibration: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--calibration: {path} is not a calibration file ({error})") from None
