"""Reasoning and tool calls in the policy's text, read by vLLM's own parsers.

The parsers have vLLM's names (``vllm serve --tool-call-parser``), and the results are those of a vLLM server with the
same options. vLLM's parsers work without an engine. Their import takes 5 to 7 s of CPU time, so they are imported when
the first reply with tools is parsed.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, cast

from gdpo_nemo.data.tokenizer import special_tokens
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line
from gdpo_nemo.utils.progress import importing, quiet_torch

if TYPE_CHECKING:
    import numpy as np

    from gdpo_nemo.config.schema import Config
    from gdpo_nemo.data.tokenizer import Tokenizer

NO_PARSER = "none"
_FORMATS = (
    (("[TOOL_CALLS]",), "mistral", "[TOOL_CALLS]"),
    (("<|tool_calls_section_begin|>",), "kimi_k2", "<|tool_calls_section_begin|>"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3", "<｜tool▁calls▁begin｜>"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31", "<｜tool▁calls▁begin｜>"),
    (("<|channel|>", "functions."), "openai", "to=functions."),
    (("<|tool_call>",), "gemma4", "<|tool_call>"),
    (("<|tool_call_start|>",), "lfm2", "<|tool_call_start|>"),
    (("<minimax:tool_call>",), "minimax_m2", "<minimax:tool_call>"),
    (("<seed:tool_call>",), "seed_oss", "<seed:tool_call>"),
    (("<arg_key>",), "glm45", "<tool_call>"),
    (("<function=",), "qwen3_coder", "<tool_call>"),
    (("<tool_call>",), "hermes", "<tool_call>"),
    (("ipython", '"parameters": '), "llama3_json", "<|python_tag|>"),
)
"""(texts in a chat template, vLLM's parser of its tool calls, text at the beginning of a call).

The first entry whose texts are all in the template selects the parser.
"""
_OPENINGS = {parser: opening for _, parser, opening in _FORMATS}
_MARKER = re.compile(
    r"tool.?calls?\b|tool.?call.?(begin|end)|python_tag|function.?call|\[/?THINK\]|<\|(channel|message|constrain)\|>|<\|channel>|<channel\|>",
    re.IGNORECASE,
)
"""Special tokens that mark tool calls and reasoning: [TOOL_CALLS] in Mistral, <|python_tag|> in Llama 3."""
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_THOUGHTS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)
"""Beginning and end of the reasoning in a turn, in the model families."""
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?(<\|end\|>|\Z)", re.DOTALL)
"""Reasoning in the turns of gpt-oss."""
_TOOL = {
    "name": "f",
    "description": "f",
    "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]},
}
_ASKED = {"role": "user", "content": "."}


@dataclass(frozen=True)
class Reply:
    """One turn of the policy, as parsed."""

    content: str
    """Text without reasoning and tool calls."""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON text) of each tool call."""
    is_malformed: bool = False
    """True if the text begins a tool call but the parser found none."""


def reply_parser(config: Config, tokenizer: Tokenizer) -> ReplyParser:
    """Return the parser that a config selects.

    Raises:
        ConfigError: if the config names a parser that cannot be used with the tokenizer.
    """
    generation = config.policy.generation
    made = ReplyParser(
        tokenizer,
        generation.tool_call_parser,
        generation.reasoning_parser,
        config.data.train.chat_template_kwargs,
    )
    if generation.tool_call_parser not in (None, NO_PARSER) or generation.reasoning_parser is not None:
        made.load()
    for rule in config.gdpo.shaping:
        for options in rule.values():
            if isinstance(options, Mapping) and options.get("thinking", True) is False:
                made.counts_thinking = True
    return made


def parse_hermes(text: str, tools: list[Any]) -> Reply:
    """Parse a turn with tool calls in the format of Hermes, whose parser needs no tokenizer."""
    return ReplyParser(cast(Any, object()), "hermes").parse(text, tools)


def message_of(reply: Reply) -> dict[str, Any]:
    """Return a turn as an assistant's chat message in TRL's format, with the calls and their arguments as objects."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = calls = []
        for name, arguments in reply.calls:
            function = {"name": name, "arguments": parsed_arguments(arguments)}
            calls.append({"type": "function", "function": function})
    return message


def parsed_arguments(arguments: Any) -> Any:
    """Parse the JSON arguments of a tool call, as chat templates expect. Return other values unchanged."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def split_thought(text: str) -> tuple[str, str]:
    """Return the content of a leading ``<think>...</think>`` block, or an empty text, and the remaining text."""
    thought = _THINK.match(text)
    return (thought[1].strip(), text[thought.end() :]) if thought else ("", text)


def answer_of(text: str) -> str:
    """Return the text after the reasoning. Return an empty text if the reasoning has not ended.

    The chat template may have begun the reasoning in the prompt, so the text before the first end of reasoning is
    always reasoning.
    """
    for begin, end in _THOUGHTS:
        _, mark, answer = text.partition(end)
        if mark:
            return answer
        if text.lstrip().startswith(begin):
            return ""
    return text


def _without_marks(thought: str) -> str:
    for begin, end in _THOUGHTS:
        thought = thought.strip().removeprefix(begin).removesuffix(end)
    return thought.strip()


class ReplyParser:
    """Decodes and parses the policy's turns.

    Args:
        tokenizer: a transformers tokenizer.
        tool_call_parser: vLLM's name of a parser, ``none``, or None to choose the parser by the chat template.
        reasoning_parser: vLLM's name of a parser. None leaves reasoning in the text (but not with the parser openai).
        template_kwargs: arguments of the chat template, which some reasoning parsers read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self.tool_call_parser = tool_call_parser or _parser_for(tokenizer)
        self._reasoning_parser = reasoning_parser
        self._template_kwargs = dict(template_kwargs or {})
        self._classes: dict[str | None, Any] = {}
        """vLLM's parser classes by the name of their reasoning parser."""
        self.counts_thinking = False
        """True if ``gdpo.shaping`` requires ``thinking_tokens``."""
        self.opening = _OPENINGS.get(self.tool_call_parser, "<tool_call>")

    @property
    def splits_reasoning(self) -> bool:
        """True if replies have their reasoning apart from the text."""
        return self._reasoning_parser is not None or self.tool_call_parser == "openai"

    def text(self, token_ids: Iterable[int]) -> str:
        """Decode tokens, without special tokens except those that mark tool calls and reasoning."""
        ids = list(map(int, token_ids))
        kept = self.markers
        if not kept:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        special = self.special
        return self._tokenizer.decode([i for i in ids if i not in special or special[i] in kept])

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Decode several sequences as ``text`` does."""
        if self.markers:
            return [self.text(ids) for ids in sequences]
        return self._tokenizer.batch_decode(list(map(list, sequences)), skip_special_tokens=True)

    def token_ranges(
        self, token_ids: Iterable[int], text: str, spans: Iterable[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        """Return the tokens that each range of characters was decoded from, as ranges [start, end) of tokens.

        A character whose bytes are split between several tokens belongs to all of them. Special tokens that ``text``
        drops belong to no character, so they may divide a range.

        Args:
            token_ids: tokens as sampled.
            text: result of ``text``.
            spans: ranges [start, end) of characters in ``text``.

        Raises:
            RunError: if ``text`` was not decoded from the tokens.
        """
        every = list(map(int, token_ids))
        places = [n for n, token in enumerate(every) if self.special.get(token, "") in ("", *self.markers)]
        ids = [every[place] for place in places]
        if self.text(ids) != text:
            raise RunError("reward_spans: the text of the completion was not decoded from its tokens")

        @cache
        def decoded(count: int) -> tuple[int, bool]:
            """Return how many characters the first tokens determine, and True if bytes of another one follow."""
            begin = self.text(ids[:count])
            common = len(commonprefix([begin, text]))
            return common, common < len(begin)

        def tokens_for(characters: int) -> int:
            return bisect_left(range(len(ids) + 1), characters, key=lambda count: decoded(count)[0])

        found: list[tuple[int, int]] = []
        for start, end in spans:
            if start < end:
                first = tokens_for(start + 1) - 1  # the token with the last byte of the first character
                if decoded(first)[0] == start:
                    first = tokens_for(start)
                    first -= decoded(first)[1]
                found += _runs(places[first : tokens_for(end)])
        return tuple(found)

    @cached_property
    def markers(self) -> frozenset[str]:
        """Special tokens that remain in decoded text, because a parser or a verifier needs them.

        These are the special tokens with the name of a marker, and those that the chat template writes in a message
        with a tool call but not in another message. The end of a turn is never among them.
        """
        if self.tool_call_parser == NO_PARSER and self._reasoning_parser is None:
            return frozenset()
        special = set(self.special.values())
        named = {token for token in special if _MARKER.search(token)}
        if self.tool_call_parser == "openai":  # a turn has several messages
            named |= special & {"<|start|>", "<|end|>"}
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "x"}}}
        plain = self._rendered({"content": "x"})
        calling = self._rendered({"content": "", "tool_calls": [call]})
        ends = {token for token in special if calling.rstrip().endswith(token) and token not in named}
        written = {token for token in special if token in calling and token not in plain}
        return frozenset((named | written) - ends - self._endings)

    @property
    def _endings(self) -> set[str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {str(token) for name in names if (token := getattr(self._tokenizer, name, None)) is not None}

    @cached_property
    def special(self) -> dict[int, str]:
        """Special tokens by id."""
        return special_tokens(self._tokenizer)

    def _rendered(self, message: Mapping[str, Any]) -> str:
        """Return the template's text of an assistant's message. Return no text if the template refuses it."""
        prompt, whole = "", ""
        tools = [{"type": "function", "function": _TOOL}]
        for arguments in ({"x": "x"}, '{"x": "x"}'):  # some templates expect JSON text
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = arguments
            try:
                prompt = self._tokenizer.apply_chat_template([_ASKED], tokenize=False, tools=tools)
                messages = [_ASKED, {"role": "assistant", **message}]
                whole = self._tokenizer.apply_chat_template(messages, tokenize=False, tools=tools)
                break
            except Exception:  # noqa: BLE001 - templates may raise any exception, for instance for tools
                continue
        return whole.removeprefix(prompt)

    def load(self) -> None:
        """Import the parsers now, and check that they work with the tokenizer.

        Raises:
            ConfigError: if vLLM has no parser of this name, or the tokenizer lacks tokens that the parser needs.
        """
        if self.tool_call_parser == NO_PARSER and self._reasoning_parser is None:
            return
        try:
            self._parser_class(self._reasoning_parser)(self._tokenizer, None)
        except Exception as error:  # parsers raise any exception for missing tokens
            raise ConfigError(
                f"policy.generation.tool_call_parser: {self.tool_call_parser} (reasoning_parser: "
                f"{self._reasoning_parser or 'null'}) cannot be used with the policy's tokenizer "
                f"({first_line(error)}); select another parser, or none"
            ) from None

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
        """Split a turn into reasoning, content and, if there are tools, tool calls.

        A call in the reasoning is not a call. Without a reasoning parser, the reasoning remains in the content.

        Args:
            text: result of ``text``.
            tools: tool definitions of the prompt, in chat format.

        Raises:
            ConfigError: see ``load``.
            RunError: if the tool definitions are invalid.
        """
        has_tools = bool(tools) and self.tool_call_parser != NO_PARSER
        if not has_tools and not self.splits_reasoning:
            return Reply(text)
        thought, answer = self._cut(text)
        found = self._split(answer, tools if has_tools else None, is_answer=bool(thought)) if answer else ("", "", ())
        if found is None:
            return Reply(text, is_malformed=has_tools)
        reasoning, content, calls = found
        is_malformed = has_tools and not calls and self.opening in _ANALYSIS.sub("", answer)
        if is_malformed or not (reasoning or content or calls):
            content = answer  # some parsers drop a text that does not have their format
        if thought and self.splits_reasoning:
            reasoning = _without_marks(thought)
        else:
            content = thought + content
        return Reply(content.strip() if calls else content, reasoning, calls, is_malformed)

    def _cut(self, text: str) -> tuple[str, str]:
        """Split a turn into (reasoning with its marks, answer). The reasoning is empty if vLLM's parser can split it.

        Many of vLLM's reasoning parsers end the reasoning at the first call in it.
        """
        answer = text if self.tool_call_parser == "openai" else answer_of(text)
        thought = text.removesuffix(answer)
        if self.splits_reasoning and self.opening not in thought:
            return "", text
        return thought, answer

    def _split(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None, is_answer: bool = False
    ) -> tuple[str, str, tuple[tuple[str, str], ...]] | None:
        """Return reasoning, content and calls. Return None if the parser fails.

        Args:
            is_answer: True if the text does not contain the reasoning of the turn.
        """
        request = self._request(tools)
        try:
            kind = self._parser_class(None if is_answer else self._reasoning_parser)
            parser = kind(self._tokenizer, request.tools, chat_template_kwargs=self._template_kwargs)
        except Exception as error:  # parsers raise any exception for missing tokens or unusual schemas
            self.load()
            raise RunError(f"the tools of a prompt are invalid for the parser: {first_line(error)}") from error
        ids = _harmony_ids(text) if self.tool_call_parser == "openai" else ()
        try:
            reasoning, content, calls = parser.parse(
                text, request, enable_auto_tools=bool(tools), model_output_token_ids=ids
            )
        except Exception:  # noqa: BLE001 - the policy may write any text, for which vLLM's parsers may raise anything
            return None
        named = tuple((call.name, call.arguments) for call in calls or () if tools and call.name)
        return reasoning or "", content or "", named

    def thinking_tokens(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Return the number of tokens of a turn before its answer begins, which are reasoning and its marks."""
        ids = list(map(int, token_ids))
        text = self.text(ids)
        answer = self._answer(text).strip()
        if not answer:
            return len(ids)
        if answer == text.strip():
            return 0
        return bisect_left(range(len(ids)), True, key=lambda n: bool(self._answer(self.text(ids[: n + 1])).strip()))

    def _answer(self, text: str) -> str:
        """Return the text after the reasoning. Return an empty text if the reasoning has not ended."""
        thought, answer = self._cut(text)
        if thought or not self.splits_reasoning:
            return answer
        found = self._split(text, None)
        return text if found is None else found[1]

    def _parser_class(self, reasoning_parser: str | None) -> Any:
        if reasoning_parser not in self._classes:
            self._classes[reasoning_parser] = self._find_class(reasoning_parser)
        return self._classes[reasoning_parser]

    def _find_class(self, reasoning_parser: str | None) -> Any:
        module = _vllm_module("vllm.parser")
        harmony = self.tool_call_parser == "openai"
        tool = None if self.tool_call_parser == NO_PARSER else self.tool_call_parser
        reasoning = None if reasoning_parser == NO_PARSER else reasoning_parser
        found = module.ParserManager.get_parser(
            tool, "openai_gptoss" if harmony else reasoning, enable_auto_tools=True, is_harmony=harmony
        )
        return found or module.DelegatingParser

    def _request(self, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        request: Any = _vllm_module("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest
        given: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            return request(messages=[_ASKED], **given)
        except ValueError as error:
            raise RunError(f"the tools of a prompt are invalid: {first_line(error)}") from None


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending indices as ranges [start, end)."""
    breaks = [n for n in range(1, len(places)) if places[n] != places[n - 1] + 1]
    edges = [0, *breaks, len(places)]
    return [(places[a], places[b - 1] + 1) for a, b in zip(edges, edges[1:]) if a < b]


def _parser_for(tokenizer: Tokenizer) -> str:
    """Return the parser for the tool calls that the tokenizer's chat template writes, by default ``hermes``."""
    template = getattr(tokenizer, "chat_template", None)
    templates = template.values() if isinstance(template, dict) else [template or ""]
    text = "\n".join(str(part) for part in templates)
    for marks, parser, _ in _FORMATS:
        if all(mark in text for mark in marks):
            return parser
    return "hermes"


def _harmony_ids(text: str) -> list[int]:
    """Tokenize the text of gpt-oss, whose parser reads tokens."""
    encoding = _vllm_module("vllm.entrypoints.openai.parser.harmony_utils").get_encoding()
    ids: list[int] = encoding.encode(text, allowed_special="all")
    return ids


def _vllm_module(name: str) -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    quiet_torch()
    logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM reads the variable after its first warnings
    with importing(freeze=False):
        module = importlib.import_module(name)
    # vLLM logs a traceback for each malformed call, which is an ordinary sample of a policy in training.
    for quiet in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning"):
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    return module
