"""Agents that play with the endpoint over HTTP, as plugins: each takes two turns and sends back its items."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from local_server import JsonHandler, LocalServer

from gdpo_nemo.environments.base import Environment


@dataclass
class Episode:
    response: dict[str, Any]
    rewards: dict[str, float]


class StepServer(LocalServer):
    """An agent of NeMo Gym: /run plays two turns with the endpoint. The message is the JSON of its rewards.

    With ``attempts``, each turn is returned as an attempt. ``sampling`` is added to the agent's requests.
    """

    def __init__(self, port: int):
        super().__init__(_Run, "")
        self.talkers = Talkers({"port": port})


class _Run(JsonHandler):
    def do_POST(self):
        messages = self._body()["responses_create_params"]["input"]
        reply = json.loads(messages[0]["content"])
        sampling = {"temperature": 0.5, "top_p": 1.0, **reply.pop("sampling", {})}
        try:
            episode = self.server.talkers.talk(messages, sampling)
        except AssertionError:
            return self._send(500, b"Internal Server Error")
        reply = {"response": episode.response, **reply}
        if reply.pop("attempts", False):  # as of proof_refinement_agent, whose response is the last attempt
            turns = [{"output": [item]} for item in episode.response["output"] if "generation_token_ids" in item]
            reply |= {"response": turns[-1], "all_attempts": [{"response": turn} for turn in turns]}
        self._send(200, json.dumps(reply).encode())
        return None


class Talkers(Environment):
    """Option ``port``: of the endpoint."""

    plays_with_endpoint = True
    reward_names = ("answered",)

    def __init__(self, options):
        self.url = f"http://127.0.0.1:{options['port']}/v1/responses"

    def play(self, prompts, sampling):
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda prompt: self.talk(prompt.messages, sampling), prompts))

    def talk(self, messages, sampling) -> Episode:
        items = [dict(message) for message in messages]
        for turn in range(2):
            reply = httpx.post(self.url, json={"input": items, **sampling}, timeout=600)
            assert reply.status_code == 200, reply.text
            items += reply.json()["output"]
            items += [{"role": "user", "content": f"go on {turn}"}] if turn == 0 else []
        return Episode({"output": items}, {"answered": 1.0})


class CachedTalkers(Talkers):
    """Agents behind a cache of responses: the first episode answers all prompts but the last one."""

    def play(self, prompts, sampling):
        first, last = (self.talk(prompt.messages, sampling) for prompt in (prompts[0], prompts[-1]))
        return [*(Episode(first.response, {"answered": float(n)}) for n in range(len(prompts) - 1)), last]
