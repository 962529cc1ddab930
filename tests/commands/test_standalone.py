"""``parity``, ``convert`` and ``eval`` take the GPUs there are: one, two or eight, in turns where there are too few."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gdpo_nemo.cluster import fleet, policy_group, session
from gdpo_nemo.commands import cli, parity
from gdpo_nemo.commands.arguments import standalone_config
from gdpo_nemo.commands.convert import export_config
from gdpo_nemo.commands.evaluate import without_policy
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import save_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import UpdateResult
from gdpo_nemo.training.checkpoints import Checkpoints, RunState
from gdpo_nemo.utils.errors import ConfigError

MODEL = {
    "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 128, "max_position_embeddings": 300,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    Qwen2ForCausalLM(Qwen2Config(**MODEL)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def machine(monkeypatch):
    """``machine(n)``: torch finds ``n`` GPUs, and policies and engines are records of the devices they hold."""
    record = Machine()

    def of(gpus: int) -> Machine:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        record.gpus = gpus
        return record

    @contextlib.contextmanager
    def standing(cluster):
        assert cluster.gpus_per_node == record.gpus
        yield

    monkeypatch.setattr(session, "session", standing)
    monkeypatch.setattr(policy_group, "PolicyGroup", record.policy)
    monkeypatch.setattr(fleet, "EngineFleet", record.engines)
    monkeypatch.setattr(parity, "require_libraries", lambda config: None)
    return of


class Machine:
    """The devices in use, and the most there ever were."""

    def __init__(self):
        self.gpus = self.used = self.most = 0
        self.started: list[str] = []

    def take(self, name: str, devices: int) -> None:
        self.started.append(name)
        self.used += devices
        self.most = max(self.most, self.used)
        assert not self.gpus or self.used <= self.gpus, f"{name}: {self.used} of {self.gpus} GPUs"

    def policy(self, config: Config, folder: str, total_updates: int) -> Part:
        ranks = resolve_layout(config).policy_ranks
        return Part(self, f"{ranks} ranks", ranks)

    def engines(self, config: Config, folder: str, placement) -> Part:
        assert not placement.places.shared, "Ray gives the engine its device"
        return Part(self, "engine", config.policy.generation.engines)


class Part:
    """A policy or an engine that finds the same log-probs as every other."""

    def __init__(self, machine: Machine, name: str, devices: int):
        self.machine = machine
        self.devices = devices
        machine.take(name, devices)

    def ready(self) -> None:
        pass

    def close(self) -> None:
        self.machine.used -= self.devices

    def logprobs(self, sequences, temperature=None, packed=True):
        return [np.full(len(s.completion_ids), -1.0, np.float32) for s in sequences]

    def score(self, sequences, images):
        return {0: [np.full(len(ids) - 1, -1.0, np.float32) for ids in sequences]}

    def load_checkpoint(self, folder, weights_only=False):
        pass

    def export(self, folder):
        folder.mkdir()

    def train(self, sequences, settings):
        return UpdateResult(1.0, 1.0, 0.0, False, {}, {})


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_parity_takes_turns_where_all_parts_at_once_need_more_gpus(gpus, machine, model, capsys):
    record = machine(gpus)
    layout = f"tensor={gpus or 2}"
    assert cli.main(["parity", "--model", str(model), "--layout", layout, "--engine"]) == 0
    assert "parity holds" in capsys.readouterr().out
    assert record.started == [f"{gpus or 2} ranks", "engine", "1 ranks"] and record.used == 0
    assert record.most == (gpus or 4)


def test_parity_starts_all_parts_at_once_if_there_are_enough_devices(machine, model):
    record = machine(8)
    assert cli.main(["parity", "--model", str(model), "--layout", "data=6", "--engine"]) == 0
    assert record.most == 8
    record = machine(2)
    record.most = 0
    assert cli.main(["parity", "--model", str(model), "--engine"]) == 0
    assert record.most == 2


def test_a_layout_larger_than_the_machine_is_refused_in_one_line(machine, model, capsys):
    machine(2)
    assert cli.main(["parity", "--model", str(model), "--layout", "data=4", "--engine"]) == 2
    err = capsys.readouterr().err
    assert "the policy needs 4 GPUs (tensor x pipeline x context x data), but 2 GPUs are available" in err
    assert "engines" not in err and err.count("\n") == 1


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_a_policy_that_only_converts_may_take_every_gpu(gpus, machine, model):
    machine(gpus)
    for config in (standalone_config(model, f"data={gpus}"), export_config(model, f"data={gpus}", Config())):
        layout = resolve_layout(config)
        assert (layout.devices, layout.engine_ranks, layout.gpus) == (gpus, 0, gpus)
    with pytest.raises(ConfigError, match=f"needs {gpus + 1} GPUs"):
        standalone_config(model, f"data={gpus + 1}")


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_eval_gives_every_gpu_to_the_engines_and_before_that_one_to_the_policy(gpus, machine, model):
    machine(gpus)
    config = Config()
    config.cluster = replace(config.cluster, gpus_per_node=gpus)
    config.policy.generation.engines = gpus
    without_policy(config)
    assert resolve_layout(config).devices == gpus
    assert resolve_layout(export_config(model, run=config)).devices == 1


def test_a_converted_checkpoint_has_the_card_of_its_run_up_to_its_step(machine, model, tmp_path_factory, capsys):
    machine(0)
    run = tmp_path_factory.mktemp("run")
    config = Config()
    config.policy.model_name = str(model)
    config.policy.precision = "float32"
    config.gdpo.rewards = {"right": 2.0}
    config.run.dir = str(run)
    save_config(config, run / "config.yaml")
    rows = [{"step": step, "validation/right": step / 8} for step in (0, 2, 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = Checkpoints(run / "checkpoints", 1, 0, None).save(RunState(step=2), lambda folder: None)
    assert cli.main(["convert", "--to", "hf", str(checkpoint), str(run / "hf")]) == 0, capsys.readouterr().err
    text = (run / "hf" / "README.md").read_text()
    assert "trained with gdpo_nemo for 2 steps" in text and "| right | 2 | 0.000 | 0.250 |" in text
    assert (run / "hf" / "rewards.png").is_file()
