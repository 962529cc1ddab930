"""Chat templates of model families: tokens, masks and tool calls of a conversation, and what verifiers read."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from gdpo_nemo.data.conversation import Conversation, output_items
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.replies import Reply, ReplyParser, message_of
from gdpo_nemo.environments.nemo_gym.rows import ROW, request_body
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.rollouts.batches import decode, sampled
from gdpo_nemo.rollouts.context import Transcript
from gdpo_nemo.utils.errors import ConfigError

# Mistral's form: TRL has no template of this family.
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def own_template(user: str, tool: str, assistant: str, end: str, call: str, again: str | None = None) -> str:
    """A template in the form of a family of which TRL has none. ``call`` is one call, with its list around it.

    Args:
        again: what begins the answer after a tool's result, if that is not ``assistant``.
    """
    said = f"{{% if m.tool_calls %}}{call}{{% else %}}{{{{ m.content }}}}{{% endif %}}{end}"
    after_tool = assistant if again is None else again
    last = f"{{% if messages[-1].role == 'tool' %}}{after_tool}{{% else %}}{assistant}{{% endif %}}"
    return (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}{user}{{% elif m.role == 'tool' %}}{tool}{{% else %}}"
        f"{assistant}{said}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{last}{{% endif %}}"
    )


JSON = "{{ m.tool_calls[0].function.arguments | tojson }}"
XML_PARAMETERS = (
    "{% for name, value in m.tool_calls[0].function.arguments.items() %}<parameterEQUALS>{{ value }}</parameter>\n"
    "{% endfor %}"
)
KIMI = own_template(
    "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
    "<|im_system|>tool<|im_middle|>## Return of functions.warm:0\n{{ m.content }}<|im_end|>",
    "<|im_assistant|>assistant<|im_middle|>",
    "<|im_end|>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ m.tool_calls[0].function.name }}:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
)
MINIMAX = own_template(
    "]~b]user\n{{ m.content }}[e~[\n",
    "]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
    "]~b]ai\n",
    "[e~[\n",
    '<minimax:tool_call>\n<invoke name="{{ m.tool_calls[0].function.name }}">\n'
    + XML_PARAMETERS.replace("EQUALS", ' name="{{ name }}"')
    + "</invoke>\n</minimax:tool_call>",
)
SEED = own_template(
    "<seed:bos>user\n{{ m.content }}<seed:eos>",
    "<seed:bos>tool\n{{ m.content }}<seed:eos>",
    "<seed:bos>assistant\n",
    "<seed:eos>",
    "<seed:tool_call>\n<function={{ m.tool_calls[0].function.name }}>\n"
    + XML_PARAMETERS.replace("EQUALS", "={{ name }}")
    + "</function>\n</seed:tool_call>",
)
DEEPSEEK_31 = own_template(
    "<｜User｜>{{ m.content }}",
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
    "<｜Assistant｜></think>",
    "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ m.tool_calls[0].function.name }}<｜tool▁sep｜>"
    f"{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    again="",
)


@dataclass(frozen=True)
class Family:
    """A chat template with the tokens of its models, and the text of one call."""

    template: str
    parser: str
    """vLLM's parser, which the template selects."""
    end: str
    """The last token of a turn with a call. It also ends the completion."""
    call: str
    special: str = ""
    """Special tokens, separated by spaces."""
    plain: str = ""
    """Tokens that are added but not special."""


