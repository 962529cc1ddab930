"""Agents that play with the endpoint over HTTP, as plugins: each takes two turns and sends back its items."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from gdpo_nemo.environments.base import Environment


@dataclass
class Episode:
    response: dict[str, Any]
    rewards: dict[str, float]


class Talkers(Environment):
    """Option ``port``: of the endpoint."""

    plays_with_endpoint = True
    reward_names = ("answered",)

    def __init__(self, options):
        self.url = f"http://127.0.0.1:{options['port']}/v1/responses"

    def play(self, prompts, sampling):
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda prompt: self.talk(prompt, sampling), prompts))

    def talk(self, prompt, sampling) -> Episode:
        items = [dict(message) for message in prompt.messages]
        for turn in range(2):
            reply = httpx.post(self.url, json={"input": items, **sampling}, timeout=600)
            assert reply.status_code == 200, reply.text
            items += reply.json()["output"]
            items += [{"role": "user", "content": f"go on {turn}"}] if turn == 0 else []
        return Episode({"output": items}, {"answered": 1.0})
