"""Two reward functions of one's own, written as for TRL. A config uses them by their place:

    env:
      mine:
        plugin: functions
        functions: {correctness: "examples/custom_reward.py:correctness", brevity: "examples/custom_reward.py:brevity"}
    gdpo:
      rewards: {correctness: 1.0, brevity: 0.5}

A function gets lists with one entry per completion: the completions, the prompts, and every column of the dataset under
its own name. It returns one number per completion, or None where the reward does not apply.
"""


def correctness(completions, answer, **columns):
    """1 where the completion ends with the row's answer; None for rows without one."""
    return [
        None if gold is None else float(text.rstrip(" .\n").endswith(str(gold)))
        for text, gold in zip(completions, answer)
    ]


def brevity(completions, completion_ids, **columns):
    """1 for an empty completion, falling to 0 at 200 tokens."""
    return [max(0.0, 1.0 - len(tokens) / 200) for tokens in completion_ids]
