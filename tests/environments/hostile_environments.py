"""An environment whose verifier does what the completion says, and reward functions that misbehave; for the tests."""

import os
import re
import signal
import sys
import time

from gdpo_nemo.data.records import Outcome, Verdict


class Hostile:
    """`good` is worth its number of letters; the other texts name a misdeed."""

    reward_names = ("length", "other")

    def __init__(self, options):
        self.options = dict(options)

    def verify(self, trajectories):
        if self.options.get("short"):
            return [Verdict({"length": 1.0})]
        return [self._one(trajectory.text) for trajectory in trajectories]

    def _one(self, text):
        if text == "hang":
            time.sleep(1000)
        elif text == "spin":
            re.fullmatch(r"(a+)+b", "a" * 60)  # holds the interpreter lock for ages
        elif text == "crash":
            os._exit(7)
        elif text == "leave":
            os._exit(0)
        elif text == "exit":
            sys.exit(0)
        elif text == "raise":
            raise ValueError("this sample\nis not to my taste")
        elif text == "print":
            os.write(1, b"\x00garbage" * 1000)
            print("garbage" * 1000)
        elif text == "down":
            return Verdict({}, Outcome.ENV_FAILED, "server is down")
        elif text == "meet":  # waits for a second process to come here
            open(os.path.join(self.options["meeting"], str(os.getpid())), "w").close()
            while len(os.listdir(self.options["meeting"])) < 2:
                time.sleep(0.05)
        special = {"inf": float("inf"), "nan": float("nan"), "none": None, "text": "1", "pid": os.getpid()}
        return Verdict({"unannounced" if text == "stray" else "length": special.get(text, float(len(text)))})


class FailsToBuild:
    reward_names = ("length",)

    def __init__(self, options):
        raise KeyError("model_url")


class FailsToPrepare(Hostile):
    def prepare(self):
        raise OSError("no such server")


class DiesWhilePreparing(Hostile):
    def prepare(self):
        os.kill(os.getpid(), signal.SIGKILL)
