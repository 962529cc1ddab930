"""Adapter that runs TRL's rollout functions, ``rollout_func(prompts, trainer)``, as ``rollout.function``.

The adapter follows ``GRPOTrainer._generate`` of TRL 1.16. Each prompt is repeated once per sample, in adjacent rows.
The function returns ``prompt_ids``, ``completion_ids`` and ``logprobs`` for each row. If the function inserts tokens
that the policy did not write, it also returns ``env_mask``. All other columns are passed to the reward functions.

Training does not use the returned log-probs. Instead, training uses the tokens, log-probs and weight versions that the
adapter recorded during sampling. Each policy token must have been sampled after exactly the tokens that precede this
token. Otherwise the trajectory counts as failed and is masked.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np

from gdpo_nemo.data.records import NOT_CONTIGUOUS, Outcome, Prompt, TrainerState, Trajectory
from gdpo_nemo.generation.requests import Completion, SampleRequest
from gdpo_nemo.rollouts.agents import BrokenEpisode
from gdpo_nemo.rollouts.context import RolloutContext, RolloutFunction, Transcript
from gdpo_nemo.rollouts.endpoint.conversations import digest
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.import_path import ImportPath

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_p": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logprobs": (0, 1),
    "structured_outputs_regex": ("",),
}
"""Generation settings, with the values that have no effect."""

TrlFunction = Callable[[list[Any], Any], Mapping[str, Any]]


def load_rollout_function(reference: str) -> RolloutFunction:
    """Load the function in ``rollout.function``. A TRL function is wrapped by ``adapted``.

    Raises:
        ConfigError: if the function cannot be loaded or has an unsupported signature.
    """
    try:
        function = ImportPath(reference).load()
    except ConfigError as error:
        raise error.within("rollout.function") from error
    if not callable(function):
        raise ConfigError(f"rollout.function: {reference} is not callable")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.function: {reference} must not be a coroutine function; write a blocking "
            "function, which is called in a thread"
        )
    names = _parameters(function)
    if names[1:] == ["args", "processing_class"]:
        raise ConfigError(
            f"rollout.function: {reference} has the signature (prompts, args, processing_class), which TRL had before "
            "0.25; write (prompts, trainer)"
        )
    if names[1:] == ["trainer"]:
        return adapted(function)
    rollout_function: RolloutFunction = function
    return rollout_function


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the function's required positional parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # A builtin in C has no signature.
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in positional]


def adapted(function: TrlFunction) -> RolloutFunction:
    """Convert a TRL rollout function to a ``RolloutFunction``."""

    @functools.wraps(function)
    def play(prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
        if any(prompt.images for prompt in prompts):
            raise RunError(
                "rollout.function: rollout functions of TRL do not support images; write a function (prompts, context)"
            )
        sampler = _RecordingSampler(context)
        # Each row is a separate object, because a function may change the messages of one sample.
        rows = [copy.deepcopy(_as_trl(prompt)) for prompt, _ in product(prompts, range(context.samples))]
        made = _columns(function(rows, _trainer(context, sampler)), len(rows))
        groups = []
        for index, prompt in enumerate(prompts):
            first = index * context.samples
            groups.append([_trajectory(prompt, j, first + j, made, sampler) for j in range(context.samples)])
        return groups

    return play


def _as_trl(prompt: Prompt) -> Any:
    """Return a prompt in the format of the dataset, either messages or text."""
    return [dict(message) for message in prompt.messages] if prompt.messages else prompt.text


# -- sampling for the function --------------------------------------------------------------------------------------


class _RecordingSampler:
    """Sampler of one call, which records the completions by their prompt tokens. Thread-safe."""

    def __init__(self, context: RolloutContext):
        self.context = context
        self._lock = threading.Lock()
        self._count = 0
        self._by_prompt: dict[bytes, list[Completion]] = {}

    def sample(self, prompts: Sequence[Sequence[int]], max_tokens: int | None = None) -> list[Completion]:
        """Sample one completion per prompt. As in TRL, a completion is empty if the prompt fills the context.

        Args:
            prompts: token ids of each prompt.
            max_tokens: maximum length of a completion, if this maximum is less than ``max_new_tokens``.
        """
        context = self.context
        most = min(max_tokens or context.max_new_tokens, context.max_new_tokens)
        arrays = [np.array(prompt, np.int32) for prompt in prompts]
        with self._lock:
            first = self._count
            self._count += len(arrays)
        requests = {}
        for n, ids in enumerate(arrays):
            room = min(most, context.max_sequence - len(ids))
            if room > 0:
                # A request of TRL does not identify its sample, so the seed depends on its number in the call.
                requests[n] = SampleRequest(ids, context.seed(0, 0, first + n), room)
        completions = [Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "length")] * len(arrays)
        if requests:
            for n, completion in zip(requests, context.sample(list(requests.values())).completions):
                completions[n] = completion
        with self._lock:
            for ids, completion in zip(arrays, completions):
                self._by_prompt.setdefault(digest(ids), []).append(completion)
        return completions

    def find(self, before: np.ndarray, claimed: np.ndarray) -> Completion | None:
        """Find the longest completion that was sampled after ``before`` and matches ``claimed``.

        A completion matches if it is a prefix of ``claimed`` or begins with ``claimed``.
        """
        found = None
        longest = 0
        for completion in self._by_prompt.get(digest(before), ()):
            shared = min(len(completion.token_ids), len(claimed))
            if shared > longest and np.array_equal(completion.token_ids[:shared], claimed[:shared]):
                found = completion
                longest = shared
        return found


class _TrlObject(SimpleNamespace):
    """Replacement for a TRL object. Only the attributes passed to the constructor are supported."""

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(key for key in vars(self) if not key.startswith("_"))
        raise AttributeError(f"{self._what}.{name} is not supported; available: {known}")


def _trainer(context: RolloutContext, sampler: _RecordingSampler) -> _TrlObject:
    """Return a replacement for TRL's trainer."""
    conversation = context.conversation
    settings: dict[str, Any] = {
        "max_completion_length": context.max_new_tokens,
        "temperature": context.sampling.temperature,
        "top_p": context.sampling.top_p,
        "top_k": context.sampling.top_k,
        "min_p": None,
        "repetition_penalty": 1.0,
        "num_generations": context.samples,
        "num_generations_eval": context.samples,
        "chat_template_kwargs": conversation.template_kwargs,
        "use_vllm": True,
        # In the mode "server", TRL up to 1.15 calls ``vllm_client`` instead of an engine in its own process.
        "vllm_mode": "server",
    }
    arguments = _TrlObject(
        _what="TRL's trainer.args", **settings, generation_kwargs=None, report_to=[], vllm_enable_sleep_mode=False
    )
    return _TrlObject(
        _what="TRL's trainer",
        _sampler=sampler,
        **settings,
        args=arguments,
        processing_class=conversation.tokenizer,
        state=TrainerState(global_step=context.version),
        accelerator=SimpleNamespace(device="cpu", is_main_process=True, process_index=0, num_processes=1),
        model=_TrlObject(_what="TRL's trainer.model", training=True),
        tools=[],
        chat_template=None,
        vllm_generation=_TrlObject(
            _what="TRL's trainer.vllm_generation", generate=_Generation(sampler).generate, vllm_client=_Client(sampler)
        ),
    )


