"""Constructs that the chat templates of public model families use: rendered as transformers renders them.

The templates are our own: none of a model's is copied. Each has what one family's template is written with.
"""

from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from router.text.chat_template import ChatTemplate
from router.text.conversation import Message

TURNS = [
    ("system", "Be brief. "),
    ("user", " How are you?\\n"),
    ("assistant", "Fine <b>&</b> well"),
    ("user", "And \u4f60?"),
]
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "roles by concatenation, alternation checked": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{% set first = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set first = false %}{% endif %}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<' + m['role'] + '>' + ((first + '\\n\\n') if loop.first and first else '') + m['content'].strip() }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<model>\\n' }}{% endif %}"
    ),
    "trimmed whitespace and filters": (
        "{%- for m in messages -%}\n   {%- if m.role == 'user' %}\n{{- '[u]' ~ m.content | trim ~ eos_token }}\n"
        "{%- else %}\n{{ m.role | capitalize | replace('A', 'a') }}: {{ m.content | trim | upper | length }}\n"
        "{%- endif %}\n{%- endfor %}{{ '' if not add_generation_prompt else '>>' }}\n"
    ),
    "macros, namespaces, break and continue": (
        "{% macro turn(role, text='', tags=[]) %}<{{ role }}>{{ text }}{% for t in tags %}[{{ t }}]{% endfor %}"
        "{{ caller() if caller }}{% endmacro %}{% set ns = namespace(count=0, system=none) %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif %}"
        "{% set ns.count = ns.count + 1 %}{% if ns.count > 2 %}{% break %}{% endif %}"
        "{{ turn(m.role, m.content, tags=['a', loop.index ~ '/' ~ loop.length]) }}{% endfor %}"
        "{% call turn('end') %}{{ ns.system is not none and ns.system }}{% endcall %}"
    ),
    "neighbours, slices from the end, tests": (
        "{% for m in messages[::-1] %}{{ loop.revindex0 }}{{ loop.previtem.role if loop.previtem is defined else '-' }}"
        "{{ loop.nextitem.role if not loop.last else '-' }}{{ m is mapping }}{{ m.content is string }}"
        "{{ m.tool_calls is defined and m.tool_calls is not none }}{{ m.get('name', 'nobody') }}{% endfor %}"
        "{{ messages[-1]['content'].split(' ')[-1] }}{{ messages | map(attribute='role') | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    ),
    "dates, JSON, absent variables": (
        "{{ strftime_now('%d %B %Y') }}{{ messages[2] | tojson }}{{ messages[2].content | tojson(indent=2) }}"
        "{{ documents is none }}{{ documents is defined }}{{ tools is none }}{{ xml_tools is defined }}"
        "{% if documents %}docs{% endif %}{{ custom_system | default('usual', true) }}"
        "{{ {'a': 1, 'b': [true, none]} | tojson }}{{ dict(a=2)['a'] }}{{ enable_thinking is not defined }}"
    ),
    "assistant text marked for training": (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "loops over pairs, ranges, conditions in loops": (
        "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}"
        "{% for i in range(0, messages | length, 2) if i != 2 %}{{ i }}{% else %}none{% endfor %}"
        "{% set text %}{% for m in messages if m.role == 'user' %}{{ loop.cycle('x', 'y') }}{% endfor %}{% endset %}"
        "{{ text }}{{ '%s-%d' | format('n', 3) }}{{ 'abc' in messages[2].content or 'well' in messages[2].content }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_template_constructs_render_as_transformers_renders_them(name: str, add_generation_prompt: bool) -> None:
    source, turns = TEMPLATES[name], [{"role": role, "content": text} for role, text in TURNS]
    expected = _compile_jinja_template(source).render(
        messages=turns, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **MARKS
    )
    template = ChatTemplate(source, MARKS, now=datetime.now)
    messages = [Message(role=role, content=text) for role, text in TURNS]
    assert template.render(messages, add_generation_prompt=add_generation_prompt, max_chars=10_000) == expected
    assert expected
