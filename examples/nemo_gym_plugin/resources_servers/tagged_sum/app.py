"""A NeMo Gym resources server with three rewards: the sum of two numbers, answered in tags.

Components, each 0 or 1: ``correctness`` (the answer equals ``expected_answer``), ``whole_number`` (it is digits with at
most a sign) and ``tags`` (a think block and an answer block, nothing else). Without answer tags the last line is the
answer, so that each can be had without the others. ``reward`` is their mean.
"""

from __future__ import annotations

import re

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)

_ANSWER = re.compile(r"<answer>([^<]*)</answer>")
_TAGS = re.compile(r"\s*<think>[^<]*</think>\s*<answer>[^<]*</answer>\s*")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


class TaggedSumConfig(BaseResourcesServerConfig):
    """No settings of its own."""


class TaggedSumVerifyRequest(BaseVerifyRequest):
    expected_answer: int


class TaggedSumVerifyResponse(BaseVerifyResponse):
    reward_components: dict[str, float]
    extracted_answer: str


class TaggedSumServer(SimpleResourcesServer):
    config: TaggedSumConfig

    async def verify(self, body: TaggedSumVerifyRequest) -> TaggedSumVerifyResponse:
        answer, components = grade(written(body), body.expected_answer)
        reward = sum(components.values()) / len(components)
        return TaggedSumVerifyResponse(
            **body.model_dump(), reward=reward, reward_components=components, extracted_answer=answer
        )


def written(body: BaseVerifyRequest) -> str:
    """The text of the assistant's messages."""
    messages = [item for item in body.response.output if item.type == "message"]
    return "".join(getattr(part, "text", "") for message in messages for part in message.content)


def grade(text: str, expected: int) -> tuple[str, dict[str, float]]:
    """The answer found in a completion, and its rewards."""
    tagged = _ANSWER.findall(text)
    answer = tagged[-1].strip() if tagged else text.strip().rpartition("\n")[2].strip()
    whole = bool(_WHOLE.fullmatch(answer))
    components = {
        "correctness": float(whole and int(answer) == expected),
        "whole_number": float(whole),
        "tags": float(bool(_TAGS.fullmatch(text))),
    }
    return answer, components


if __name__ == "__main__":
    TaggedSumServer.run_webserver()