class _Generation:
    """``trainer.vllm_generation.generate`` of TRL 1.16."""

    def __init__(self, sampler: _RecordingSampler):
        self._sampler = sampler

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Sample one completion per prompt, given as token ids. The prompts are already repeated, as in TRL.

        ``num_generations`` and ``profiler`` have no effect.
        """
        if images is not None:
            raise RunError("trainer.vllm_generation.generate: images are not supported")
        completions = self._sampler.sample(prompts)
        return (
            list(map(list, prompts)),
            [c.token_ids.tolist() for c in completions],
            [c.logprobs[:, None].tolist() for c in completions],
            [c.token_ids[:, None].tolist() for c in completions],
        )


class _Client:
    """``trainer.vllm_generation.vllm_client`` of TRL up to 1.15."""

    def __init__(self, sampler: _RecordingSampler):
        self._sampler = sampler

    def generate(self, prompts: Sequence[str | Sequence[int]], **settings: Any) -> dict[str, list[Any]]:
        """Sample one completion per prompt, given as text or token ids."""
        tokenizer = self._sampler.context.conversation.tokenizer
        return self._sample([tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in prompts], settings)

    def chat(self, messages: Sequence[Sequence[Mapping[str, Any]]], **settings: Any) -> dict[str, list[Any]]:
        """Sample one completion per conversation, with the run's chat template."""
        conversation = self._sampler.context.conversation
        for key, configured in (("chat_template", None), ("chat_template_kwargs", conversation.template_kwargs)):
            if settings.pop(key, None) not in (None, configured):
                raise RunError(
                    f"{key}: not supported; rollout functions also use the chat template settings of data.train"
                )
        tools = settings.pop("tools", None) or None
        return self._sample([conversation.prompt(turns, tools)[1].tolist() for turns in messages], settings)

    def _sample(self, prompts: list[Any], settings: dict[str, Any]) -> dict[str, list[Any]]:
        most = _checked_limit(settings, self._sampler.context)
        completions = self._sampler.sample(prompts, most)
        return {
            "prompt_ids": list(map(list, prompts)),
            "completion_ids": [c.token_ids.tolist() for c in completions],
            "logprobs": [c.logprobs.tolist() for c in completions],
        }


