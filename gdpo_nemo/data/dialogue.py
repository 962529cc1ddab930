"""A conversation with a model, as the tokens that it reads: what it wrote stays as it was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from gdpo_nemo.data.conversation import Conversation, Message
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.errors import ConfigError


@dataclass(frozen=True)
class Exchange:
    """What was asked, and the reply."""

    asked: str | Prompt
    reply: np.ndarray
    """int32 [tokens], without the end of the message where the reply was cut."""


class Dialogue:
    """The exchanges so far, cut to the model's context from the oldest on.

    Without a chat template there is no history: every text is continued by itself.

    Args:
        system: text of the system message; None: no such message.
        context: tokens of prompt and reply together.
        reply: tokens that a reply may have; older exchanges make room for them.
    """

    def __init__(self, conversation: Conversation, system: str | None, context: int, reply: int):
        self._conversation = conversation
        self._system = system
        self._context = context
        self._reply = reply
        self._exchanges: list[Exchange] = []

    def __len__(self) -> int:
        """Exchanges that the model will see again."""
        return len(self._exchanges)

    def reset(self) -> None:
        """Forget every exchange."""
        self._exchanges = []

    def prompt(self, asked: str | Prompt) -> tuple[np.ndarray, int]:
        """(int32 [tokens] that the model reads for a reply to ``asked``, exchanges that were forgotten for want of
        room).

        A prompt of the run's data begins a new conversation, and is read as the run rendered it.

        Raises:
            ConfigError: it leaves no room for a reply. RunError: the chat template refuses the conversation.
        """
        if isinstance(asked, Prompt):
            self.reset()
        forgotten = 0
        while True:
            ids = self._tokens(asked)
            if len(ids) + self._reply <= self._context or not self._exchanges:
                break
            self._exchanges.pop(0)
            forgotten += 1
        if len(ids) >= self._context:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, and the context is {self._context} "
                "(policy.max_total_sequence_length)"
            )
        return ids, forgotten

    def add(self, asked: str | Prompt, reply: Sequence[int] | np.ndarray) -> None:
        """Keep an exchange, where there is a chat template to tell it from the next."""
        if self._conversation.chat:
            self._exchanges.append(Exchange(asked, np.asarray(reply, np.int32)))

    def _tokens(self, asked: str | Prompt) -> np.ndarray:
        texts = [*(exchange.asked for exchange in self._exchanges), asked]
        parts = [self._first(texts[0])]
        for exchange, text in zip(self._exchanges, texts[1:]):
            last = int(exchange.reply[-1]) if len(exchange.reply) else -1
            parts += [exchange.reply, self._conversation.continuation(None, str(text), last)]
        return np.concatenate(parts)

    def _first(self, asked: str | Prompt) -> np.ndarray:
        if isinstance(asked, Prompt):
            return asked.token_ids
        if not self._conversation.chat:
            return self._conversation.prompt(f"{self._system}\n\n{asked}" if self._system else asked)[1]
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return self._conversation.prompt([*system, {"role": "user", "content": asked}])[1]
