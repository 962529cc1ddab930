"""Stand up everything a run needs, in an order that fails early and cheaply, and take it down whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Iterator

import numpy as np
import psutil

from gdpo_nemo.checkpoints import Checkpoints, RunState, model_fingerprint
from gdpo_nemo.config.files import find_function
from gdpo_nemo.config.layout import resolve_layout, updates_per_step
from gdpo_nemo.config.learning import check_components
from gdpo_nemo.config.load import config_to_dict, save_config
from gdpo_nemo.config.placement import chosen_transport, joined
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.environments.pools import EnvironmentPools
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.errors import ConfigError, GdpoError, RunError
from gdpo_nemo.observe.doctor import examine
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.status import StatusFile
from gdpo_nemo.waits import WaitExpired

_PROBE_TOKENS = 48


@dataclass
class Stop:
    """Whether somebody asked the run to end (SIGTERM, SIGINT), and the exit status that follows."""

    requested: bool = False
    status: int = 0
    patient: bool = False
    """Set once training runs: a signal then waits for the end of the step and a checkpoint."""

    def __call__(self, number: int, frame) -> None:
        """Signal handler. A second signal, or one before training started, ends the run at once."""
        self.status = 128 + number
        if self.requested or not self.patient:
            raise SystemExit(self.status)
        self.requested = True


@dataclass
class Parts:
    """What ``Trainer`` works with."""

    config: Config
    run_dir: Path
    log: RunLog
    stop: Stop
    checkpoints: Checkpoints
    state: RunState
    policy: object = None
    stream: object = None
    sync: object = None
    validation_prompts: list = field(default_factory=list)

    fleet: object = None
    environments: object = None
    """Where the environments have nodes of their own."""

    def describe(self) -> dict:
        """What the status file says of the run; called from another thread at any time."""
        from gdpo_nemo.cluster.session import log_folder

        groups = {"policy rank": self.policy, "engine": self.fleet, "environment node": self.environments}
        roles = {f"{name} {n}": place for name, group in groups.items() if group for n, place in group.places().items()}
        logs = log_folder()
        return {
            "step": self.state.step,
            "version": self.sync.version if self.sync else None,
            "queues": {"batches in flight": self.stream.in_flight if self.stream else 0},
            "roles": roles,
            "logs": str(logs) if logs else None,
        }

    def finish(self) -> None:
        """What follows the last step: the final weights as a Hugging Face folder."""
        if self.config.checkpointing.export_hf:
            self.policy.export(self.run_dir / "model")


@contextlib.contextmanager
def standing(config: Config) -> Iterator[Parts]:
    """The parts of a run, ready to train; closed, with the reason in the log, when the block ends."""
    # The processes of a joined cluster have their own working directory.
    run_dir = Path(config.run.dir).absolute() if joined(config.cluster) else Path(config.run.dir)
    stop = Stop()
    with _signals(stop), contextlib.ExitStack() as stack:
        prompts, held_out, tokenizer, folder, refused = _data(config)
        checkpoints, state, found, complaints = _resume(config, run_dir, prompts, folder)
        save_config(config, run_dir / "config.yaml")
        log = RunLog(config, run_dir, state.step)
        outcome = ["failed"]
        stack.callback(lambda: log.close(outcome[0]))
        for line in (*refused, *complaints):
            log.alert(line)
        parts = Parts(config, run_dir, log, stop, checkpoints, state, validation_prompts=held_out)
        status = StatusFile(run_dir, parts.describe)
        stack.callback(lambda: status.close(outcome[0]))
        try:
            _start_processes(parts, stack, prompts, tokenizer, folder, found)
            stop.patient = True
            yield parts
            outcome[0] = "stopped" if stop.requested else "complete"
        except GdpoError as error:
            if isinstance(error, WaitExpired):  # before anything is closed: who is it that does not answer?
                status.write(error.waits)
                found = examine(run_dir)
                error.args = (f"{error}; {found.sentence} (see {found.folder})",)
            log.alert(str(error))
            raise
        except SystemExit:
            outcome[0] = "stopped"
            raise


@contextlib.contextmanager
def _signals(stop: Stop):
    """Our signal handlers, for as long as the block runs."""
    names = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(name, stop) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before):
            signal.signal(name, handler)


# -- before any process is started ------------------------------------------------------------------------------


def _data(config: Config):
    """Prompts, held-out prompts, tokenizer and model folder; everything about them that can be wrong is found here."""
    environments = load_environments(config.env)
    _check_rewards(config, environments)
    folder = _model_folder(config)
    tokenizer = _tokenizer(config, folder)
    from gdpo_nemo.rollouts.functions import check_one_kind, rollout_functions
    from gdpo_nemo.rollouts.learning import check_own_estimator

    check_own_estimator(config)
    functions = rollout_functions(config)
    room = config.policy.max_total_sequence_length - 1
    common = dict(seed=config.run.seed, max_prompt_tokens=room)
    prompts = PromptSource(config.data.train, environments, tokenizer, split="train", **common)
    held_out, sources = [], {"train": prompts}
    if config.data.validation and (config.gdpo.val_period or config.gdpo.val_at_start):
        source = PromptSource(config.data.validation, environments, tokenizer, split="validation", **common)
        held_out, sources["validation"] = source.head(config.gdpo.val_prompts), source
    for split, source in sources.items():
        check_one_kind(functions, {prompt.environment for prompt in source.head()}, split)
    _preflight(environments, sources)
    _check_rewards(config, environments)
    refused = [
        f"data.{split}: {len(source.refused)} prompts are longer than {room} tokens and are left out, "
        f"the first of them {source.refused[0].id} with {source.refused[0].tokens}"
        for split, source in sources.items()
        if source.refused
    ]
    return prompts, held_out, tokenizer, folder, refused


def _check_rewards(config: Config, environments) -> None:
    """Refuse weights of components that nothing gives, as soon as every environment knows what it gives."""
    if not any(getattr(environment, "open_rewards", False) for environment in environments.values()):
        check_components(config, [name for environment in environments.values() for name in environment.reward_names])


def _preflight(environments, sources: dict[str, PromptSource]) -> None:
    """Let environments with servers find out whether these are there and take the run's rows. Raises GdpoError."""
    for name, environment in environments.items():
        if not hasattr(environment, "preflight"):
            continue
        try:
            environment.preflight([p for s in sources.values() for p in s.head() if p.environment == name])
        except GdpoError as error:
            raise type(error)(f"env.{name}: {error}") from None
        finally:
            environment.close()


