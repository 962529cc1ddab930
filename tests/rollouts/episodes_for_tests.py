"""Environments with turns for the tests: one that behaves, and some that do not."""

from __future__ import annotations

import os
import time

from gdpo_nemo.environments.episodes import EpisodeFailed

TURNS = 4


class Guessing:
    """Four turns; each observation is a message of a role of its own, and names the length of the answer before."""

    reward_names = ("length", "turns")

    def __init__(self, options):
        self.options = dict(options or {})

    def episode(self):
        return Guess(self.options)


class Guess:
    def __init__(self, options):
        self.options = options
        self.turn = 0
        self.said = []

    def reset(self, row):
        self.row = row
        return self.options.get("opening")

    def step(self, message):
        self.turn += 1
        self.said.append(message["content"])
        done = self.turn == TURNS
        observation = [
            {"role": "tool", "content": f"{self.turn}:{len(message['content'])}"},
            {"role": "user", "content": "on"},
        ]
        return None if done else observation, {"length": float(len(message["content"])), "turns": 1.0}, done

    def cut(self):
        return {"length": -1.0}


class Awkward:
    """The row says what goes wrong, and the turn in which it does."""

    reward_names = ("ok",)

    def __init__(self, options):
        pass

    def episode(self):
        return Trouble()


class Trouble:
    turn = 0

    def reset(self, row):
        self.row = row

    def step(self, message):
        self.turn += 1
        if self.turn == self.row.get("when"):
            getattr(self, self.row["what"])()
        return "go on", {"ok": 1.0}, self.turn == 3

    def hang(self):
        time.sleep(60)

    def die(self):
        os._exit(3)

    def die_once(self):
        if not os.path.exists(self.row["flag"]):
            open(self.row["flag"], "w").close()
            os._exit(3)

    def fail(self):
        raise EpisodeFailed("the server is down")

    def raise_error(self):
        raise ValueError("my mistake")

    def keep_a_lock(self):
        import threading

        self.lock = threading.Lock()


class Shut(Awkward):
    """Fails at its reset."""

    def episode(self):
        raise EpisodeFailed("nobody is there")
