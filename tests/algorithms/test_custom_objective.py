"""Losses, corrections and shaping rules of the user's own, named in the config by their places."""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gdpo_nemo.algorithms import (
    LOSSES,
    LossSettings,
    OffPolicySettings,
    TokenFields,
    apply_shaping,
    compute_advantages,
    token_weights,
)
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.rollouts.user_functions import check_own_functions
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml"
SAPO = "examples/sapo.py:sapo"
VESPO = "examples/vespo.py:vespo"
OPO = "examples/opo.py:opo"
PAPO = "examples/papo.py:papo"
COSINE = "examples/custom_shaping.py:cosine"
SHAPES = (12, 8)


def config(*overrides: str):
    return load_config(DEMO, overrides)


def trl_method(name: str):
    """A function of TRL's GRPOTrainer, as it ships."""
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
    tree = ast.parse((folder / "trainer" / "grpo_trainer.py").read_text())
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)


def trl_branch(loss_type: str):
    """The statements of TRL's `_compute_loss` for one `loss_type`: from `coef_1` and the others to the token loss."""
    for node in ast.walk(trl_method("_compute_loss")):
        if isinstance(node, ast.If) and ast.unparse(node.test) == f"self.loss_type == '{loss_type}'":
            if any(isinstance(n, ast.Name) and n.id == "per_token_loss" for s in node.body for n in ast.walk(s)):
                return compile(ast.Module(node.body, []), "grpo_trainer.py", "exec")
    raise AssertionError(f"TRL has no {loss_type}")


