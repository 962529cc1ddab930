"""A script as TRL's documentation teaches it: it trains when it is imported."""

import re

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

DIGITS = re.compile(r"[0-9]")
GROUP = 4

dataset = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": "Write 13."}], "solution": "13"},
        {"prompt": [{"role": "user", "content": "Write 24."}], "solution": "24"},
        {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "5?"}], "solution": "5"},
        {"prompt": [{"role": "user", "content": "Write 6."}], "solution": "6"},
    ]
)


def text_of(completion):
    return completion[0]["content"]


def some_of_it(completions, solution, trainer_state, log_extra, log_metric, **kwargs):
    """Share of the solution's digits that the answer has."""
    shares = [sum(d in text_of(c) for d in s) / len(s) for c, s in zip(completions, solution)]
    log_extra("solution", solution)
    log_metric("share", sum(shares) / len(shares))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    return shares


async def plain(completions, **kwargs):
    """Fewer bytes that are no letters."""
    return [sum(character.isalnum() for character in text_of(c)) / 16 - len(DIGITS.findall(text_of(c))) / 64
            for c in completions]  # fmt: skip


training_args = GRPOConfig(
    output_dir="results/stranger",
    per_device_train_batch_size=GROUP,
    gradient_accumulation_steps=2,
    num_generations=GROUP,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    max_completion_length=16,
    max_steps=2,
    reward_weights=[1.0, 0.5],
    multi_objective_aggregation="normalize_then_sum",
    beta=0.01,
    bf16=False,
    use_cpu=True,
    logging_steps=1,
    report_to="none",
)

trainer = GRPOTrainer(
    model="MODEL",
    reward_funcs=[some_of_it, plain],
    args=training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
