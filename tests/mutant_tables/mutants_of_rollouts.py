"""Mutants of data, rollouts, and of what a step learns from."""

from __future__ import annotations

from mutant_tables.mutant import mutant

ROLLOUTS = (
    mutant(
        "rollouts/group_signal.py",
        "speaks = ~stats.constant | (stats.count == 1) if raw",
        "speaks = ~stats.constant if raw",
        "rollouts/test_group_signal.py::test_a_group_has_signal_if_and_only_if_a_comparison_gives_it_an_advantage",
        "a group of one member has signal where its raw reward is one",
    ),
    mutant(
        "rollouts/group_signal.py",
        "if (present & mine & table.groups.rows(speaks)).any():",
        "if (present & table.groups.rows(speaks)).any():",
        "rollouts/test_group_signal.py::test_a_group_has_signal_if_and_only_if_a_comparison_gives_it_an_advantage",
        "signal of siblings is not that of the group",
    ),
    mutant(
        "rollouts/group_signal.py",
        "if config.gdpo.rewards.get(name)}",
        "if name in config.gdpo.rewards}",
        "rollouts/test_group_signal.py::test_a_group_has_signal_if_and_only_if_a_comparison_gives_it_an_advantage",
        "a component of weight 0 gives no signal",
    ),
    mutant(
        "rollouts/depth.py",
        "self._floor = min(self.bound, self.depth + 1)",
        "self._floor = self.groups",
        "rollouts/test_depth.py::test_a_cut_that_made_the_trainer_wait_is_taken_back_at_once_and_not_repeated",
        "a cut that went too far is not repeated",
    ),
    mutant(
        "rollouts/depth.py",
        "if idle > WAITING:",
        "if idle >= 0:",
        "rollouts/test_depth.py::test_groups_that_lie_ready_bring_the_depth_down_slowly",
        "a wait within the limit changes nothing",
    ),
    mutant(
        "rollouts/turn_credit.py",
        "found[turn] += discount * found[turn + 1]",
        "found[turn] += found[turn + 1]",
        "rollouts/test_turn_credit.py::test_advantages_of_turns_are_gdpo_over_the_groups_discounted_returns",
        "discount of later turns",
    ),
    mutant(
        "rollouts/turn_credit.py",
        "(int(self.turn.max()) + 1) + self.turn",
        "int(self.turn.max()) + self.turn",
        "rollouts/test_turn_credit.py::test_advantages_of_turns_are_gdpo_over_the_groups_discounted_returns",
        "turns of two groups are not compared",
    ),
    mutant(
        "rollouts/turn_credit.py",
        "    spread[trajectory.loss_mask] = written\n",
        "    spread[: len(written)] = written\n",
        "rollouts/test_turn_credit.py::test_every_token_of_a_turn_gets_its_turns_advantage_and_the_environments_get_0",
        "advantages of turns are on tokens of the policy",
    ),
    mutant(
        "rollouts/token_credit.py",
        "    rewards[-1] = sum(values)\n",
        "    rewards[0] = sum(values)\n",
        "test_ppo.py::test_an_action_gets_its_advantage_value_and_return",
        "PPO's reward is on the last token",
    ),
    mutant(
        "rollouts/token_credit.py",
        "came = rewards_to_come(rewards, settings.gamma)",
        "came = rewards_to_come(rewards, 1.0)",
        "test_ppo.py::test_discount_reaches_centre_return_and_explained_variance",
        "gamma in the explained variance",
    ),
    mutant(
        "ppo.py",
        "return float(come.mean()) if len(come) else 0.0",
        "return 0.0",
        "test_ppo.py::test_an_action_gets_its_advantage_value_and_return",
        "PPO's centre at the first step",
    ),
    mutant(
        "ppo.py",
        "s.returns = _placed(s, returns - centre)",
        "s.returns = _placed(s, returns)",
        "test_ppo.py::test_an_action_gets_its_advantage_value_and_return",
        "the value head learns returns less the centre",
    ),
    mutant(
        "ppo.py",
        "rewards[place] = given - beta * gap",
        "rewards[place] = given + beta * gap",
        "test_ppo.py::test_kl_is_taken_from_the_reward_of_each_action",
        "sign of KL in PPO's rewards",
    ),
    mutant(
        "rollouts/replay_buffer.py",
        "if kept.uses < self.reuse}",
        "if kept.uses <= self.reuse}",
        "rollouts/test_replay_buffer.py::test_no_group_is_used_when_a_token_of_it_is_too_old_or_used_too_often",
        "a group is trained again at most reuse times",
    ),
    mutant(
        "rollouts/reroll.py",
        "again = self.after > 0 and rolls < self.most",
        "again = self.after > 0 and rolls <= self.most",
        "rollouts/test_reroll.py::test_every_position_is_trained_or_dropped_once_and_no_prompt_comes_too_often",
        "a prompt is sampled again at most as often as allowed",
    ),
    mutant(
        "rollouts/ledger.py",
        "if p < left[0] + self.window and",
        "if p <= left[0] + self.window and",
        "rollouts/test_ledger.py::test_every_position_is_trained_or_dropped_exactly_once_within_both_bounds",
        "a group is overtaken by window - 1 later ones",
    ),
    mutant(
        "rollouts/ledger.py",
        "max(0, self.updates - version - self.late) * self.groups",
        "0",
        "rollouts/test_ledger.py::test_each_update_that_engines_should_have_had_takes_a_step_from_the_bound",
        "late weights leave room for fewer groups",
    ),
)
