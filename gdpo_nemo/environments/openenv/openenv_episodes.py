"""The ``openenv`` environment: episodes on a server of OpenEnv, which the policy plays turn by turn."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import Future
from typing import Any, Mapping, Sequence

from gdpo_nemo.data.failures import Failure, FailureKind
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.http_client import SPARE_FILES, HttpClient, api_key, raise_file_limit, with_retries
from gdpo_nemo.environments.loop_thread import LoopThread
from gdpo_nemo.environments.openenv.env_session import Connector, EnvSession
from gdpo_nemo.environments.openenv.message_mapping import (
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
from gdpo_nemo.environments.openenv.openenv_settings import FirstPrompt, read_settings
from gdpo_nemo.errors import ConfigError, RunError

_SESSIONS = 4096
"""Connections that the process is to be able to hold."""
_ROWS = 1000
"""Rows that it makes where the config does not say how many."""
_OURS = (FailureKind.REJECTED, FailureKind.BAD_REPLY)
"""Failures that the options are to blame for, as far as the first one goes."""


class OpenEnv(Environment):
    """Episodes on a server of OpenEnv (0.10), a WebSocket each: ``/ws`` of Hugging Face's and Meta's ``openenv``.

    Options:
        url: base URL of the server.
        action: field of the action that gets the policy's text, or the whole action with "{text}" in its place.
        action_format: text, or json where the policy writes the action; ``action`` then holds fixed fields beside it.
        observation: field that the policy is shown, a list of fields, or a text with {fields} in it; a dot leads into
            a field. Without it the whole observation as JSON.
        reward (reward): name of the component that the rewards of steps are added up in.
        invalid_action_reward (0): reward of a step that the policy wrote no action for; it is told what is wrong.
        reset: keyword arguments of reset, ``{name: value}`` or ``{name: {column: name}}``.
        first_prompt (both): row, observation (of reset), or both, one behind the other.
        prompt: prompt of rows that it makes itself, each of which is reset with another seed.
        api_key_env: environment variable with a bearer token.
        timeout_s (60), retries (5), idle_timeout_s (1800), max_reply_bytes (8 MiB): see ``openenv_settings.Limits``.
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
        """Its episodes are stepped by ``start_step``."""
        return True

    @property
    def makes_rows(self) -> bool:
        """Whether the option ``prompt`` says what they ask."""
        return self.settings.prompt is not None

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Rows that differ in their id alone, from which the seed of reset comes."""
        prompt = self.settings.prompt
        return [{"id": f"{split}-{seed}-{number}", "prompt": prompt} for number in range(size or _ROWS)]

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Compare the options with the server's schemas and the rows, and reset once.

        Raises:
            ConfigError: fields or columns that are not there, a reset that is refused. RunError: no such server.
        """
        for prompt in prompts:
            reset_arguments(self.settings, prompt)
        try:
            self._loop.start(self._try_out(prompts[:1])).result()
        except Failure as failure:
            message = f"server at {self.settings.url}: {failure}"
            raise (ConfigError if failure.kind in _OURS else RunError)(message) from None

    def start_step(self, step: EpisodeStep) -> Future[EpisodeReply]:
        """Begin to reset, step or cut an episode. A future that is cancelled ends its episode.

        ``state`` of a reply is the number of the connection. The future raises ConfigError for a row without a column
        that reset is given.
        """
        return self._loop.start(self._answer(step))

    def abandon(self, state: bytes) -> None:
        """Nobody will step this episode again."""
        try:
            self._loop.start(self._left(state))
        except RunError:
            return  # closed, and all episodes with it

    def close(self) -> None:
        """End all episodes; steps under way in other threads are cancelled."""
        self._loop.close(self._shut())

    async def _answer(self, step: EpisodeStep) -> EpisodeReply:
        try:
            if step.state is None:
                return await self._reset(step.prompt)
            if step.message is None:
                self._drop(step.state)
                return EpisodeReply(rewards={self.settings.reward: None}, done=True)
            return await self._step(step.state, str(step.message["content"]))
        except Failure as failure:
            return EpisodeReply(outcome=Outcome.ENV_FAILED, detail=str(failure))

    async def _reset(self, prompt: Prompt) -> EpisodeReply:
        session, result = await self._opened(reset_arguments(self.settings, prompt))
        try:
            if result.done:
                raise Failure(FailureKind.BAD_REPLY, "the episode is over at its reset")
            observation = first_prompt(self.settings, prompt, result.observation)
        except Failure:
            self._close_soon(session)
            raise
        state = secrets.token_bytes(16)
        self._sessions[state] = session
        self._rest(state)
        return EpisodeReply(state, observation, {self.settings.reward: None})

    async def _step(self, state: bytes, text: str) -> EpisodeReply:
        session = self._sessions.get(state)
        if session is None:
            idle = self.settings.limits.idle_timeout_s
            raise Failure(FailureKind.CONNECTION, f"closed, the policy was silent for {idle:g} s (idle_timeout_s)")
        self._idle.pop(state).cancel()
        try:
            action = action_of(self.settings, text)
            reply = await session.ask("step", action, self.settings.limits.timeout_s)
            check_error(self.settings, reply)
            result = result_of(reply)
            observation = None if result.done else observation_text(self.settings, result.observation) or "\n"
        except InvalidAction as error:
            result = StepResult({}, self.settings.invalid_action_reward, False)
            observation = str(error)
        except BaseException:  # cancelled, too: the answer to this step would be taken for that to the next
            self._drop(state)
            raise
        if result.done:
            self._drop(state)
        else:
            self._rest(state)
        return EpisodeReply(b"" if result.done else state, observation, self._rewards(result), result.done)

    def _rewards(self, result: StepResult) -> dict[str, float | None]:
        return {self.settings.reward: result.reward}

    async def _opened(self, arguments: Mapping[str, Any]) -> tuple[EnvSession, StepResult]:
        """A session that was reset, and the answer. Raises Failure."""
        limits = self.settings.limits
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.timeout_s

        def time_left() -> float:
            return deadline - loop.time()

        async def attempt() -> tuple[EnvSession, StepResult]:
            session = await self._servers().open(time_left())
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

    async def _try_out(self, prompts: Sequence[Prompt]) -> None:
        limits = self.settings.limits
        key = api_key(self.settings.api_key_env)
        client = HttpClient(1, limits.max_reply_bytes, MAX_JSON_DEPTH, key)
        try:
            check_schema(self.settings, await client.get(f"{self.settings.url}/schema", limits.timeout_s))
        except Failure as failure:
            if failure.status not in (404, 405):  # servers may keep their schemas to themselves
                raise
        finally:
            await client.close()
        for prompt in prompts:
            session, result = await self._opened(reset_arguments(self.settings, prompt))
            self._close_soon(session)
            if self.settings.first_prompt is not FirstPrompt.ROW:
                observation_text(self.settings, result.observation, complete=False)

    def _servers(self) -> Connector:
        if self._connector is None:
            raise_file_limit(_SESSIONS + SPARE_FILES)
            key = api_key(self.settings.api_key_env)
            self._connector = Connector(self.settings.url, self.settings.limits.max_reply_bytes, key)
        return self._connector

    def _rest(self, state: bytes) -> None:
        """Nobody steps this episode now."""
        loop = asyncio.get_running_loop()
        self._idle[state] = loop.call_later(self.settings.limits.idle_timeout_s, self._drop, state)

    def _drop(self, state: bytes) -> None:
        """End an episode; one that is over is none."""
        timer = self._idle.pop(state, None)
        if timer is not None:
            timer.cancel()
        session = self._sessions.pop(state, None)
        if session is not None:
            self._close_soon(session)

    async def _left(self, state: bytes) -> None:
        self._drop(state)

    def _close_soon(self, session: EnvSession) -> None:
        """Close beside everything else: a server may take its time to agree."""
        task = asyncio.create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _shut(self) -> None:
        sessions = list(self._sessions.values())
        self._sessions.clear()
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
        if self._connector is not None:
            await self._connector.close()
