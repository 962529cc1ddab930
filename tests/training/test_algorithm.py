"""Which algorithm a config names, what it need not have where that one does not sample, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gdpo_nemo.algorithms import LossSettings, OffPolicySettings
from gdpo_nemo.commands import cli
from gdpo_nemo.config.algorithm_choice import ALGORITHMS, AlgorithmSpec, spec_of
from gdpo_nemo.config.changes import Change, check_changes
from gdpo_nemo.config.effects import value_of
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.config.placement import place
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.rollouts.batches import PromptBatch, PromptStream
from gdpo_nemo.training.algorithm import Algorithm, load_algorithm, with_absolute_paths
from gdpo_nemo.training.gdpo import GDPO, TokenScores
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError, UserCodeFailed
from gdpo_nemo.utils.import_path import ImportPath

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml"
SFT = REPOSITORY / "examples" / "custom_sft.yaml"
CLASS = """
from gdpo_nemo.training.algorithm import Algorithm

class Mine(Algorithm):
    {body}
"""
METHODS = "prepare = updates = lambda self, batch: batch"


def mine(tmp_path, body: str, text: str = CLASS) -> str:
    file = tmp_path / "mine.py"
    file.write_text(text.format(body=body))
    return f"algorithm.type={file}:Mine"


def test_the_default_is_gdpo_and_samples():
    config = load_config(DEMO)
    assert (
        load_algorithm(config, spec_of(config)) is GDPO
        and spec_of(config).samples
        and resolve_layout(config).engines == 1
    )


def test_a_config_without_rewards_and_environments_is_for_one_that_does_not_sample():
    config = load_config(SFT)
    assert not spec_of(config).samples and config.gdpo.rewards == {} and config.env == {}
    validate(config)
    assert issubclass(load_algorithm(config, spec_of(config)), Algorithm) and resolve(config).updates_per_step == 1
    with pytest.raises(ConfigError, match="env: must not be empty|gdpo.rewards: must not be empty"):
        validate(load_config(SFT, ["algorithm.type=gdpo", "gdpo.num_generations_per_prompt=8"]))


def test_rewards_may_be_omitted_if_nothing_is_sampled(tmp_path):
    text = "policy: {model_name: organisation/model}\ndata: {train: {path: rows.jsonl}}\n"
    (tmp_path / "sft.yaml").write_text(text)
    place = "algorithm.type=examples/custom_sft.py:SupervisedFineTuning"
    assert load_config(tmp_path / "sft.yaml", [place]).gdpo.rewards == {}
    with pytest.raises(ConfigError, match="gdpo.rewards: must be set"):
        load_config(tmp_path / "sft.yaml")


def test_policy_gets_all_gpus_if_no_engine_is_started():
    gpus = ["cluster.gpus_per_node=4", "policy.generation.engines=2"]
    config = load_config(SFT, gpus)
    assert resolve_layout(config).data == 4 and place(config.cluster, resolve_layout(config)).engines == ()
    assert resolve_layout(load_config(DEMO, gpus)).data == 2


@pytest.mark.parametrize(
    "override, complaint",
    [
        ("algorithm.type=gdppo", "algorithm.type: 'gdppo' is not a valid value; did you mean gdpo"),
        ("algorithm.type=nowhere.py:Mine", "algorithm.type: nowhere.py not found"),
        ("algorithm.type=examples/custom_sft.py:Sft", "custom_sft.py has no class Sft"),
        ("gdpo.estimator=grpo", "gdpo.estimator: has no effect with an algorithm that does not sample"),
        ("rollout.max_staleness=1", "rollout.max_staleness: has no effect with an algorithm that does not sample"),
        ("gdpo.num_generations_per_prompt=0", "gdpo.num_generations_per_prompt: must be at least 1"),
    ],
)
def test_a_wrong_choice_is_refused_without_running_it(override, complaint):
    with pytest.raises(ConfigError, match=complaint):
        validate(load_config(SFT, [override]))


@pytest.mark.parametrize(
    "body, complaint",
    [
        ("prepare = None", "does not define updates"),
        (f"{METHODS}\n    samples = False", ""),
        (f"{METHODS}\n    samples: bool = False", ""),
        (f"{METHODS}\n    check = classmethod(lambda cls, config: {{}}['x'])", "Mine.check raised KeyError"),
    ],
)
def test_custom_class_is_checked_before_any_process_starts(body, complaint, tmp_path):
    config = load_config(SFT if "samples" in body else DEMO, [mine(tmp_path, body)])
    if not complaint:
        assert load_algorithm(config, spec_of(config)).samples is spec_of(config).samples is False
        return
    with pytest.raises(ConfigError, match=f"algorithm.type: .*{complaint}"):
        load_algorithm(config, spec_of(config))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_declaration_names_the_class_the_check_and_keys_that_exist(name):
    spec = ALGORITHMS[name]
    found = ImportPath(spec.import_path).load()
    assert issubclass(found, Algorithm) and found.samples is spec.samples and spec.about
    assert spec.check is None or callable(ImportPath(spec.check).load())
    keys = [key for unused in spec.unused for key in unused.keys.split()] + [spec.section] * bool(spec.section)
    config = Config()
    for key in keys:
        section, _, last = key.rpartition(".")
        assert hasattr(value_of(config, section), last)


def test_custom_class_declares_only_whether_it_samples():
    spec = spec_of(load_config(SFT))
    assert spec == AlgorithmSpec("examples/custom_sft.py:SupervisedFineTuning", samples=False)


def test_algorithms_with_the_same_head_continue_each_others_checkpoints(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "rloo_value", ALGORITHMS["ppo"])
    check_changes([Change("algorithm.type", "ppo", "rloo_value")], "step_4")
    for before, now, owner in (("gdpo", "ppo", "ppo"), ("reward_model", "dpo", "reward_model")):
        with pytest.raises(ConfigError, match=f"only {owner} trains a"):
            check_changes([Change("algorithm.type", before, now)], "step_4")


class Failing(Algorithm):
    """Fails in every method but ``updates``, which fails behind the first update."""

    def __init__(self):
        pass

    def prepare(self, batch):
        raise KeyError("x")

    def updates(self, prepared):
        yield []
        raise KeyError("x")

    @classmethod
    def needs_reference(cls, config):
        raise KeyError("x")


class Inheriting(Failing):
    """Is the one that errors name."""

    def prepare(self, batch):
        return super().prepare(batch)


def test_errors_name_the_class_and_the_method():
    failing = Inheriting()
    calls = {
        "prepare": lambda: failing.prepare(None),
        "metrics": lambda: failing.metrics(None, [None], 0),  # inherited from the package
    }
    for method, call in calls.items():
        with pytest.raises(UserCodeFailed, match=f"^algorithm.type: Inheriting.{method} raised "):
            call()
    with pytest.raises(ConfigError, match=r"^algorithm.type: Inheriting.needs_reference raised KeyError: 'x'$"):
        Inheriting.needs_reference(None)


def test_errors_between_two_updates_are_named():
    updates = iter(Inheriting().updates(None))
    assert next(updates) == []
    with pytest.raises(UserCodeFailed, match=r"^algorithm.type: Inheriting.updates raised KeyError: 'x'$"):
        next(updates)


def test_errors_of_the_package_are_not_named():
    with pytest.raises(AttributeError):
        GDPO.__new__(GDPO).metrics(None, [None], 0)


def test_mixin_of_a_custom_class_is_called_before_inherited_methods():
    class First(Failing):
        pass

    class Second(Failing):
        def state(self):
            return {"second": 1}

    class Both(First, Second):
        pass

    assert Both().state() == {"second": 1}


def test_object_that_is_not_an_algorithm_is_refused(tmp_path):
    config = load_config(DEMO, [mine(tmp_path, "pass", "class Mine:\n    {body}\n")])
    with pytest.raises(ConfigError, match="Mine is not a subclass of gdpo_nemo.Algorithm"):
        load_algorithm(config, spec_of(config))


def test_class_that_inherits_not_sampling_must_declare_it(tmp_path):
    base = CLASS.replace("class Mine(Algorithm)", "class Base(Algorithm)").format(
        body=f"{METHODS}\n    samples = False"
    )
    config = load_config(DEMO, [mine(tmp_path, "pass", base + "\nclass Mine(Base):\n    {body}\n")])
    with pytest.raises(ConfigError, match="must define `samples = False` in the class Mine itself"):
        load_algorithm(config, spec_of(config))


def test_the_built_in_algorithm_has_no_options():
    with pytest.raises(ConfigError, match="algorithm.options: gdpo does not support options"):
        load_algorithm(
            load_config(DEMO, ["algorithm.options={a: 1}"]), spec_of(load_config(DEMO, ["algorithm.options={a: 1}"]))
        )


@pytest.mark.parametrize(
    "override, complaint",
    [
        ("algorithm.options={target: x}", "algorithm.options: unknown option 'target'; known: target_key"),
        ("gdpo.num_generations_per_prompt=2", "gdpo.num_generations_per_prompt: must be 1"),
    ],
)
def test_the_dry_run_asks_the_algorithm_in_one_line(override, complaint, capsys):
    assert cli.main(["train", "--dry-run", "--config", str(SFT), override]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_dry_run_reports_missing_engines_and_the_plan_is_refused(capsys):
    assert cli.main(["train", "--dry-run", "--config", str(SFT)]) == 0
    said = capsys.readouterr().out
    assert "# engines    none" in said and "512 rows" in said and "refit" not in said
    assert cli.main(["plan", "--config", str(SFT), "policy.model_name=organisation/model"]) == 2


def test_an_algorithm_keeps_a_reference_only_where_a_kl_asks_for_one():
    for overrides, kept in (
        ([], False),
        (["loss_fn.reference_policy_kl_penalty=0.1"], True),
        (["gdpo.kl_in_reward=0.1"], True),
    ):
        assert GDPO.needs_reference(load_config(DEMO, overrides)) is kept


def test_the_ranks_get_places_that_hold_in_any_working_directory():
    plain = LossSettings(type="gspo")
    assert with_absolute_paths(plain) is plain
    own = LossSettings(type="examples/sapo.py:sapo", off_policy=OffPolicySettings(mode="some.package:f"))
    sent = with_absolute_paths(own)
    assert sent.type == f"{REPOSITORY}/examples/sapo.py:sapo" and sent.off_policy.mode == "some.package:f"
    own = LossSettings(off_policy=OffPolicySettings(mode="examples/sapo.py:sapo"))
    assert with_absolute_paths(own).off_policy.mode == f"{REPOSITORY}/examples/sapo.py:sapo"
    config = load_config(DEMO, ["loss_fn.type=examples/sapo.py:sapo"])
    assert GDPO(config, None, None, None).loss.type == sent.type and config.loss_fn.type == "examples/sapo.py:sapo"


class Characters:
    """A tokenizer of characters."""

    eos_token_id = 0
    chat_template = None

    def __call__(self, texts, **options):
        if isinstance(texts, str):
            return {"input_ids": [ord(character) for character in texts]}
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


def test_rows_without_an_environment_are_dealt_in_the_order_of_every_run(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}=", "answer": "{i}"}}\n' for i in range(6)))
    overrides = [f"data.train.path={tmp_path}/rows.jsonl", "gdpo.num_prompts_per_step=4", "data.validation=null"]
    config = load_config(SFT, [*overrides, "gdpo.val_period=0", "gdpo.val_at_start=false"])
    source = PromptSource(config.data.train, {}, Characters(), split="train", seed=3, max_prompt_tokens=8)
    stream = PromptStream(config, source, position=0)
    first, second = stream.get_batch(0), stream.get_batch(1)
    assert (first.next_position, second.next_position) == (4, 8)
    assert [p.id for p in first.prompts] == [p.id for p in source.batch(0, 4)]
    resumed = PromptStream(config, source, position=4).get_batch(1)
    assert [p.id for p in resumed.prompts] == [p.id for p in second.prompts]
    assert first.prompts[0].fields["answer"] == first.prompts[0].text.rstrip("=")


def test_the_example_trains_the_answer_and_its_end_each_token_alike():
    config = load_config(SFT, ["policy.train_global_batch_size=2", "gdpo.num_prompts_per_step=4"])
    algorithm = load_algorithm(config, spec_of(config))(config, None, Characters(), None)
    assert algorithm.loss.type == "reinforce"
    prompts = [Prompt(str(n), np.array([1, 2], np.int32), "", "", {"answer": "7" * n}) for n in (1, 3, 2, 2)]
    updates = list(algorithm.updates(algorithm.prepare(PromptBatch(prompts, 4))))
    assert [[len(s.completion_ids) for s in update] for update in updates] == [[2, 4], [3, 3]]
    assert updates[0][1].completion_ids.tolist() == [55, 55, 55, 0]
    for update in updates:
        assert sum(s.weight * len(s.completion_ids) for s in update) == pytest.approx(1)
        assert {s.advantage for s in update} == {1.0}


@pytest.mark.parametrize(
    "scored, key, expected",
    [
        ([0, 2], None, [0.0, None, -2.0]),
        ([], None, None),
        ([], "save_trainer_logprobs", [0.0, -1.0, -2.0]),
        ([0, 2], "save_trainer_logprobs", [0.0, -1.0, -2.0]),
        ([0, 2], "save_entropies", [0.0, -1.0, -2.0]),
        ([], "save_entropies", [0.0, -1.0, -2.0]),
    ],
)
def test_scores_of_tokens_are_recorded_if_known_or_requested_from_one_pass(scored, key, expected):
    tokens = np.arange(2, dtype=np.int32)
    sequences = [TrainSequence(np.full(2, n, np.int32), tokens, np.zeros(2, np.float32)) for n in range(3)]
    asked = []

    def logprobs(given):
        asked.extend(int(sequence.prompt_ids[0]) for sequence in given)
        return [np.full(2, -sequence.prompt_ids[0], np.float32) for sequence in given]

    def both(given):
        return [np.stack((values, values + 10), axis=-1) for values in logprobs(given)]

    way = {"logprobs_and_entropies": both} if key == "save_entropies" else {"logprobs": logprobs}
    policy = SimpleNamespace(**way)
    scores = TokenScores(policy, load_config(None, [f"rollout.{key}=true"] if key else []))
    if scored:
        old = scores.logprobs([sequences[place] for place in scored])
        assert [values.tolist() for values in old] == [[-place, -place] for place in scored]
    found, entropies = scores.recorded(sequences)
    assert (found and [None if values is None else values[0] for values in found]) == expected
    assert sorted(asked) == ([0, 1, 2] if key else scored)
    if key == "save_entropies":
        assert [values.tolist() for values in entropies] == [[10 - n, 10 - n] for n in range(3)]
    else:
        assert entropies is None
