"""The ``openenv`` environment: multi-turn episodes on an OpenEnv server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.http_client import (
    SPARE_FILES,
    HttpClient,
    LoopThread,
    api_key,
    raise_file_limit,
    with_retries,
)
from gdpo_nemo.environments.openenv.messages import (
    MAX_JSON_DEPTH,
    InvalidAction,
    StepResult,
    action_of,
    check_error,
    check_schema,
    first_prompt,
    observation_text,
    reset_arguments,
    result_of,
)
from gdpo_nemo.environments.openenv.session import Connector, EnvSession
from gdpo_nemo.environments.openenv.settings import FirstPrompt, read_settings
from gdpo_nemo.environments.server_replies import Failure, FailureKind
from gdpo_nemo.utils.errors import ConfigError, RunError

_SESSIONS = 4096
"""Maximum number of connections. The open-file limit is raised to allow this number."""
_ROWS = 1000
"""Default number of generated rows if the config does not set a number."""
_CONFIG_FAILURES = (FailureKind.REJECTED, FailureKind.BAD_REPLY)
"""Failures of the first request that indicate an error in the options."""


class OpenEnv(Environment):
    """Environment whose episodes run on an OpenEnv server (version 0.10 of Hugging Face's and Meta's ``openenv``).

    Each episode has its own WebSocket connection to the route ``/ws``.

    Options:
        url: base URL of the server.
        action: name of the action field that receives the policy's text, or the whole action with the placeholder
            "{text}".
        action_format (text): text, or json if the policy writes the whole action as JSON. With json, ``action``
            contains fixed fields to add.
        observation: field to show to the policy, a list of fields, or a template with {fields}. A dot selects a nested
            field. The default is the whole observation as JSON.
        reward (reward): name of the reward component, which is the sum of the rewards of all steps.
        invalid_action_reward (0): reward of a step without a valid action. The policy receives the error message.
        reset: keyword arguments of the environment's reset, ``{name: value}`` or ``{name: {column: name}}``.
        first_prompt (both): content of the first prompt: row, observation (of the reset), or both in this order.
        prompt: prompt of generated rows. Each generated row has a different seed for the reset.
        api_key_env: name of the environment variable with the bearer token.
        timeout_s (60), retries (5), idle_timeout_s (1800), max_reply_bytes (8 MiB): see ``settings.Limits``.
    """

    instant = True
    remote = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        self.settings = read_settings(options)
        self.reward_names = (self.settings.reward,)
        self._loop = LoopThread("openenv")
        self._connector: Connector | None = None
        self._sessions: dict[bytes, EnvSession] = {}
        self._idle: dict[bytes, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def has_turns(self) -> bool:
        """Always True, because ``start_step`` runs the steps of multi-turn episodes."""
        return True

    @property
    def makes_rows(self) -> bool:
        """True if the option ``prompt`` is set."""
        return self.settings.prompt is not None

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Generate rows that differ only in their id. The id determines the seed of the reset."""
        prompt = self.settings.prompt
        return [{"id": f"{split}-{seed}-{number}", "prompt": prompt} for number in range(size or _ROWS)]

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Check the options against the server's schemas and the rows, and reset one episode.

        Raises:
            ConfigError: if a field or column is not found, or the server rejects the reset.
            RunError: if the server cannot be reached or fails.
        """
        for prompt in prompts:
            reset_arguments(self.settings, prompt)
        try:
            self._loop.start(self._check_server(prompts[:1])).result()
        except Failure as failure:
            message = f"server at {self.settings.url}: {failure}"
            raise (ConfigError if failure.kind in _CONFIG_FAILURES else RunError)(message) from None

    def start_step(self, step: EpisodeStep) -> Future[EpisodeReply]:
        """Start a reset, step or cut of an episode, and return a future. Cancelling the future ends the episode.

        ``state`` of the reply identifies the connection. The future raises ConfigError if the row lacks a column that
        the option ``reset`` uses.
        """
        return self._loop.start(self._answer(step))

    def abandon(self, state: bytes) -> None:
        """Release an episode that will not be stepped again."""
        try:
            self._loop.start(self._end_episode_in_loop(state))
        except RunError:
            return  # the environment is closed, and all episodes have ended

    def close(self) -> None:
        """End all episodes. Steps in flight in other threads are cancelled."""
        self._loop.close(self._close_all())

    async def _answer(self, step: EpisodeStep) -> EpisodeReply:
        try:
            if step.state is None:
                return await self._reset(step.prompt)
            if step.message is None:
                self._end_episode(step.state)
                return EpisodeReply(rewards={self.settings.reward: None}, done=True)
            return await self._step(step.state, str(step.message["content"]))
        except Failure as failure:
            return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=str(failure))

    async def _reset(self, prompt: Prompt) -> EpisodeReply:
        session, result = await self._open_and_reset(reset_arguments(self.settings, prompt))
        try:
            if result.done:
                raise Failure(FailureKind.BAD_REPLY, "the episode ended at its reset")
            observation = first_prompt(self.settings, prompt, result.observation)
        except Failure:
            self._close_soon(session)
            raise
        state = secrets.token_bytes(16)
        self._sessions[state] = session
        self._start_idle_timer(state)
        return EpisodeReply(state, observation, {self.settings.reward: None})

    async def _step(self, state: bytes, text: str) -> EpisodeReply:
        session = self._sessions.get(state)
        if session is None:
            idle = self.settings.limits.idle_timeout_s
            raise Failure(
                FailureKind.CONNECTION, f"the session was closed after {idle:g} s without a step (idle_timeout_s)"
            )
        self._idle.pop(state).cancel()
        try:
            action = action_of(self.settings, text)
            reply = await session.ask("step", action, self.settings.limits.timeout_s)
            check_error(self.settings, reply)
            result = result_of(reply)
            observation = None if result.done else observation_text(self.settings, result.observation) or "\n"
        except InvalidAction as error:
            result = StepResult({}, self.settings.invalid_action_reward, done=False)
            observation = str(error)
        except BaseException:  # also for cancellation: a late reply would be taken for the reply to the next step
            self._end_episode(state)
            raise
        if result.done:
            self._end_episode(state)
        else:
            self._start_idle_timer(state)
        rewards = {self.settings.reward: result.reward}
        return EpisodeReply(b"" if result.done else state, observation, rewards, result.done)

    async def _open_and_reset(self, arguments: Mapping[str, Any]) -> tuple[EnvSession, StepResult]:
        """Open a session and reset its environment, with retries. Return the session and the result of the reset.

        Raises Failure.
        """
        limits = self.settings.limits
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.timeout_s

        def time_left() -> float:
            return deadline - loop.time()

        async def attempt() -> tuple[EnvSession, StepResult]:
            session = await self._get_connector().open(time_left())
            try:
                reply = await session.ask("reset", arguments, time_left())
                check_error(self.settings, reply)
                return session, result_of(reply)
            except InvalidAction as error:
                self._close_soon(session)
                raise Failure(FailureKind.REJECTED, f"reset: {error}") from None
            except BaseException:
                self._close_soon(session)
                raise

        return await with_retries(attempt, limits.retries, time_left, f"timeout_s is {limits.timeout_s:g}")

    async def _check_server(self, prompts: Sequence[Prompt]) -> None:
        limits = self.settings.limits
        key = api_key(self.settings.api_key_env)
        client = HttpClient(1, limits.max_reply_bytes, MAX_JSON_DEPTH, key)
        try:
            check_schema(self.settings, await client.get(f"{self.settings.url}/schema", limits.timeout_s))
        except Failure as failure:
            if failure.status not in (404, 405):  # servers do not have to publish schemas
                raise
        finally:
            await client.close()
        for prompt in prompts:
            session, result = await self._open_and_reset(reset_arguments(self.settings, prompt))
            self._close_soon(session)
            if self.settings.first_prompt is not FirstPrompt.ROW:
                observation_text(self.settings, result.observation, complete=False)

    def _get_connector(self) -> Connector:
        if self._connector is None:
            raise_file_limit(_SESSIONS + SPARE_FILES)
            key = api_key(self.settings.api_key_env)
            self._connector = Connector(self.settings.url, self.settings.limits.max_reply_bytes, key)
        return self._connector

    def _start_idle_timer(self, state: bytes) -> None:
        """Start the idle timer of an episode."""
        loop = asyncio.get_running_loop()
        self._idle[state] = loop.call_later(self.settings.limits.idle_timeout_s, self._end_episode, state)

    def _end_episode(self, state: bytes) -> None:
        """End an episode. Do nothing if the episode has already ended."""
        timer = self._idle.pop(state, None)
        if timer is not None:
            timer.cancel()
        session = self._sessions.pop(state, None)
        if session is not None:
            self._close_soon(session)

    async def _end_episode_in_loop(self, state: bytes) -> None:
        self._end_episode(state)

    def _close_soon(self, session: EnvSession) -> None:
        """Close a session in the background, because the server may be slow to confirm."""
        task = asyncio.create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_all(self) -> None:
        sessions = list(self._sessions.values())
        self._sessions.clear()
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
        if self._connector is not None:
            await self._connector.close()
