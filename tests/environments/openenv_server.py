"""Environments written with OpenEnv's own base classes, behind OpenEnv's own server: run as a program, prints its port.

``/guess`` is a game of several turns, ``/echo`` does what it is told, ``/narrow`` is that for one client at a time.
``/counted`` is an echo, too, of which ``GET /live`` tells how many there are.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from types import ModuleType


def without_tools() -> None:
    """OpenEnv imports fastmcp for environments whose actions are calls of tools, of which there are none here."""
    names = {"fastmcp": {"Client": object}, "fastmcp.client": {}, "fastmcp.client.client": {"CallToolResult": object}}
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


without_tools()

import uvicorn  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from openenv.core.env_server import Action, Environment, Observation, State, create_app  # noqa: E402
from pydantic import Field  # noqa: E402


class Guess(Action):
    guess: int


class Told(Observation):
    message: str
    tries: int = 0


class Guessing(Environment):
    """A number from 1 to 20: 1 for finding it, -0.1 for every try before."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = random.Random(seed).randint(1, 20)
        self.tries = 0
        return Told(message="a number from 1 to 20")

    def step(self, action, timeout_s=None, **kwargs):
        self.tries += 1
        found = action.guess == self.number
        message = "found" if found else "more" if action.guess < self.number else "less"
        return Told(message=message, tries=self.tries, reward=1.0 if found else -0.1, done=found or self.tries == 6)

    @property
    def state(self):
        return State(step_count=self.tries)


class Say(Action):
    message: str = Field(max_length=50)
    loud: bool = False


class Heard(Observation):
    echoed_message: str | None
    parts: dict = {}


class Echo(Environment):
    """Says what it heard, and is worth a tenth of its length; some words have other effects."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    live = 0

    def __init__(self):
        super().__init__()
        type(self).live += 1

    def close(self):
        type(self).live -= 1

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Heard(echoed_message=json.dumps({"seed": seed, **kwargs}), done=kwargs.get("over", False))

    def step(self, action, timeout_s=None, **kwargs):
        word = action.message
        if word == "raise":
            raise RuntimeError("the environment broke")
        if word == "wait":
            time.sleep(0.5)
        said = word.upper() if action.loud else word
        reward = None if word == "nothing" else True if word == "yes" else len(word) / 10
        text = None if word == "null" else said
        return Heard(echoed_message=text, parts={"length": len(word)}, reward=reward, done=word == "end")

    @property
    def state(self):
        return State()


class Counted(Echo):
    """Whose number is known."""

    live = 0


def app() -> FastAPI:
    root = FastAPI()
    root.mount("/guess", create_app(Guessing, Guess, Told, max_concurrent_envs=600))
    root.mount("/echo", create_app(Echo, Say, Heard, max_concurrent_envs=600))
    root.mount("/narrow", create_app(Echo, Say, Heard))
    root.mount("/counted", create_app(Counted, Say, Heard, max_concurrent_envs=600))
    root.get("/live")(lambda: {"counted": Counted.live})
    return root


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listening.getsockname()[1], flush=True)
    # Beside busy processes, a client with 512 sessions took more than 2 s to answer a ping.
    config = uvicorn.Config(app(), log_level="error", ws_ping_interval=0.5, ws_ping_timeout=10.0)
    uvicorn.Server(config).run([listening])