def _model_folder(config: Config) -> Path:
    """The model's folder, made by the factory when it is absent."""
    name = config.policy.model_name
    if not Path(name).is_dir() and config.policy.model_factory:
        path, function = find_function("policy.model_factory", config.policy.model_factory)
        print(f"{name} does not exist: making it with {path.name}:{function}", flush=True)
        # A process of its own: making a model may train it, with imports the driver must not have.
        code = (
            "import importlib.util, sys; path, function, folder, seed = sys.argv[1:]; "
            "spec = importlib.util.spec_from_file_location('model_factory', path); "
            "module = importlib.util.module_from_spec(spec); sys.modules['model_factory'] = module; "
            "spec.loader.exec_module(module); getattr(module, function)(folder, int(seed))"
        )
        threads = str(config.cluster.cpus_per_node or len(os.sched_getaffinity(0)))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-W", "ignore", "-c", code, str(path), function, name, str(config.run.seed)]
        process = subprocess.Popen(command, env=environment)
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if status:
            raise RunError(f"policy.model_factory: {path.name}:{function} ended with status {status}")
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:  # noqa: BLE001 - the hub client raises many kinds; all mean the model is not there
        raise ConfigError(f"policy.model_name: {name} is neither a folder nor reachable on the hub ({type(error).__name__})")


def _tokenizer(config: Config, folder: Path):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    name = config.policy.tokenizer_name or folder
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.tokenizer_name: no tokenizer in {name} ({str(error).splitlines()[0]})") from None


def _resume(config: Config, run_dir: Path, prompts: PromptSource, folder: Path):
    """The checkpoint to go on from, if there is one, after checking that data and model are those it was made with."""
    section = config.checkpointing
    checkpoints = Checkpoints(run_dir / "checkpoints", section.keep_last, section.keep_best, section.metric_name)
    complaints: list[str] = []
    model = model_fingerprint(folder)
    found = checkpoints.newest(complaints.append) if section.enabled else None
    if found is None:
        return checkpoints, RunState(data=prompts.fingerprint, model=model), None, complaints
    path, state = found
    for what, then, now in (("training data", state.data, prompts.fingerprint), ("model", state.model, model)):
        if then != now:
            raise ConfigError(f"run.dir: {run_dir} was started with another {what}; use another run.name or the same {what}")
    complaints += _changes(config, run_dir)
    complaints.append(f"resuming from {path} after step {state.step}")
    return checkpoints, state, path, complaints


