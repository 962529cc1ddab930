"""Environments for the earlier API of verifiers (0.1.14 to 0.3), whose rows say what their reward functions do."""

import asyncio
import os
import time
import urllib.request

import verifiers as vf


def block():
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
    "hangs": lambda: asyncio.sleep(600),
}
GROUP_MISTAKES = {"short_list": lambda: [1.0], "no_list": lambda: 1.0, "one_text": lambda: ["0.5", 1.0]}


async def mistaken(answer):
    value = MISTAKES.get(answer, MISTAKES["good"])()
    return await value if asyncio.iscoroutine(value) else value


def short(completion, **kwargs):
    return 1.0 / (1 + len(completion[-1].content))


def distinct(completions, answers) -> list:
    if answers[0] in GROUP_MISTAKES:
        return GROUP_MISTAKES[answers[0]]()
    texts = [completion[-1].content for completion in completions]
    return [float(texts.count(text) == 1) for text in texts]


def words(completion):
    return float(len(completion[-1].content.split()))


class Rounds(vf.MultiTurnEnv):
    """Asks for more until two replies are written. The last request starts without the history."""

    async def env_response(self, messages, state, **kwargs):
        if state["answer"] == "breaks":
            raise KeyError("round")
        return [vf.UserMessage(content="more")]

    async def get_prompt_messages(self, state):
        if len(state["trajectory"]) == 2:
            return [vf.UserMessage(content="notes")]
        return await super().get_prompt_messages(state)


class Lookup(vf.StatefulToolEnv):
    async def setup_state(self, state):
        state["calls"] = 0
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        state["calls"] += 1
        return {**tool_args, "calls": state["calls"]}


def get_counter_value(calls: int) -> int:
    """Return the number of calls.

    Args:
        calls: hidden from the policy
    """
    return calls


def used_tools(completion):
    return float(sum(message.role == "tool" for message in completion))


def table(*rows):
    from datasets import Dataset  # which verifiers 0.4 does not require

    return Dataset.from_list(rows)


def rows(*names):
    return table(*({"question": f"Please {name}", "answer": name} for name in names))


def single(names=(*MISTAKES, *GROUP_MISTAKES), **settings):
    rubric = vf.Rubric(funcs=[mistaken, short, distinct, words], weights=[2.0, 1.0, 0.5, 0.0])
    return vf.SingleTurnEnv(dataset=rows(*names), system_prompt="Be brief.", rubric=rubric, **settings)


def rounds():
    return Rounds(dataset=rows("good", "breaks"), max_turns=3, rubric=vf.Rubric(funcs=[short]))


def tools():
    env = Lookup(dataset=rows("good"), eval_dataset=rows("hard"), rubric=vf.Rubric(funcs=[used_tools]))
    env.add_tool(get_counter_value, args_to_skip=["calls"])
    return env


def judged(url):
    from openai import AsyncOpenAI

    async def polite(judge, prompt, completion, answer, state):
        return float("yes" in await judge(prompt, completion, answer, state))

    rubric = vf.JudgeRubric(judge_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    rubric.add_reward_func(polite)
    return vf.SingleTurnEnv(dataset=rows("judged"), rubric=rubric)


class Total(vf.Rubric):
    async def score_group(self, states):
        for state in states:
            state["reward"], state["metrics"] = 0.25, {}


def group(url=None):
    members = {"single": single(("good",)), "rounds": rounds(), "tools": tools()}
    if url:
        total = vf.SingleTurnEnv(dataset=rows("total"), rubric=Total())
        members = {"rounds": members["rounds"], "judged": judged(url), "total": total, "tools": members["tools"]}
    return vf.EnvGroup(list(members.values()), env_names=list(members))


KINDS = {
    "single": single,
    "rounds": rounds,
    "tools": tools,
    "needs_key": lambda: vf.SingleTurnEnv(dataset=rows("good"), rubric=vf.JudgeRubric()),
    "group": group,
    "downloads": lambda: urllib.request.urlopen("http://127.0.0.1:9/dataset"),
    "unscored": lambda: vf.SingleTurnEnv(dataset=rows("good")),
    "empty": lambda: vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[short])),
    "columns": lambda: vf.SingleTurnEnv(dataset=table({"text": "?"}), rubric=vf.Rubric(funcs=[short])),
    "clash": lambda: vf.EnvGroup(
        [
            rounds(),
            vf.SingleTurnEnv(dataset=table({"question": "?", "answer": 1}), rubric=vf.Rubric([short])),
        ]
    ),
}


def load_environment(kind="single", **settings):
    return KINDS[kind](**settings)
