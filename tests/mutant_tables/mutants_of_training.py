"""Mutants of the modules of a run: supervised training, distillation, checkpoints, resume."""

from __future__ import annotations

from mutant_tables.mutant import mutant

TRAINING = (
    mutant(
        "training/by_environment.py",
        "                weight = s.weight * trained[name] / total\n",
        "                weight = s.weight / len(updates)\n",
        "training/test_by_environment.py::test_each_environment_gets_the_advantages_and_losses_of_a_separate_run",
        "environments have weights in proportion to their trained samples",
    ),
    mutant(
        "megatron/recurrence.py",
        "moves.append((rows * rectangle.keys.size(1) + positions[rectangle.query_rows], rectangle.query_rows))",
        "moves.append((rectangle.query_cells, rectangle.query_rows))",
        "megatron/test_recurrence.py::test_no_state_passes_between_sequences_except_from_shared_prompts",
        "samples with a shared prompt continue from its state",
    ),
    mutant(
        "megatron/recurrence.py",
        "return difference.masked_fill(~allowed, -torch.inf).exp()",
        "return difference.exp()",
        "megatron/test_recurrence.py::test_a_scan_in_chunks_equals_the_recurrence_and_its_gradient",
        "the state contains no later tokens",
    ),
    mutant(
        "megatron/recurrent_layers.py",
        "weight = copy_to_tensor_model_parallel_region(self.weight)",
        "weight = self.weight",
        "megatron/test_layout_parity.py::test_updates_equal_transformers_and_torch[TP2+SP-qwen3.5]",
        "the gradient of the norm of heads is the sum over tensor-parallel ranks",
    ),
    mutant(
        "training/gdpo.py",
        "return entropy | custom | weighting | weights",
        "return entropy | custom | weighting",
        "training/test_trainer.py::"
        "test_a_constraint_moves_the_weight_before_each_update_and_resumes_from_the_checkpoint",
        "a checkpoint contains the weights of constraints",
    ),
    mutant(
        "training/gdpo.py",
        'custom = {"functions": functions} if functions else {}',
        "custom = {}",
        "training/test_trainer.py::test_a_resumed_run_continues_with_the_state_of_its_custom_functions",
        "a checkpoint contains the state of custom functions",
    ),
    mutant(
        "training/gdpo.py",
        "self.weights.update(1 + (batch.version or 0),",
        "self.weights.update((batch.version or 0),",
        "training/test_trainer.py::test_the_first_step_of_a_schedule_has_the_weight_of_the_config",
        "a schedule counts steps from 1",
    ),
    mutant(
        "training/distillation.py",
        "np.where(_policy_tokens(t), gaps[number], 0.0)",
        "np.where(_policy_tokens(t), -gaps[number], 0.0)",
        "training/test_distillation.py::test_advantage_of_a_token_is_the_difference_of_teacher_and_policy_log_probs",
        "sign of the teacher's advantage",
    ),
    mutant(
        "training/distillation.py",
        "np.where(np.isnan(found[index]), now, found[index])",
        "found[index]",
        "training/test_distillation.py::test_advantage_is_finite_if_the_sampler_gave_no_log_prob",
        "log-probs that the sampler lacks are computed",
    ),
    mutant(
        "training/checkpoints.py",
        "            if damage is None:\n",
        "            if True:\n",
        "training/test_checkpoints.py::test_damage_is_named_and_the_checkpoint_before_is_used",
        "a damaged checkpoint is not used",
    ),
    mutant(
        "training/resume.py",
        "        if then != now:\n",
        "        if False:\n",
        "training/test_resume.py::test_another_model_and_other_data_are_refused",
        "a resume with other data is refused",
    ),
    mutant(
        "training/recovery.py",
        "parts.state.step > self._furthest",
        "parts.state.step >= self._furthest",
        "training/test_recovery.py::test_ranks_lost_twice_without_a_further_step_are_for_the_supervisor",
        "ranks lost twice at one step end the run",
    ),
    mutant(
        "training/recovery.py",
        "attempt.restarts + attempt.rebuilds <",
        "attempt.restarts <",
        "training/test_recovery.py::test_rebuilds_count_among_the_restarts_that_are_allowed",
        "rebuilds count as restarts",
    ),
    mutant(
        "training/component_gradients.py",
        "share = (1.0 - beta) / (1.0 - beta ** (found.earlier + 1))",
        "share = 1.0",
        "training/test_component_gradients.py::test_changes_have_the_share_of_the_gradient_in_the_update_of_adam",
        "momentum adds a part of the gradient to later updates",
    ),
    mutant(
        "training/replay.py",
        "algorithm = type(made)(config, made.policy, made.tokenizer, made.log)",
        "algorithm = made if number else type(made)(config, made.policy, made.tokenizer, made.log)",
        "training/test_component_gradients.py::test_a_replay_compares_gradients_of_both_objectives_and_leaves_the_trainer_as_it_was",
        "the comparison does not move the weights of the replay's constraints",
    ),
)
