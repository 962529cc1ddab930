"""Chat templates in ``BoundedEnvironment``: small ones render as in transformers, and none takes all memory."""

from __future__ import annotations

import importlib.util
import resource
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from gdpo_nemo.data.chat_templates import BoundedEnvironment, TemplateTooLarge, bound_templates, limited

_MEMORY = 1 << 30
_NESTED = "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
_MADE = {
    "text times number": "{{ 'x' * 10**10 }}",
    "list times number": "{{ ['x'] * 10**10 }}",
    "number times tuple": "{{ 10**10 * (1,) }}",
    "power": "{{ 2 ** (10 ** 9) }}",
    "product": "{% set n = namespace(x=9) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "padded": "{{ 'x'.ljust(10**10) }}",
    "centred": "{{ 'x'.center(10**10) }}",
    "zeros": "{{ '1'.zfill(10**10) }}",
    "tabs": "{{ '\t\t'.expandtabs(10**9) }}",
    "bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "percent width": "{{ '%99999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "format nested": "{{ '{:{}d}'.format(1, 10**10) }}",
    "format specification in a list": "{{ '{0:{1[0]}}'.format(1, ['>9999999999']) }}",
    "format map": "{{ '{a:9999999999d}'.format_map({'a': 1}) }}",
    "format of safe text": "{{ ('{:>9999999999}' | safe).format(1) }}",
    "format repeated": "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
    "format of nested lists": _NESTED + "{{ '{!r}'.format(n.x) | length }}",
    "translated": "{{ ('x' * 10**6).translate({120: 'y' * 10**6}) | length }}",
    "slices": "{% set n = namespace(x=[]) %}{% set y = 'x' * 10**6 %}"
    "{% for i in range(10**5) %}{% set n.x = [n.x, y[1:]] %}{% endfor %}",
    "copies": "{% set n = namespace(x=[]) %}{% set y = 'x' * 10**6 %}"
    "{% for i in range(10**5) %}{% set n.x = [n.x, y.upper()] %}{% endfor %}",
    "lists of ranges": "{% set n = namespace(x=[]) %}"
    "{% for i in range(10**5) %}{% set n.x = [n.x, range(10**5) | list] %}{% endfor %}",
    "mapped copies": "{{ (['x' * 10**5] * 10**5) | map('upper') | list | length }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "loops": "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "filter wordwrap": "{{ ('a ' * 10**5) | wordwrap(1, wrapstring='x' * 10**5) | length }}",
    "filter round": "{{ 1.5 | round(10**10) }}",
    "replaced": "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "joined": "{{ ('x' * 10**6).join(['y'] * 10**6) }}",
    "range": "{{ range(10**9) | list }}",
    "filter center": "{{ 'x' | center(10**10) }}",
    "filter indent": "{{ ('x\n' * 10**6) | indent(10**5) }}",
    "filter tojson": "{{ ([1] * 10**5) | tojson(indent=10**5) }}",
    "filter batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "filter format": "{{ '%1000000000d' | format(1) }}",
    "filter replace": "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
    "filter join": "{{ (['x'] * 10**6) | join('y' * 10**6) }}",
    "filter map": "{{ ['x'] | map('center', 10**10) | list }}",
    "doubled by plus": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by tilde": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "nested lists": _NESTED + "{{ n.x }}",
    "nested lists to JSON": _NESTED + "{{ n.x | tojson }}",
    "many values": "{% for i in range(1000) %}{{ 'x' * 10**6 }}{% endfor %}",
}
_CALL = {"name": "w", "arguments": {"city": "Turin"}}
_CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How warm is it in Turin? 100000000000 %s {}"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "name": "w", "tool_call_id": "call00001", "content": '{"warm": 21}'},
    {"role": "assistant", "content": "<think>\nquick\n</think>\n\n21 degrees."},
    {"role": "user", "content": "Thank you."},
]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "w",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
]


def _shipped() -> list[Path]:
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return [file for file in files if not file.stem.endswith("_training")]


@pytest.fixture
def unbounded(monkeypatch):
    """Render in transformers' own environment until ``bound_templates`` is called."""
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
    chat_template_utils._compile_jinja_template.cache_clear()
    yield
    chat_template_utils._compile_jinja_template.cache_clear()


@pytest.fixture
def little_memory():
    """Let the process take one GiB more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("template", _MADE.values(), ids=_MADE)
def test_a_template_is_refused_before_it_takes_the_memory(template, little_memory):
    bound_templates()
    with limited(1_000_000), pytest.raises((TemplateTooLarge, OverflowError)):
        chat_template_utils.render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=template)


def _rendered(template: str, tools: object, prompted: bool) -> str:
    """The text, or the error that the template raises."""
    given = {"tools": tools, "add_generation_prompt": prompted, "bos_token": "<s>", "eos_token": "</s>"}
    try:
        [text], _ = chat_template_utils.render_jinja_template([_CONVERSATION], chat_template=template, **given)
    except Exception as error:  # noqa: BLE001 - compared with that of the other environment
        return repr(error)
    return text


def test_templates_of_known_models_render_as_in_transformers(unbounded):
    texts = [path.read_text() for path in _shipped()]
    assert len(texts) > 10
    cases = [(text, tools, tools is None) for text in texts for tools in (None, _TOOLS)]
    expected = [_rendered(*case) for case in cases]
    assert sum("Turin" in text for text in expected) > len(expected) // 2
    bound_templates()
    assert chat_template_utils._compile_jinja_template("").environment.__class__ is BoundedEnvironment
    assert [_rendered(*case) for case in cases] == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ '=' * 40 ~ 7 * 6 ~ 2 ** 10 ~ '%5d|%s' % (3, 'y') ~ [1] + [2] ~ ' 1000000000 %s' % 'z' }}",
        "{{ '{:>8}|{:{}}'.format('a', 'b', 5) }}{{ ['a', 'b'] | join(', ') }}{{ {'a': [1]} | tojson(indent=4) }}",
        "{{ messages[1].content.replace('T', 'tt') }}{{ 'a\nb' | indent(2) }}{{ ','.join(['x', 'y']) }}",
        "{% macro m(x) %}[{{ x ~ nothing }}]{% endmacro %}{{ m(1) }}{{ nothing }}{{ 5 | default(10**12) }}{{ none }}",
        "{{ 'x'.ljust(3) | replace(' ', '_') }}{{ messages | length }}{{ messages | map(attribute='role') | list }}",
    ],
)
def test_small_values_render_as_in_transformers(template, unbounded):
    expected = _rendered(template, None, False)
    bound_templates()
    assert _rendered(template, None, False) == expected and "Error" not in expected
