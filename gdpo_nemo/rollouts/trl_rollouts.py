"""TRL's rollout functions, ``rollout_func(prompts, trainer)``, where ``rollout.function`` wants one of ours.

Held against ``GRPOTrainer._generate`` of TRL 1.16. Prompts come as often as each has samples, side by side. What the
function returns is ``prompt_ids``, ``completion_ids`` and ``logprobs`` for each, ``env_mask`` where it has put in
tokens that the policy did not write, and further columns for the reward functions. What is trained are the tokens,
log-probs and versions of what the engines drew, as kept here: a trajectory with a token for the policy that was not
drawn behind exactly the tokens before it fails, is masked and counted.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.objects import load_object
from gdpo_nemo.data.records import NOT_CONTIGUOUS, Outcome, Prompt, TrainerState, Trajectory
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.generation.requests import Completion, SampleRequest
from gdpo_nemo.rollouts.agents import BrokenEpisode
from gdpo_nemo.rollouts.context import RolloutContext, RolloutFunction, Transcript

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_p": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logprobs": (0, 1),
    "structured_outputs_regex": ("",),
}
"""Generation settings that change nothing at these values."""

TrlFunction = Callable[[list[Any], Any], Mapping[str, Any]]


def load_rollout_function(reference: str) -> RolloutFunction:
    """The function of ``rollout.function``: one of ours, or one of TRL's as one of ours. Raises ConfigError."""
    try:
        function = load_object(reference)
    except ConfigError as error:
        raise ConfigError(f"rollout.function: {error}") from error
    if not callable(function):
        raise ConfigError(f"rollout.function: {reference} is not callable")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.function: {reference} is a coroutine function; it is called in a thread and blocks")
    names = _parameters(function)
    if names[1:] == ["args", "processing_class"]:
        raise ConfigError(
            f"rollout.function: {reference} has the signature (prompts, args, processing_class), which TRL had before "
            "0.25; write (prompts, trainer)"
        )
    if names[1:] == ["trainer"]:
        return adapted(function)
    own: RolloutFunction = function
    return own


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a caller has to give by place."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # builtins in C
        return []
    return [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def adapted(function: TrlFunction) -> RolloutFunction:
    """A TRL rollout function as one of ours."""

    @functools.wraps(function)
    def play(prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
        drawn = _Draws(context)
        asked = [copy.deepcopy(_as_trl(prompt)) for prompt in prompts for _ in range(context.samples)]
        made = _columns(function(asked, _trainer(context, drawn)), len(asked))
        rows = iter(range(len(asked)))
        return [[_trajectory(prompt, j, next(rows), made, drawn) for j in range(context.samples)] for prompt in prompts]

    return play


def _as_trl(prompt: Prompt) -> Any:
    """A prompt as the data set has it: messages, or text."""
    return [dict(message) for message in prompt.messages] if prompt.messages else prompt.text


# -- what the function draws with -------------------------------------------------------------------------------------


class _Draws:
    """The completions of one call, by the prompt that they were drawn behind. Thread-safe."""

    def __init__(self, context: RolloutContext):
        self.context = context
        self._lock = threading.Lock()
        self._count = 0
        self._by_prompt: dict[bytes, list[Completion]] = {}

    def draw(self, prompts: Sequence[Sequence[int]], max_tokens: int | None = None) -> list[Completion]:
        """A completion of each prompt; an empty one where the context has no room, as TRL has it."""
        context = self.context
        most = min(max_tokens or context.max_new_tokens, context.max_new_tokens)
        arrays = [np.array(prompt, np.int32) for prompt in prompts]
        rooms = [min(most, context.max_sequence - len(ids)) for ids in arrays]
        with self._lock:
            first = self._count
            self._count += len(arrays)
        # The number of the request in its call takes the place of the turn: which sample it is for is not said.
        requests = [
            SampleRequest(ids, context.seed(0, 0, first + n), room)
            for n, (ids, room) in enumerate(zip(arrays, rooms))
            if room > 0
        ]
        answers = iter(context.sample(requests).completions if requests else ())
        nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "length")
        completions = [next(answers) if room > 0 else nothing for room in rooms]
        with self._lock:
            for ids, completion in zip(arrays, completions):
                self._by_prompt.setdefault(_digest(ids), []).append(completion)
        return completions

    def find(self, before: np.ndarray, claimed: np.ndarray) -> Completion | None:
        """The longest completion drawn behind ``before`` that ``claimed`` begins with, or that begins with it."""
        fitting = [
            c
            for c in self._by_prompt.get(_digest(before), ())
            if (shared := min(len(c.token_ids), len(claimed)))
            and np.array_equal(c.token_ids[:shared], claimed[:shared])
        ]
        return max(fitting, key=lambda c: min(len(c.token_ids), len(claimed)), default=None)


def _digest(token_ids: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(token_ids, np.int32).tobytes()).digest()


class _Attributes(SimpleNamespace):
    """An object of TRL's with those attributes that a run here has."""

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(key for key in vars(self) if not key.startswith("_"))
        raise AttributeError(f"{self._what} has no {name!r} here; it has {known}")


def _trainer(context: RolloutContext, drawn: _Draws) -> _Attributes:
    """What stands for TRL's trainer."""
    talk = context.conversation
    settings: dict[str, Any] = {
        "max_completion_length": context.max_new_tokens,
        "temperature": context.sampling.temperature,
        "top_p": context.sampling.top_p,
        "top_k": context.sampling.top_k,
        "min_p": None,
        "repetition_penalty": 1.0,
        "num_generations": context.samples,
        "num_generations_eval": context.samples,
        "chat_template_kwargs": talk.template_kwargs,
        "use_vllm": True,
        # The mode in which TRL up to 1.15 asks ``vllm_client`` and not an engine in its own process.
        "vllm_mode": "server",
    }
    arguments = _Attributes(
        _what="TRL's trainer.args", **settings, generation_kwargs=None, report_to=[], vllm_enable_sleep_mode=False
    )
    return _Attributes(
        _what="TRL's trainer",
        _drawn=drawn,
        **settings,
        args=arguments,
        processing_class=talk.tokenizer,
        state=TrainerState(global_step=context.version),
        accelerator=SimpleNamespace(device="cpu", is_main_process=True, process_index=0, num_processes=1),
        model=_Attributes(_what="TRL's trainer.model", training=True),
        tools=[],
        chat_template=None,
        vllm_generation=_Attributes(
            _what="TRL's trainer.vllm_generation", generate=_Generation(drawn).generate, vllm_client=_Client(drawn)
        ),
    )


class _Generation:
    """``trainer.vllm_generation.generate`` of TRL 1.16."""

    def __init__(self, drawn: _Draws):
        self._drawn = drawn

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Prompts as token ids, one completion each (``num_generations`` says how often each comes)."""
        if images is not None:
            raise RunError("trainer.vllm_generation.generate: images are not supported")
        completions = self._drawn.draw(prompts)
        ids = [c.token_ids.tolist() for c in completions]
        logprobs = [[[value] for value in c.logprobs.tolist()] for c in completions]
        return [list(prompt) for prompt in prompts], ids, logprobs, [[[token] for token in own] for own in ids]


class _Client:
    """``trainer.vllm_generation.vllm_client`` of TRL up to 1.15."""

    def __init__(self, drawn: _Draws):
        self._drawn = drawn

    def generate(self, prompts: Sequence[str | Sequence[int]], **settings: Any) -> dict[str, list[Any]]:
        """Completions of prompts as text or token ids."""
        tokenizer = self._drawn.context.conversation.tokenizer
        return self._drawn_of([tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in prompts], settings)

    def chat(self, messages: Sequence[Sequence[Mapping[str, Any]]], **settings: Any) -> dict[str, list[Any]]:
        """Completions of conversations, by the run's own chat template."""
        talk = self._drawn.context.conversation
        for key, ours in (("chat_template", None), ("chat_template_kwargs", talk.template_kwargs)):
            if settings.pop(key, None) not in (None, ours):
                raise RunError(f"{key}: prompts are rendered as data.train says, in a rollout function, too")
        tools = settings.pop("tools", None) or None
        return self._drawn_of([talk.prompt(spoken, tools)[1].tolist() for spoken in messages], settings)

    def _drawn_of(self, prompts: list[Any], settings: dict[str, Any]) -> dict[str, list[Any]]:
        most = _checked_limit(settings, self._drawn.context)
        completions = self._drawn.draw(prompts, most)
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": [c.token_ids.tolist() for c in completions],
            "logprobs": [c.logprobs.tolist() for c in completions],
        }


