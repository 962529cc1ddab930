"""Two custom reward functions with TRL's signature. A config refers to them by import path:

    env:
      mine:
        plugin: functions
        functions: {correctness: "examples/custom_reward.py:correctness", brevity: "examples/custom_reward.py:brevity"}
    gdpo:
      rewards: {correctness: 1.0, brevity: 0.5}

The arguments are lists with one entry per completion: the completions, the prompts, and each column of the dataset by
name. A function returns one number per completion, or None if the reward does not apply to it.
"""


def correctness(completions, answer, **columns):
    """Return 1 if the completion ends with the row's answer, 0 if not, and None for rows without an answer."""
    return [
        None if gold is None else float(text.rstrip(" .\n").endswith(str(gold)))
        for text, gold in zip(completions, answer)
    ]


def brevity(completions, completion_ids, **columns):
    """Return 1 for an empty completion, decreasing linearly to 0 at 200 tokens."""
    return [max(0.0, 1.0 - len(tokens) / 200) for tokens in completion_ids]