CHATML = "<|im_start|> <|im_end|>"
QWEN = "<tool_call> </tool_call> <think> </think>"
HERMES = '<tool_call>\n{"name": "warm", "arguments": {"city": "Oslo"}}\n</tool_call>'
XML = "<tool_call>\n<function=warm>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
LLAMA = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
DEEPSEEK = "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>"
FAMILIES = {
    "qwen2.5": Family("qwen2_5", "hermes", "<|im_end|>", HERMES, CHATML, "<tool_call> </tool_call>"),
    "qwen3": Family("qwen3", "hermes", "<|im_end|>", HERMES, CHATML, QWEN),
    "qwen3.5": Family("qwen3_5_nothink", "qwen3_coder", "<|im_end|>", XML, CHATML, QWEN),
    "llama3.1": Family(
        "llama3_1", "llama3_json", "<|eot_id|>", '{"name": "warm", "parameters": {"city": "Oslo"}}', LLAMA
    ),
    "llama3.2": Family(
        "llama3_2", "llama3_json", "<|eot_id|>", '{"name": "warm", "parameters": {"city": "Oslo"}}', LLAMA
    ),
    "mistral": Family(
        MISTRAL,
        "mistral",
        "</s>",
        '[TOOL_CALLS]warm[ARGS]{"city": "Oslo"}',
        "</s> [INST] [/INST] [TOOL_CALLS] [ARGS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
    ),
    "deepseek-v3": Family(
        "deepseekv3",
        "deepseek_v3",
        "<｜end▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>warm\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        f"{DEEPSEEK} <｜User｜> <｜Assistant｜>",
    ),
    "glm4.5": Family(
        "glm4moe",
        "glm45",
        "<|observation|>",
        "\n<think></think>\n<tool_call>warm\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        "<|user|> <|assistant|> <|system|> <|observation|> <|endoftext|> [gMASK] <sop>",
        f"{QWEN} <arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "gpt-oss": Family(
        "gptoss",
        "openai",
        "<|call|>",
        ' to=functions.warm<|channel|>commentary json<|message|>{"city": "Oslo"}',
        "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|> <|constrain|>",
    ),
    "gemma4": Family(
        "gemma4_v5",
        "gemma4",
        "<|tool_response>",
        '<|tool_call>call:warm{city:<|"|>Oslo<|"|>}<tool_call|>',
        '<bos> <turn|> <|turn> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|tool> <tool|>',
    ),
    "lfm2": Family(
        "lfm2_v2",
        "lfm2",
        "<|im_end|>",
        "<|tool_call_start|>[warm(city='Oslo')]<|tool_call_end|>",
        f"{CHATML} <|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>",
    ),
    "deepseek-v3.1": Family(
        DEEPSEEK_31,
        "deepseek_v31",
        "<｜end▁of▁sentence｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>warm<｜tool▁sep｜>{"city": "Oslo"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        f"{DEEPSEEK} <｜User｜> <｜Assistant｜> </think> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
    ),
    "kimi-k2": Family(
        KIMI,
        "kimi_k2",
        "<|im_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.warm:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
        "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
    ),
    "minimax-m2": Family(
        MINIMAX,
        "minimax_m2",
        "[e~[",
        '<minimax:tool_call>\n<invoke name="warm">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "]~b] [e~[ ]~!b[",
        "<minimax:tool_call> </minimax:tool_call> <think> </think>",
    ),
    "seed-oss": Family(
        SEED,
        "seed_oss",
        "<seed:eos>",
        "<seed:tool_call>\n<function=warm>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
        "<seed:bos> <seed:eos>",
        "<seed:tool_call> </seed:tool_call> <seed:think> </seed:think>",
    ),
    "qwen3-2507": Family("qwen3_instruct_2507", "hermes", "<|im_end|>", HERMES, CHATML, QWEN),
}
TOOL = {
    "name": "warm",
    "description": "Tell the temperature.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
USER = {"role": "user", "content": "How warm is Oslo?"}
RESULT = {"role": "tool", "name": "warm", "tool_call_id": "call00001", "content": "21"}
CALLED = {"id": "call00001", "type": "function", "function": {"name": "warm", "arguments": {"city": "Oslo"}}}


def template_of(name: str) -> str:
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the tokens of a family."""
    family = FAMILIES[name]
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in family.special.split()]
    ends = {"<|eot_id|>", "<|im_end|>", "</s>", "<｜end▁of▁sentence｜>", "[e~[", "<seed:eos>"} & set(
        family.special.split()
    )
    made = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token=min(ends, default=None))
    made.add_tokens(special, special_tokens=True)
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain.split()])
    template = family.template if "{{" in family.template else template_of(family.template)
    # DeepSeek's template opens reasoning in the prompt, and drops the reasoning of earlier turns.
    made.chat_template = template.replace("<｜Assistant｜><think>\\n", "<｜Assistant｜>")
    return made


def completion_of(ids: list[int], finish: str = "stop") -> Completion:
    return Completion(np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32), finish, ((0, len(ids)),))


def rendered(name: str) -> str:
    """The template's text of the conversation up to the policy's second turn."""
    tokenizer = tokenizer_of(name)
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        call = {**CALLED, "function": {"name": "warm", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT]
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, tools=TOOLS, add_generation_prompt=True)
        except TypeError:  # DeepSeek's template expects JSON text
            continue
    raise AssertionError(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_masks_and_calls_of_two_turns_match_the_chat_template(name):
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    conversation = Conversation(tokenizer, chat=True)
    assert conversation.replies.tool_call_parser == family.parser
    _, prompt_ids = conversation.prompt([USER], TOOLS)
    wrote = tokenizer(family.call + family.end, add_special_tokens=False)["input_ids"]
    transcript = Transcript(Prompt("p", prompt_ids, "", "tools"), 0)
    transcript.append_policy_tokens(completion_of(wrote))
    text = conversation.text(np.array(wrote))
    assert text == family.call  # special tokens of the call, and not the end of the turn
    reply = conversation.replies.parse(text, TOOLS)
    assert [(called, json.loads(given)) for called, given in reply.calls] == [("warm", {"city": "Oslo"})]
    ids = conversation.continuation([USER], [RESULT], wrote[-1], TOOLS, [CALLED])
    transcript.append_env_tokens(ids)
    expected = tokenizer(rendered(name), add_special_tokens=False)["input_ids"]
    assert transcript.token_ids.tolist() == expected
    transcript.append_policy_tokens(completion_of(tokenizer("21 degrees.")["input_ids"]))
    made = transcript.trajectory(conversation)
    whole = np.concatenate([made.prompt.token_ids, made.completion_ids])
    trained = tokenizer.decode(made.completion_ids[made.loss_mask], skip_special_tokens=False)
    assert trained == family.call + family.end + "21 degrees."
    assert whole.tolist()[: len(expected)] == expected and made.loss_mask.sum() == len(wrote) + len("21 degrees.")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_truncated_call_is_closed_as_the_template_closes_it(name):
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    conversation = Conversation(tokenizer, chat=True)
    wrote = tokenizer(family.call, add_special_tokens=False)["input_ids"]
    ids = conversation.continuation([USER], [RESULT], wrote[-1], TOOLS, [CALLED])
    whole = [*conversation.prompt([USER], TOOLS)[1].tolist(), *wrote, *ids.tolist()]
    assert whole == tokenizer(rendered(name), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["mistral", "llama3.1", "lfm2", "gemma4"])
def test_verifier_and_server_see_a_call_whose_marks_are_special_tokens(name):
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    call = family.call if family.parser != "llama3_json" else "<|python_tag|>" + family.call
    wrote = tokenizer(call + family.end, add_special_tokens=False)["input_ids"]
    parameters = {"input": "x", "tools": [{"type": "function", **TOOL}]}
    fields = {"tools": TOOLS, ROW: {"responses_create_params": parameters}}
    made = sampled(Prompt("p", np.zeros(1, np.int32), "", "gym", fields), 0, completion_of(wrote))
    decode([made], ReplyParser(tokenizer))
    assert made.text == call
    (item,) = json.loads(request_body(made, False))["response"]["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "warm", {"city": "Oslo"})


def test_reasoning_is_split_by_the_parser_that_the_config_names():
    thinking = ReplyParser(tokenizer_of("qwen3"), reasoning_parser="qwen3")
    reply = thinking.parse("<think>\nhm\n</think>\n\n" + HERMES, TOOLS)
    assert reply.reasoning.strip() == "hm" and len(reply.calls) == 1 and reply.content == ""
    assert [item["type"] for item in output_items(reply)] == ["reasoning", "function_call"]
    harmony = ReplyParser(tokenizer_of("gpt-oss"))
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>21"
    ids = tokenizer_of("gpt-oss")(text, add_special_tokens=False)["input_ids"]
    assert harmony.parse(harmony.text(ids)) == Reply("21", "hm")


MARKS = {
    "seed-oss": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}
REASONING_PARSERS = {
    "qwen3": "qwen3",
    "qwen3.5": "qwen3",
    "qwen3-2507": "deepseek_r1",
    "seed-oss": "seed_oss",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "glm4.5": "glm45",
    "kimi-k2": "kimi_k2",
    "minimax-m2": "minimax_m2",
}
THINKING = [name for name in FAMILIES if name != "gpt-oss"]


@pytest.mark.parametrize("parses_reasoning", [False, True])
@pytest.mark.parametrize("name", THINKING)
def test_a_call_in_the_reasoning_is_not_a_call(name, parses_reasoning):
    begin, end = MARKS.get(name, ("<think>", "</think>"))
    call = FAMILIES[name].call.replace("\n<think></think>", "")
    parser = REASONING_PARSERS.get(name) if parses_reasoning else None
    replies = ReplyParser(tokenizer_of(name), reasoning_parser=parser)
    inner = f"I could write {call.replace('Oslo', 'Rome')} first."
    thought = f"{begin}{inner}{end}"
    for text in (thought + "\n\nIt is 21.", inner + end + "\n\nIt is 21."):  # the prompt may begin the reasoning
        reply = replies.parse(text, TOOLS)
        assert not reply.calls and not reply.is_malformed and reply.content.endswith("\n\nIt is 21.")
        assert inner in (reply.reasoning if replies.splits_reasoning else reply.content)
        assert replies.parse(text).content == (reply.content if replies.splits_reasoning else text)
    asked = replies.parse(f"{thought}\n\n{call}", TOOLS)
    assert [(called, json.loads(given)) for called, given in asked.calls] == [("warm", {"city": "Oslo"})]
    unfinished = replies.parse(begin + inner, TOOLS)
    assert not unfinished.calls and not unfinished.is_malformed
    ids = replies._tokenizer(f"{thought}It is 21.", add_special_tokens=False)["input_ids"]
    assert replies.text(ids[-len("It is 21.") :]) == "It is 21."
    assert replies.thinking_tokens(ids) == len(ids) - len("It is 21.")


def test_a_call_in_the_analysis_of_gpt_oss_is_not_a_call():
    replies = ReplyParser(tokenizer_of("gpt-oss"))
    analysis = "<|channel|>analysis<|message|>I could write to=functions.warm {}<|end|>"
    again = "<|start|>assistant" + analysis
    for thought in (analysis, analysis + again):
        reply = replies.parse(f"{thought}<|start|>assistant<|channel|>final<|message|>21", TOOLS)
        assert not reply.calls and not reply.is_malformed and reply.content == "21"
    unfinished = replies.parse(analysis.removesuffix("<|end|>"), TOOLS)
    assert not unfinished.calls and not unfinished.is_malformed


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_cannot_be_parsed_is_reported_and_stays_in_the_text(name):
    replies = ReplyParser(tokenizer_of(name))
    opening = replies.opening
    reply = replies.parse(opening + "{nonsense", TOOLS)
    assert reply.is_malformed and not reply.calls and reply.content == opening + "{nonsense"
    assert replies.parse("nothing to call", TOOLS) == Reply("nothing to call")


def test_a_parser_that_the_tokenizer_cannot_serve_is_an_error_of_the_config():
    with pytest.raises(ConfigError, match="policy.generation.tool_call_parser: llama3_json .*python_tag"):
        ReplyParser(tokenizer_of("qwen3"), "llama3_json").load()
    silent = ReplyParser(tokenizer_of("mistral"), "none")
    assert silent.parse(FAMILIES["mistral"].call, TOOLS).calls == () and silent.markers == frozenset()


@pytest.mark.parametrize("parser, name", [(None, "qwen3"), ("qwen3", "qwen3"), (None, "gpt-oss")])
def test_thinking_tokens_are_those_before_the_answer(parser, name):
    tokenizer = tokenizer_of(name)
    thought, answer = "<think>so 3</think>", "it is 21"
    if name == "gpt-oss":
        thought = "<|channel|>analysis<|message|>so 3<|end|><|start|>assistant<|channel|>final<|message|>"
    replies = ReplyParser(tokenizer, reasoning_parser=parser)
    ids = tokenizer(thought + answer, add_special_tokens=False)["input_ids"]
    assert replies.thinking_tokens(ids) == len(ids) - len(answer)
    assert replies.thinking_tokens(ids[:5]) == 5  # a truncated thought
    if parser is None and name == "qwen3":
        assert replies.thinking_tokens(ids[-len(answer) :]) == 0
    made = sampled(Prompt("p", np.zeros(1, np.int32), "", "env"), 0, completion_of(ids))
    replies.counts_thinking = True
    decode([made], replies)
    transcript = Transcript(made.prompt, 0)
    transcript.append_policy_tokens(completion_of(ids))
    transcript.append_env_tokens([1, 2])
    transcript.append_policy_tokens(completion_of(ids))
    twice = transcript.trajectory(Conversation(tokenizer, True, replies=replies))
    assert 2 * made.thinking_tokens == twice.thinking_tokens == 2 * (len(ids) - len(answer))


def test_later_turns_are_rendered_with_the_template_arguments_of_their_row():
    conversation = Conversation(tokenizer_of("qwen3"), chat=True)
    row = conversation.for_row({"chat_template_kwargs": {"enable_thinking": False}})
    end = conversation.tokenizer.convert_tokens_to_ids("<|im_end|>")
    thinking, silent = (c.text(c.continuation([USER], "and Rome?", end)) for c in (conversation, row))
    assert silent == thinking + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_of_the_policy_ends_the_run(name):
    family = FAMILIES[name]
    rng = random.Random(0)
    marks = [
        *family.special.split(),
        *family.plain.split(),
        family.call,
        *'{}[]":,\\',
        '"name"',
        "warm",
        " ",
        "\n",
        "é",
    ]
    replies = ReplyParser(tokenizer_of(name))
    for _ in range(40):
        text = "".join(rng.choices(marks, k=12))
        reply = replies.parse(text, TOOLS)
        assert all(isinstance(part, str) for call in reply.calls for part in call)
        assert json.dumps(message_of(reply)) and output_items(reply)