def _checked_limit(settings: Mapping[str, Any], context: RolloutContext) -> int | None:
    """``max_tokens`` out of TRL's generation settings. Raises RunError for one that would change what is drawn."""
    for key, value in settings.items():
        used = getattr(context.sampling, key, None) if key in ("temperature", "top_p", "top_k") else None
        same = used is not None and isinstance(value, (int, float)) and math.isclose(value, used)
        if key != "max_tokens" and value is not None and not same and value not in _NEUTRAL.get(key, ()):
            raise RunError(
                f"generation setting {key} {str(value)[:40]}: the trainer needs completions as policy.generation "
                "draws them; only max_tokens may differ in a rollout function"
            )
    limit = settings.get("max_tokens")
    return None if limit is None else int(limit)


# -- what the function returns ----------------------------------------------------------------------------------------


def _columns(made: Any, count: int) -> dict[str, Any]:
    """The function's answer, every list with a value for each sample. Raises RunError."""
    if not isinstance(made, Mapping):
        raise RunError(f"a TRL rollout function returns a dictionary, not {type(made).__name__}")
    missing = [key for key in _REQUIRED if made.get(key) is None]
    if missing:
        raise RunError(f"the TRL rollout function returned no {missing[0]}")
    for key, values in made.items():
        listed = isinstance(values, list)
        if (listed and len(values) != count) or (key in (*_REQUIRED, "env_mask") and values is not None and not listed):
            raise RunError(
                f"the TRL rollout function returned {len(values) if listed else 'no list'} for {key}, not {count}: "
                "prompts come as often as they have samples, and each gets one completion"
            )
    return dict(made)