def _checked_limit(settings: Mapping[str, Any], context: RolloutContext) -> int | None:
    """Check TRL's generation settings and return ``max_tokens``, or None if ``max_tokens`` is not set.

    Raises:
        RunError: if a setting would change the sampling distribution.
    """
    for key, value in settings.items():
        if key == "max_tokens" or value is None or value in _NEUTRAL.get(key, ()):
            continue
        used = getattr(context.sampling, key, None) if key in ("temperature", "top_p", "top_k") else None
        if used is None or not isinstance(value, (int, float)) or not math.isclose(value, used):
            raise RunError(
                f"generation setting {key} {str(value)[:40]}: must equal policy.generation; only max_tokens may "
                "differ in a rollout function"
            )
    limit = settings.get("max_tokens")
    return None if limit is None else int(limit)


# -- results of the function ---------------------------------------------------------------------------------------


def _columns(made: Any, count: int) -> dict[str, Any]:
    """Check that every list in a TRL function's result has one value per row, and return the result.

    Args:
        made: result of the function.
        count: number of rows.

    Raises:
        RunError: if the result is not a dictionary, lacks a required column or has a list of another length.
    """
    if not isinstance(made, Mapping):
        raise RunError(f"the TRL rollout function must return a dictionary, got {type(made).__name__}")
    missing = [key for key in _REQUIRED if made.get(key) is None]
    if missing:
        raise RunError(f"the TRL rollout function did not return {missing[0]}")
    for key, values in made.items():
        is_list = isinstance(values, list)
        if is_list and len(values) == count:
            continue
        if is_list or (key in (*_REQUIRED, "env_mask") and values is not None):
            found = f"{len(values)} values" if is_list else "a value that is not a list"
            raise RunError(
                f"the TRL rollout function returned {found} for {key}, expected a list of {count}: each prompt is "
                "repeated once per sample and requires one completion"
            )
    return dict(made)


def _trajectory(
    prompt: Prompt, sample: int, row: int, made: Mapping[str, Any], sampler: _RecordingSampler
) -> Trajectory:
    conversation = sampler.context.conversation
    columns = {}
    for key, values in made.items():
        columns[key] = values[row] if isinstance(values, list) else values
    prompt_ids = np.array(columns.pop("prompt_ids"), np.int32)
    ids = np.array(columns.pop("completion_ids"), np.int32)
    mask = columns.pop("env_mask", None)
    mask = np.ones(len(ids), bool) if mask is None else np.array(mask, bool)
    if len(columns.pop("logprobs")) != len(ids) or len(mask) != len(ids):
        raise RunError(f"prompt {prompt.id}, sample {sample}: completion_ids, logprobs and env_mask differ in length")
    columns.pop("logprob_token_ids", None)
    if not np.array_equal(prompt_ids, prompt.token_ids):
        prompt = replace(prompt, token_ids=prompt_ids, text=conversation.text(prompt_ids))
    t = Transcript(replace(prompt, fields={**prompt.fields, **columns}), sample)
    try:
        _fill(t, ids, mask, sampler)
    except BrokenEpisode as error:
        t.outcome = Outcome.ENV_FAILED
        t.detail = str(error)
    return t.trajectory(conversation, sampler.context.version)


def _fill(t: Transcript, ids: np.ndarray, mask: np.ndarray, sampler: _RecordingSampler) -> None:
    """Append a completion to ``t``, with the policy tokens and log-probs as the engines sampled them.

    Args:
        ids: tokens of the completion, as returned by the TRL function.
        mask: True for policy tokens. Shape: bool [tokens].

    Raises:
        BrokenEpisode: if the completion contains no policy tokens, or a policy token was not sampled after the tokens
            that precede it.
    """
    edges = [0, *(np.flatnonzero(np.diff(mask.astype(int))) + 1).tolist(), len(ids)]
    for start, end in zip(edges, edges[1:]):
        if start == end or (not mask[start] and end == len(ids)):
            continue  # The segment is empty or contains environment tokens at the end.
        if not mask[start]:
            t.append_env_tokens(ids[start:end])
            continue
        while start < end:
            completion = sampler.find(t.token_ids, ids[start:end])
            if completion is None:
                raise BrokenEpisode(
                    f"{NOT_CONTIGUOUS}: token {start} of completion_ids was not sampled after the tokens before it; "
                    "return the first turn's prompt as prompt_ids and all later tokens as completion_ids, with 0 in "
                    "env_mask for tokens that were not sampled"
                )
            t.append_policy_tokens(_cut(completion, end - start))
            start += len(completion.token_ids)
    if t.turns == 0:
        raise BrokenEpisode("completion_ids does not contain any token of the policy")


def _cut(completion: Completion, most: int) -> Completion:
    """Return a completion with only the first ``most`` tokens."""
    if most >= len(completion.token_ids):
        return completion
    spans = []
    remaining = most
    for version, tokens in completion.spans:
        if remaining > 0:
            spans.append((version, min(tokens, remaining)))
        remaining -= tokens
    return Completion(completion.token_ids[:most], completion.logprobs[:most], "stop", tuple(spans))
