"""A package for verifiers 0.4 whose tasks say what its reward functions do."""

import asyncio
import os
import subprocess
import time

import verifiers.v1 as vf


def block():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(600)


MISTAKES = {
    "good": lambda: 0.5,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "raises": lambda: 1 / 0,
    "list": lambda: [1.0],
    "text": lambda: "0.5",
    "infinite": lambda: float("inf"),
    "own_loop": lambda: asyncio.run(asyncio.sleep(0)),
    "blocks": lambda: block(),
    "dies": lambda: os._exit(3),
}


class Data(vf.TaskData):
    mistake: str


class Chores(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def mistaken(self) -> float:
        if self.data.mistake == "hangs":
            await asyncio.sleep(600)
        return MISTAKES[self.data.mistake]()

    @vf.reward
    async def short(self, trace) -> float:
        return 1.0 / (1 + len(trace.last_reply))

    @vf.reward(weight=0.0)
    async def words(self, trace) -> float:
        return float(len(trace.last_reply.split()))

    @vf.metric
    async def characters(self, trace) -> float:
        return float(len(trace.last_reply))


class ChoresTaskset(vf.Taskset[Chores]):
    def load(self):
        for mistake in (*MISTAKES, "hangs"):
            data = Data(prompt=f"Please {mistake}", system_prompt="Be brief.", name=mistake, mistake=mistake)
            yield Chores(data, self.config.task)


__all__ = ["ChoresTaskset"]