def _trajectory(prompt: Prompt, sample: int, row: int, made: Mapping[str, Any], drawn: _Draws) -> Trajectory:
    talk = drawn.context.conversation
    own = {key: values[row] if isinstance(values, list) else values for key, values in made.items()}
    prompt_ids, ids = (np.array(own.pop(key), np.int32) for key in ("prompt_ids", "completion_ids"))
    mask = own.pop("env_mask", None)
    mask = np.ones(len(ids), bool) if mask is None else np.array(mask, bool)
    if len(own.pop("logprobs")) != len(ids) or len(mask) != len(ids):
        raise RunError(f"prompt {prompt.id}, sample {sample}: completion_ids, logprobs and env_mask differ in length")
    own.pop("logprob_token_ids", None)
    if not np.array_equal(prompt_ids, prompt.token_ids):
        prompt = replace(prompt, token_ids=prompt_ids, text=talk.text(prompt_ids))
    t = Transcript(replace(prompt, fields={**prompt.fields, **own}), sample)
    try:
        _fill(t, ids, mask, drawn)
    except BrokenEpisode as error:
        t.outcome = Outcome.ENV_FAILED
        t.detail = str(error)
    return t.trajectory(talk, drawn.context.version)


def _fill(t: Transcript, ids: np.ndarray, mask: np.ndarray, drawn: _Draws) -> None:
    """Put the tokens into ``t``, those of the policy as they were drawn. Raises BrokenEpisode."""
    edges = [0, *(np.flatnonzero(np.diff(mask.astype(int))) + 1).tolist(), len(ids)]
    for start, end in zip(edges, edges[1:]):
        if start == end or (not mask[start] and end == len(ids)):
            continue  # nothing of the policy follows
        if not mask[start]:
            t.append_env_tokens(ids[start:end])
            continue
        while start < end:
            completion = drawn.find(t.token_ids, ids[start:end])
            if completion is None:
                raise BrokenEpisode(
                    f"{NOT_CONTIGUOUS}: token {start} of completion_ids was not drawn behind the tokens before it; "
                    "return the prompt of the first turn and then every token, those not drawn with 0 in env_mask"
                )
            t.append_policy_tokens(_cut(completion, end - start))
            start += len(completion.token_ids)
    if t.turns == 0:
        raise BrokenEpisode("no token of the policy is in completion_ids")


def _cut(completion: Completion, most: int) -> Completion:
    """Its first tokens."""
    if most >= len(completion.token_ids):
        return completion
    spans = []
    left = most
    for version, tokens in completion.spans:
        if left > 0:
            spans.append((version, min(tokens, left)))
        left -= tokens
    return Completion(completion.token_ids[:most], completion.logprobs[:most], "stop", tuple(spans))