def _changes(config: Config, run_dir: Path) -> list[str]:
    """One line naming the keys that differ from the config this run folder was last started with."""
    import yaml

    file = run_dir / "config.yaml"
    if not file.is_file():
        return []
    before, now = _flat(yaml.safe_load(file.read_text())), _flat(config_to_dict(config))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"the config differs from the last start of this run in: {', '.join(changed)}"] if changed else []


def _flat(tree, prefix: str = "") -> dict:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {key: value for name, branch in tree.items() for key, value in _flat(branch, f"{prefix}.{name}".strip(".")).items()}


# -- processes --------------------------------------------------------------------------------------------------


def _start_processes(parts: Parts, stack, prompts, tokenizer, folder: Path, found: Path | None) -> None:
    """Ray, the policy's ranks, the engines and the verifiers; imports and start-ups run side by side."""
    from gdpo_nemo.cluster.env_nodes import EnvironmentNodes
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.placement import reserve
    from gdpo_nemo.cluster.session import keep_logs, session
    from gdpo_nemo.cluster.transports import make_transport
    from gdpo_nemo.cluster.weight_sync import WeightSync
    from gdpo_nemo.rollouts.stream import RolloutStream

    config = parts.config
    lap = parts.log.stopwatch("start", psutil.Process().create_time())
    lap("imports, config, data")
    layout = resolve_layout(config)
    config.policy.megatron_cfg = replace(config.policy.megatron_cfg, data_parallel_size=layout.data)
    stack.enter_context(session(config.cluster))
    for name in (signal.SIGTERM, signal.SIGINT):  # Ray has just installed its own.
        signal.signal(name, parts.stop)
    lap("Ray")
    stack.push(lambda kind, error, trace: _point_to_logs(kind, error, keep_logs, parts.run_dir))
    folder = folder.absolute()
    placement = reserve(config, [parts.run_dir, folder])
    if config.cluster.env_nodes:
        parts.environments = pool = EnvironmentNodes(config, placement)
    else:
        pool = EnvironmentPools(config.env, config.rollout.env_workers, config.rollout.env_timeout_s, config.run.seed)
    stack.callback(pool.close)
    parts.policy = PolicyGroup(config, str(folder), config.gdpo.max_num_steps * updates_per_step(config), placement)
    shared = bool(placement.places.shared)
    parts.fleet = fleet = EngineFleet(config, str(folder), placement, parts.policy.devices() if shared else None)
    if shared:
        fleet.ready()
        fleet.sleep()
        lap("engines, before the policy")
    parts.policy.ready()
    if found is not None:
        parts.policy.load(found)
    lap("policy, beside the engines")
    fleet.ready()
    lap("engines, after the policy")
    parts.stream = RolloutStream(config, prompts, fleet, pool, tokenizer, parts.state.position, parts.state.step)
    stack.callback(parts.stream.close)
    probe = _probe(config, prompts, folder) if config.policy.generation.verify_weights else None
    bucket = config.weights.bucket_mib << 20
    # Engines may then have to start again while the policy trains.
    keep = config.rollout.max_staleness > 0 or config.rollout.endpoint.enabled
    transport = make_transport(chosen_transport(config), parts.policy, parts.run_dir / "weights", bucket, keep)
    stack.callback(transport.close)
    parts.sync = WeightSync(parts.policy, fleet, probe, config.policy.generation.parity_limit, transport, shared)


def _probe(config: Config, prompts: PromptSource, folder: Path) -> np.ndarray:
    """A fixed sequence of tokens: the first prompt, then tokens from all over the vocabulary."""
    length = min(_PROBE_TOKENS, config.policy.max_total_sequence_length - 1)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    drawn = np.random.default_rng(0).integers(0, vocabulary, length)
    return np.concatenate([prompts.head(1)[0].token_ids, drawn])[-length:].astype(np.int32)


def _point_to_logs(kind, error, keep_logs, run_dir: Path) -> bool:
    """After a failure keep the workers' logs in the run folder and say so."""
    if isinstance(error, GdpoError):
        folder = keep_logs(run_dir)
        if folder is not None:
            error.add_note(f"logs: {folder}")
            error.args = (f"{error} (worker logs: {folder})",)
    return False
