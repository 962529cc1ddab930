"""Distillation: which advantage a token gets from the teacher, and what is refused before a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bad_input import EMBEDDING_ONLY

from gdpo_nemo.commands import cli
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.data.tokenizer import check_same_tokens, check_vocabulary
from gdpo_nemo.training.algorithm import load_algorithm
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "distillation_tiny_cpu.yaml"
TEACHER = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 21, "hidden_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512,
    "max_position_embeddings": 128,
}  # fmt: skip


class Policy:
    """A teacher that gives every token the log-prob -token / 10, and a policy that gives it -0.5."""

    def __init__(self):
        self.teacher = None
        self.asked = []

    def load_teacher(self, folder):
        self.teacher = folder

    def logprobs(self, sequences, teacher=False):
        assert self.teacher.is_absolute()
        self.asked.append((teacher, len(sequences)))
        return [
            np.where(
                True if s.loss_mask is None else s.loss_mask, -s.completion_ids / 10 if teacher else -0.5, np.nan
            ).astype(np.float32)
            for s in sequences
        ]


@pytest.fixture
def teacher(tmp_path, monkeypatch):
    """The override that names a teacher."""
    monkeypatch.chdir(REPOSITORY)

    def write(**fields) -> str:
        (tmp_path / "teacher").mkdir()
        (tmp_path / "teacher" / "config.json").write_text(json.dumps({**TEACHER, **fields}))
        (tmp_path / "teacher" / "model.safetensors").write_bytes(EMBEDDING_ONLY)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / "teacher" / name).write_text("{}")
        return f"teacher.model_name={tmp_path}/teacher"

    return write


def groups() -> list[Group]:
    prompt = Prompt("train/0", np.array([1, 2], np.int32), "", "digit_sort")
    made = []
    for index, (ids, mask, outcome) in enumerate(
        [([3, 4], None, Outcome.OK), ([5, 6, 7], [True, False, True], Outcome.OK), ([9], None, Outcome.ABORTED)]
    ):
        logprobs = np.where(np.ones(len(ids), bool) if mask is None else mask, -0.25, np.nan).astype(np.float32)
        rewards = {"correctness": float(index), "format": 1.0, "length": 0.0} if outcome is Outcome.OK else {}
        made.append(
            Trajectory(
                prompt, index, np.array(ids, np.int32), logprobs, 0, "", "stop", rewards, outcome=outcome,
                loss_mask=None if mask is None else np.array(mask),
            )
        )  # fmt: skip
    return [Group(prompt, made)]


def test_advantage_of_a_token_is_the_difference_of_teacher_and_policy_log_probs(teacher):
    config = load_config(CONFIG, [teacher()])
    algorithm = load_algorithm(config, spec_of(config))(config, Policy(), None, None)
    (group,) = groups()
    batch = SimpleNamespace(trajectories=group.trajectories, groups=[group], version=0)
    prepared = algorithm.prepare(batch)
    (update,) = prepared.updates
    np.testing.assert_allclose(update[0].advantage, [-0.05, -0.15], rtol=1e-6)
    np.testing.assert_allclose(update[1].advantage, [-0.25, 0.0, -0.45], rtol=1e-6)
    assert update[2].weight == 0 and not update[2].has_advantage
    # Every token that is trained counts alike; the masked one and the aborted sample do not.
    assert prepared.measured["teacher/kl"] == pytest.approx((0.05 + 0.15 + 0.25 + 0.45) / 4)
    found = algorithm.validate([group])
    assert found["validation/teacher_kl"] == pytest.approx(0.225) and found["validation/correctness"] == 0.5
    for key, value in (("val_temperature", 0.0), ("val_top_p", 0.9), ("val_top_k", 5)):
        usual = getattr(algorithm.config.gdpo, key)
        setattr(algorithm.config.gdpo, key, value)
        assert "validation/teacher_kl" not in algorithm.validate([group])
        setattr(algorithm.config.gdpo, key, usual)


def test_advantage_is_finite_if_the_sampler_gave_no_log_prob(teacher):
    """A rollout function of the user's own may leave them out; the losses take the trainer's then, and so does this."""
    config = load_config(CONFIG, [teacher()])
    algorithm = load_algorithm(config, spec_of(config))(config, Policy(), None, None)
    (group,) = groups()
    group.trajectories[1].logprobs[2] = np.nan
    prepared = algorithm.prepare(SimpleNamespace(trajectories=group.trajectories, groups=[group], version=0))
    (update,) = prepared.updates
    np.testing.assert_allclose(update[0].advantage, [-0.05, -0.15], rtol=1e-6)
    np.testing.assert_allclose(update[1].advantage, [-0.25, 0.0, -0.2], rtol=1e-6)
    assert prepared.measured["teacher/kl"] == pytest.approx((0.05 + 0.15 + 0.25 + 0.2) / 4)
    assert algorithm.policy.asked == [(True, 3), (False, 1)], "only the sequence without a log-prob is scored again"
    assert algorithm.validate([group])["validation/teacher_kl"] == pytest.approx(0.65 / 4)


REFUSED = [
    ("teacher.model_name=null", "teacher.model_name: must be set with algorithm distillation"),
    ("teacher.model_name=no/such/folder", "teacher.model_name: no/such/folder is not the folder"),
    ("algorithm.type=gdpo", "teacher.model_name: has no effect unless algorithm.type is distillation"),
    ("gdpo.estimator=grpo", "gdpo.estimator: has no effect with algorithm distillation"),
    ("gdpo.batch_norm=false", "gdpo.batch_norm: has no effect with algorithm distillation"),
    ("gdpo.kl_in_reward=0.1", "gdpo.kl_in_reward: has no effect with algorithm distillation"),
    ("policy.generation.temperature=0.7", "policy.generation.temperature: must be 1 with algorithm distillation"),
    ("policy.generation.top_p=0.9", "policy.generation.top_p: must be 1 with algorithm distillation"),
    ("policy.generation.top_k=9", "policy.generation.top_k: must be -1 with algorithm distillation"),
    ("loss_fn.type=target_po", "loss_fn.type: target_po does not support the token-level advantages"),
    ("loss_fn.off_policy.sequence_mask_threshold=0.1", "sequence_mask_threshold"),
    ("policy.megatron_cfg.tensor_model_parallel_size=8", "tensor_model_parallel_size"),
]


@pytest.mark.parametrize("override, sentence", REFUSED, ids=[case[0] for case in REFUSED])
def test_impossible_distillation_is_refused_in_one_line(override, sentence, teacher, capsys):
    assert cli.main(["train", "--config", str(CONFIG), teacher(), override, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


def test_a_teacher_may_be_a_name_on_the_hub(teacher):
    teacher()
    override = "teacher.model_name=organisation/model"
    assert cli.main(["train", "--config", str(CONFIG), override, "--dry-run"]) == 0


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}, "does not divide"),
        ({"vocab_size": 20}, "has 20 tokens, fewer than the policy's 21"),
        ({"model_type": "gpt_neo"}, "gpt_neo"),
        ({"max_position_embeddings": 32}, "max_total_sequence_length"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_by_its_own_key(fields, sentence, teacher):
    student = ["policy.model_factory=examples/make_tiny_model.py:make_tiny_model", "policy.model_name=results/none"]
    config = load_config(CONFIG, [*student, "policy.megatron_cfg.tensor_model_parallel_size=2", teacher(**fields)])
    with pytest.raises(ConfigError, match=f"^teacher.model_name: .*{sentence}"):
        validate(config)


def test_another_tokenizer_is_refused_with_a_token_that_differs(digit_model, tmp_path):
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(digit_model)
    check_same_tokens(own, digit_model, "teacher.model_name")
    shutil.copytree(digit_model, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    file.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match="teacher.model_name: .* has a different tokenizer .* 2 tokens differ, for example '7'"
    ):
        check_same_tokens(own, tmp_path / "other", "teacher.model_name")
    with pytest.raises(ConfigError, match="policy.tokenizer_name: 2 tokens differ .* for example '7'"):
        check_vocabulary(own, tmp_path / "other")
    own.add_tokens(["<|im_end|>"], special_tokens=True)
    check_vocabulary(own, digit_model)
