"""Mutants of the modules of a run: supervised training, distillation, checkpoints, resume."""

from __future__ import annotations

from mutant_tables.mutant import mutant

TRAINING = (
    mutant(
        "megatron/recurrence.py",
        "moves.append((rows * rectangle.keys.size(1) + positions[rectangle.query_rows], rectangle.query_rows))",
        "moves.append((rectangle.query_cells, rectangle.query_rows))",
        "megatron/test_recurrence.py::test_no_state_passes_between_sequences_and_shared_prompts_pass_theirs_on",
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
        "megatron/recurrence.py",
        "state = leaving[:, number, ..., None, None] * state + added[:, number]",
        "state = state + added[:, number]",
        "megatron/test_recurrence.py::test_a_scan_in_chunks_equals_the_recurrence_and_its_gradient",
        "the state decays between chunks",
    ),
    mutant(
        "megatron/conversion.py",
        "return list(mamba_sections(fields_of(config)))",
        "return [rows]",
        "megatron/test_layout_parity.py::test_updates_equal_transformers_and_torch[TP2+SP-nemotron-h]",
        "each rank has the rows of its heads in every section of the projection",
    ),
    mutant(
        "models/architectures.py",
        "if groups > 1 and selected != 2 * chosen:",
        "if False:",
        "config/test_model_families.py::test_a_model_that_cannot_be_trained_is_refused_by_name",
        "a router is refused that Megatron would compute differently",
    ),
    mutant(
        "training/gdpo.py",
        'return entropy | ({} if self.weights is None else {"weights": self.weights.state()})',
        "return entropy",
        "training/test_trainer.py::"
        "test_a_constraint_moves_the_weight_before_each_update_and_resumes_from_the_checkpoint",
        "a checkpoint contains the weights of constraints",
    ),
    mutant(
        "training/gdpo.py",
        "self.weights.update(1 + (batch.version or 0),",
        "self.weights.update((batch.version or 0),",
        "training/test_trainer.py::test_the_first_step_of_a_schedule_has_the_weight_of_the_config",
        "a schedule counts steps from 1",
    ),
    mutant(
        "training/supervised.py",
        "return max(float(np.mean(gaps)), 0.0)",
        "return float(np.mean(gaps))",
        "training/test_supervised.py::test_kto_takes_0_if_the_estimate_of_its_kl_is_negative",
        "KTO's KL is at least 0",
    ),
    mutant(
        "training/supervised.py",
        "for s in _mismatched(update) if len(s) <= limit]",
        "for s in _mismatched(update)]",
        "training/test_supervised.py::test_kto_leaves_rows_beyond_the_length_limit_out_of_its_kl",
        "rows that are too long are not in KTO's KL",
    ),
    mutant(
        "training/distillation.py",
        "np.where(_policy_tokens(t), gaps[number], 0.0)",
        "np.where(_policy_tokens(t), -gaps[number], 0.0)",
        "training/test_distillation.py::test_the_advantage_of_a_token_is_how_much_more_the_teacher_likes_it",
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
        "scaled[0, k, 1] / shares[0] + scaled[1, k, 0] / shares[1]",
        "scaled[0, k, 0] / shares[0] + scaled[1, k, 1] / shares[1]",
        "training/test_component_gradients.py::test_changes_are_estimated_on_the_half_of_the_groups_that_the_gradient_does_not_read",
        "a gradient is not judged by the samples that it was computed from",
    ),
    mutant(
        "training/component_gradients.py",
        "others = (sums[ids][used] - column[used]) / (count[ids][used] - 1)",
        "others = sums[ids][used] / count[ids][used]",
        "training/test_component_gradients.py::test_score_coefficients_have_the_mean_of_the_other_samples_as_baseline",
        "the baseline of a sample does not contain the sample",
    ),
    mutant(
        "training/component_gradients.py",
        "if left > _ROUNDING * max(largest, 1.0):",
        "if False:",
        "training/test_component_gradients.py::test_an_estimator_whose_terms_do_not_sum_to_its_advantages_is_refused_by_name",
        "an estimator without terms by component is refused",
    ),
    mutant(
        "training/gdpo.py",
        "if not period or rollout.version is None or rollout.version % period:",
        "if not period or rollout.version is None:",
        "training/test_component_gradients.py::test_gradients_are_computed_before_the_first_update_of_every_second_step",
        "gradients by component are computed only when they are due",
    ),
)