@pytest.fixture
def batch():
    """Padded log-probs as TRL has them, the mask, and advantages of both signs and 0."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(SHAPES, generator=generator)
    old = logprobs + 0.3 * torch.randn(SHAPES, generator=generator)
    lengths = torch.randint(1, SHAPES[1] + 1, (SHAPES[0], 1), generator=generator)
    mask = (torch.arange(SHAPES[1]) < lengths).float()
    advantages = torch.randn(SHAPES[0], 1, generator=generator)
    advantages[3] = 0.0
    return logprobs.requires_grad_(), old, mask, advantages


def ours(place: str, batch, **options):
    """Token losses [kept tokens] and their gradient by the padded log-probs."""
    logprobs, old, mask, advantages = batch
    kept = mask.bool()
    ids = torch.arange(SHAPES[0])[:, None].expand(SHAPES)[kept]
    fields = TokenFields(advantages.expand(SHAPES)[kept], torch.ones(len(ids)), ids, SHAPES[0], old_logprobs=old[kept])
    returned = ImportPath(place).load()(logprobs[kept], fields, LossSettings(), **options)
    loss = returned[0] if isinstance(returned, tuple) else returned
    return loss, torch.autograd.grad(loss.sum(), logprobs)[0]


def theirs(loss_type: str, batch, **arguments):
    from types import SimpleNamespace

    logprobs, old, mask, advantages = batch
    function = trl_method("get_gamma_weights")
    function.decorator_list = []
    space = {"torch": torch, "math": math}
    exec(compile(ast.Module([function], []), "grpo_trainer.py", "exec"), space)

    def gamma(**named):
        with torch.no_grad():
            return space["get_gamma_weights"](**named)

    log_ratio = logprobs - old
    space |= {
        "self": SimpleNamespace(args=SimpleNamespace(**arguments), get_gamma_weights=gamma),
        "inputs": {}, "advantages": advantages, "mask": mask, "log_ratio": log_ratio, "coef_1": log_ratio.exp(),
        "per_token_logps": logprobs,
    }  # fmt: skip
    exec(trl_branch(loss_type), space)
    loss = space["per_token_loss"] * mask
    return loss[mask.bool()], torch.autograd.grad(loss.sum(), logprobs)[0]


@pytest.mark.parametrize("pos, neg", [(1.0, 1.05), (0.7, 2.0)])
def test_the_sapo_example_has_the_loss_and_gradient_of_trl(batch, pos, neg):
    got = ours(SAPO, batch, tau_pos=pos, tau_neg=neg)
    expected = theirs("sapo", batch, sapo_temperature_pos=pos, sapo_temperature_neg=neg)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("k_pos, rate_pos, k_neg, rate_neg", [(2.0, 3.0, 3.0, 2.0), (1.0, 0.5, 1.5, 4.0)])
def test_the_vespo_example_has_the_loss_and_gradient_of_trl(batch, k_pos, rate_pos, k_neg, rate_neg):
    given = dict(k_pos=k_pos, lambda_pos=rate_pos, k_neg=k_neg, lambda_neg=rate_neg)
    got = ours(VESPO, batch, **given)
    torch.testing.assert_close(got, theirs("vespo", batch, **{f"vespo_{name}": x for name, x in given.items()}))


def test_on_policy_sapos_gradient_is_that_of_the_clipped_loss(batch):
    logprobs, _, mask, advantages = batch
    _, gradient = ours(SAPO, (logprobs, logprobs.detach(), mask, advantages))
    torch.testing.assert_close(gradient, -advantages * mask)


def test_opos_baseline_weighs_the_groups_rewards_by_their_lengths():
    rewards = {"right": [1.0, 0.0, 0.0, 1.0, 1.0], "short": [0.0, 1.0, None, 0.5, 0.5]}
    result = compute_advantages(
        rewards, [0, 0, 0, 1, 1], weights={"right": 2.0, "short": 1.0}, lengths=[10, 20, 30, 4, 4],
        estimator=ImportPath(OPO).load(), batch_norm=False,
    )  # fmt: skip
    totals = np.array([2.0, 1.0, 0.0])
    baseline = totals @ [10, 20, 30] / 60
    np.testing.assert_allclose(result.values.numpy(), [*(totals - baseline), 0.0, 0.0])


def test_missing_reward_of_a_row_is_not_part_of_opos_baseline():
    result = compute_advantages(
        {"right": [1.0, 0.0, None]}, [0, 0, 0], lengths=[1, 3, 100], estimator=ImportPath(OPO).load(), batch_norm=False
    )
    np.testing.assert_allclose(result.values.numpy(), [0.75, -0.25, 0.0])


def test_papo_compares_the_process_of_right_answers_only():
    """arXiv 2603.26535: the outcome over all samples of a group, the process over its right ones."""
    outcome = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    process = [0.9, 0.5, None, 1.0, 0.2, 0.7, 0.1, 0.2, 0.8]
    groups = [0, 0, 0, 0, 0, 1, 1, 2, 2]
    result = compute_advantages(
        {"outcome": outcome, "process": process}, groups, weights={"outcome": 1.0, "process": 0.5},
        estimator=ImportPath(PAPO).load(), outcome="outcome", batch_norm=False,
    )  # fmt: skip

    def z(values):
        return (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)

    expected = [*z([1, 1, 1, 0, 0]), *z([1, 0]), 0, 0]
    for (first, second), pair in {(0, 1): (0.9, 0.5), (7, 8): (0.2, 0.8)}.items():
        expected[first] += 0.5 * z(pair)[0]
        expected[second] += 0.5 * z(pair)[1]
    np.testing.assert_allclose(result.values.numpy(), expected, atol=1e-6)


def test_papo_lists_the_rewards_if_its_outcome_is_not_among_them():
    with pytest.raises(ValueError, match="no reward is called 'right'; there are a, b"):
        estimator = ImportPath(PAPO).load()
        compute_advantages({"a": [1.0, 0.0], "b": [1.0, 0.0]}, [0, 0], estimator=estimator, outcome="right")


# -- what a function of one's own must be -----------------------------------------------------------------------

NEEDS_TORCH = "import torch\n"
GOOD = "def mine(logprobs, fields, settings, power=1.0):\n    return -fields.advantages * power * logprobs\n"


def written(tmp_path, code: str) -> str:
    file = tmp_path / "mine.py"
    file.write_text(NEEDS_TORCH + code)
    return f"{file}:mine"


def body(expression: str) -> str:
    return f"def mine(logprobs, fields, settings):\n    return {expression}\n"


@pytest.mark.parametrize("place", [SAPO, VESPO])
def test_the_example_losses_pass_the_trial(place):
    check_own_functions(config(f"loss_fn.type={place}"))


def test_the_example_estimator_and_rule_pass_the_trial():
    rule = f"gdpo.shaping=[{{component: length, {COSINE}: {{full: 20, zero: 40}}}}]"
    check_own_functions(config(f"gdpo.estimator={OPO}", "gdpo.batch_norm=false", rule))


@pytest.mark.parametrize(
    "code, complaint",
    [
        (body("logprobs.sum()"), r"mine returned a loss that is torch.float32 \[\], not a float tensor \[16\]"),
        (body("3.0"), "mine returned a loss that is float, not a float tensor"),
        (body("(logprobs > 0)"), r"is torch.bool \[16\]"),
        (body("logprobs / 0"), "mine returned a loss that is -inf at 16 of 16 tokens"),
        (body("(logprobs - logprobs.detach()).sqrt()"), "mine has a gradient that is inf at 16 of 16 tokens"),
        (body("0 * logprobs"), "mine has no gradient"),
        (body("fields.advantages * logprobs.detach()"), "mine has no gradient"),
        (body("{}['x']"), "mine raised KeyError: 'x'"),
        (body("(-logprobs, {'extra': logprobs.log()})"), "mine returned metric 'extra', which is nan"),
        ("def mine(logprobs, fields):\n    return -logprobs\n", r"must be a function \(logprobs, fields, settings\)"),
        ("def mine(logprobs, fields, settings, power):\n    return -logprobs\n", "then options with defaults"),
        ("mine = 3\n", "is not callable"),
        ("class mine:\n    pass\n", "is a class; this key requires a function"),
        ("import numpy as np\n" + body("np.exp(logprobs)"), "a NumPy function got a tensor; use torch functions"),
    ],
)
def test_object_that_is_not_a_loss_is_refused_before_any_process_starts(code, complaint, tmp_path):
    place = written(tmp_path, code)
    with pytest.raises(ConfigError, match=complaint) as error:
        check_own_functions(config(f"loss_fn.type={place}"))
    assert str(error.value).startswith("loss_fn") and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("beside", ["reference_policy_kl_penalty=0.1", "entropy_bonus=0.1"])
def test_a_gradient_of_kl_or_entropy_does_not_hide_that_a_loss_has_none(beside, tmp_path):
    place = written(tmp_path, body("0 * logprobs"))
    with pytest.raises(ConfigError, match="mine has no gradient"):
        check_own_functions(config(f"loss_fn.type={place}", f"loss_fn.{beside}"))


@pytest.mark.parametrize(
    "code, overrides, complaint",
    [
        ("    return log_gap.exp().sum()\n", [], "returned a weight that is torch.float32"),
        ("    return log_gap.exp() / 0\n", [], "returned a weight that is inf"),
        ("    return log_gap\n", [], "returned a negative weight"),
        (
            "    return log_gap.exp()\n",
            ["loss_fn.type=gspo", "loss_fn.off_policy.level=sequence"],
            "the per-token weights of",
        ),
    ],
)
def test_object_that_is_not_a_correction_is_refused_before_any_process_starts(code, overrides, complaint, tmp_path):
    place = written(tmp_path, "def mine(log_gap, fields, settings):\n" + code)
    with pytest.raises(ConfigError, match=complaint):
        check_own_functions(config(f"loss_fn.off_policy.mode={place}", *overrides))


def rule(place: str, options: str = "{}") -> str:
    return f"gdpo.shaping=[{{component: length, {place}: {options}}}]"


@pytest.mark.parametrize(
    "code, complaint",
    [
        ("def mine(values, context):\n    return values[:1]\n", r"mine returned shape \(1,\) for 3 sequences"),
        ("def mine(values, context):\n    return values / 0\n", "mine returned nan for the reward 0"),
        ("def mine(values, context):\n    return values + float('inf')\n", r"returned inf for .* \(2 are not finite\)"),
        ("def mine(values, context):\n    return {}['x']\n", "mine raised KeyError"),
        ("def mine(values):\n    return values\n", r"must be a function \(values, context\)"),
        ("def mine(values, context, a):\n    return values\n", "then options with defaults"),
    ],
)
def test_object_that_is_not_a_shaping_rule_is_refused_before_any_process_starts(code, complaint, tmp_path):
    with pytest.raises(ConfigError, match=f"gdpo.shaping: shaping rule .*{complaint}"):
        check_own_functions(config(rule(written(tmp_path, code))))


@pytest.mark.parametrize(
    "override, complaint",
    [
        ("loss_fn.type=nowhere.py:mine", "loss_fn.type: nowhere.py not found"),
        ("loss_fn.type=examples/sapo.py:spao", "loss_fn.type: .*has no function spao"),
        ("loss_fn.off_policy.mode=nowhere.py:mine", "loss_fn.off_policy.mode: nowhere.py not found"),
        (rule("nowhere.py:mine"), "gdpo.shaping: nowhere.py not found"),
        ("loss_fn.options={a: 1}", "loss_fn.options: unknown option 'a' of clipped_pg; no options are known"),
        ("loss_fn.off_policy={mode: mask, options: {a: 1}}", "loss_fn.off_policy.options: unknown option 'a' of mask"),
    ],
)
def test_places_and_options_are_checked_without_running_them(override, complaint):
    with pytest.raises(ConfigError, match=complaint):
        validate(config(override))


@pytest.mark.parametrize(
    "overrides, complaint",
    [
        (["loss_fn.options={tau: 1.0}"], "loss_fn.options: unknown option 'tau' of .*sapo; did you mean 'tau_"),
        (["loss_fn.options={tau_pos: much}"], "loss_fn.type: examples/sapo.py:sapo raised"),
    ],
)
def test_options_of_an_own_loss_are_its_further_parameters(overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_own_functions(config(f"loss_fn.type={SAPO}", *overrides))


def test_the_dry_run_tries_the_loss_and_refuses_it_in_one_line(tmp_path, capsys):
    place = written(tmp_path, body("logprobs / 0"))
    assert cli.main(["train", "--dry-run", "--config", str(DEMO), f"loss_fn.type={place}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"loss_fn.type: {place} returned a loss that is" in said


def test_explain_mentions_custom_losses_corrections_and_estimators(capsys):
    for key in ("loss_fn.type", "loss_fn.off_policy.mode", "gdpo.estimator"):
        assert cli.main(["explain", key]) == 0
        assert "or a custom function: file.py:name" in capsys.readouterr().out
    assert cli.main(["explain", "loss_fn.type"]) == 0
    assert ", ".join(LOSSES) in capsys.readouterr().out


# -- in a step ---------------------------------------------------------------------------------------------------


def step(place: str, function, logprobs=None, **settings):
    lengths = [2, 3]
    ids = torch.tensor([0, 0, 1, 1, 1])
    logprobs = torch.full((5,), -1.0) if logprobs is None else logprobs
    weights = torch.from_numpy(token_weights(lengths, "token_mean")).float()[ids]
    fields = TokenFields(
        torch.tensor([1.0, -2.0])[ids], weights, ids, 2, old_logprobs=logprobs - 0.5, sampler_logprobs=logprobs - 0.7
    )
    settings = LossSettings(type=place, **settings)
    return policy_loss(logprobs.requires_grad_(), None, fields, settings, functions={place: function})


def test_a_function_that_is_a_built_in_loss_has_its_value_gradient_and_metrics():
    for name, entry in LOSSES.items():
        got, want = step("mine.py:f", entry.function), step(name, None)
        assert got[0].equal(want[0]) and got[1].sums.keys() == want[1].sums.keys()
        for loss in (got[0], want[0]):
            loss.backward()


def test_a_non_finite_value_or_gradient_ends_the_step_with_the_functions_name():
    odd = torch.tensor([-1.0, -1.0, -2.0, -1.0, -1.0])
    with pytest.raises(ValueError, match=r"loss_fn.type: mine.py:f returned a loss that is -?inf at 1 of 5 tokens"):
        step("mine.py:f", lambda logprobs, fields, settings: 1 / (logprobs + 2), odd.clone())
    loss, _ = step("mine.py:f", lambda logprobs, fields, settings: (logprobs + 2).abs().sqrt(), odd.clone())
    with pytest.raises(ValueError, match=r"loss_fn.type: mine.py:f has a gradient that is .* at 1 of 5 tokens"):
        loss.backward()


def test_an_own_losss_metrics_are_summed_under_its_names_and_keep_no_graph():
    _, metrics = step("mine.py:f", lambda logprobs, fields, settings: (-logprobs, {"extra": 2 * logprobs}))
    assert metrics.sums["extra"] == -10 and not metrics.sums["extra"].requires_grad


def test_an_own_correction_weighs_the_tokens_and_gets_no_gradient():
    place = "mine.py:f"
    lengths = torch.tensor([0, 0, 1])
    logprobs = torch.zeros(3, requires_grad=True)
    sampled = torch.tensor([-0.5, 0.0, float("nan")])
    fields = TokenFields(torch.ones(3), torch.ones(3), lengths, 2, sampler_logprobs=sampled)
    settings = LossSettings(type="reinforce", off_policy=OffPolicySettings(mode=place, options={"power": 2.0}))

    def f(log_gap, fields, settings, power=1.0):
        return (power * log_gap).exp()

    loss, metrics = policy_loss(logprobs, None, fields, settings, functions={place: f})
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([math.e, 1.0, 1.0]))
    assert metrics.sums["importance_weight"] == pytest.approx(math.e + 2) and metrics.sums["importance_masked"] == 0


def test_an_own_rule_changes_present_rewards_and_creates_a_component():
    columns = {"right": [1.0, None, 3.0]}
    rules = [{"component": "right", "m:double": {"by": 2.0}}, {"component": "length", "m:words": None}]
    functions = {
        "m:double": lambda values, context, by=1.0: np.where(np.isnan(values), 9.0, values * by),
        "m:words": lambda values, context: values + context.need("lengths"),
    }
    shaped = apply_shaping(columns, rules, lengths=[4, 5, 6], functions=functions)
    np.testing.assert_array_equal(shaped["right"], [2.0, np.nan, 6.0])
    np.testing.assert_array_equal(shaped["length"], [4.0, 5.0, 6.0])


def test_a_steps_rewards_are_shaped_by_the_rule_that_the_config_names():
    from gdpo_nemo.data.records import Prompt, Trajectory
    from gdpo_nemo.rollouts.credit import reward_columns

    prompt = Prompt("0", np.array([1], np.int32), "", "digit_sort")
    made = [
        Trajectory(prompt, 0, np.zeros(n, np.int32), np.zeros(n, np.float32), 0, "", "stop", {"length": 1.0})
        for n in (10, 30, 50)
    ]
    columns = reward_columns(made, config(rule(COSINE, "{full: 20, zero: 40}")))
    np.testing.assert_allclose(columns["length"], [1.0, 0.5, 0.0])


def test_a_place_in_a_file_is_sent_as_one_that_any_working_directory_finds(tmp_path, monkeypatch):
    written(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert ImportPath("mine.py:mine").absolute() == f"{tmp_path / 'mine.py'}:mine"
    assert ImportPath(SAPO).absolute() == f"{REPOSITORY / SAPO}"
    assert (
        ImportPath("clipped_pg").absolute() == "clipped_pg"
        and ImportPath("some.package:f").absolute() == "some.package:f"
    )
