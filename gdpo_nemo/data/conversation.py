"""The tokens between two turns of the policy: the environment's observation, rendered by the chat template.

A trajectory of several turns is one sequence that only grows. What the policy wrote stays as it was sampled; it is
never decoded and tokenised again, because another tokenisation of the same text has other log-probs. So the template is
asked for one thing only: what follows an assistant message. That is found behind a placeholder, which also makes
templates harmless that write earlier messages differently once others follow (that drop old reasoning, say).
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.errors import RunError

Message = Mapping[str, Any]

PLACEHOLDER = "GDPO0TURN0ENDS0HERE"
_ANYTHING = ({"role": "user", "content": "."},)


class Conversation:
    """Renders prompts and continuations with one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        chat: render with its chat template; without it, observations are text that is appended as it is.
        template_kwargs: further arguments of the chat template (``data.train.chat_template_kwargs``).
    """

    def __init__(self, tokenizer: Any, chat: bool, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.chat = chat

    def prompt(
        self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, np.ndarray]:
        """(text, int32 [tokens]) of the first prompt. Raises RunError where the template refuses the messages."""
        if isinstance(messages, str) and not self.chat:
            return messages, self._tokens(messages, special=True)
        text = self._rendered(self.messages(messages), tools)
        return text, self._tokens(text)

    def continuation(
        self,
        history: Sequence[Message] | None,
        observation: str | Sequence[Message],
        last_token: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> np.ndarray:
        """int32 [tokens]: what lies between the policy's last token and its next one.

        The end of the assistant's message comes first, unless the policy has written it itself; where its turn was cut
        before that, the template's end is added and is the environment's.

        Args:
            history: the messages before the assistant's; None: any will do.
            observation: the messages after it, or the text of one from the user.
            last_token: the policy's last.

        Raises:
            RunError: the template refuses the messages, or does not show the assistant's exactly once.
        """
        if not self.chat:
            if not isinstance(observation, str):
                raise RunError("an observation of chat messages needs a tokenizer with a chat template; use text")
            return self._tokens(observation)
        spoken = [*(history or _ANYTHING), {"role": "assistant", "content": PLACEHOLDER}, *self.messages(observation)]
        text = self._rendered(spoken, tools)
        if text.count(PLACEHOLDER) != 1:
            raise RunError(f"the chat template shows an assistant's message {text.count(PLACEHOLDER)} times, not once")
        ids = self._tokens(text.partition(PLACEHOLDER)[2])
        return ids[1:] if len(ids) and ids[0] == last_token else ids

    def text(self, token_ids: Iterable[int]) -> str:
        """What tokens say, without special tokens."""
        text: str = self.tokenizer.decode([int(t) for t in token_ids], skip_special_tokens=True)
        return text

    @staticmethod
    def messages(observation: str | Sequence[Message]) -> list[Message]:
        """An observation as messages; text is the user's."""
        return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        extra = {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **extra
            )
            return text
        except Exception as error:  # a template may raise anything
            raise RunError(f"the chat template refuses a conversation: {first_line(error)}") from error

    def _tokens(self, text: str, special: bool = False) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=special)["input_ids"], np.int32)
