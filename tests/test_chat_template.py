"""Chat templates: hostile ones end soon and are told why, others give what jinja gives."""

from typing import Any

import jinja2
import pytest

from reference_engine import chat_template
from reference_engine.chat_template import MOST_BITS, MOST_ITEMS, Unfit

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the wörld"}]


def rendered(template: str, **variables: Any) -> str:
    return chat_template.compiled(template)(**{"messages": MESSAGES, "add_generation_prompt": True} | variables)


ENDLESS = "more than 250,000 steps"
MUTUAL = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
NESTED = "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}"
# The items that a recursive loop is called with, by place and by name.
RECURSIVE = "{% for i in range(5) recursive %}{% if loop.depth == 1 %}{{ loop(range(9**5)) }}{% endif %}{% endfor %}"
BY_NAME = RECURSIVE.replace("loop(range", "loop(iterable=range")
IN_A_MACRO = "{% macro f(go) %}{{ go(range(9**5)) }}{% endmacro %}" + RECURSIVE.replace("loop(range(9**5))", "f(loop)")


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('system comes first') }}", "system comes first"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),  # the way out of a sandbox
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a'.encode('no such') }}", "unknown encoding"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion"),
        (NESTED, ENDLESS),
        (MUTUAL, ENDLESS),
        (RECURSIVE, ENDLESS),
        (BY_NAME, ENDLESS),
        (IN_A_MACRO, ENDLESS),
        ("{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}", "maximum recursion"),
        ("{% for m in messages recursive %}{{ loop(5) }}{% endfor %}", "'int' object is not iterable"),
        ("{{ 9 ** (9 ** 9) }}", "a number of more than 4096 bits"),
        ("{% set n = 2 ** 4000 %}{{ n * n }}", "a number of more than 4096 bits"),
        ("{{ 'x' * 10 ** 17 }}", "a text or a list of more than 16,777,216 items"),
        ("{{ 10 ** 17 * 'x' }}", "a text or a list of more than 16,777,216 items"),
        ("{{ ([0] * 5000) * 5000 }}", "a text or a list of more than 16,777,216 items"),
        ("{{ 'x'.center(10 ** 17) }}", "MemoryError"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_says_so(template: str, named: str) -> None:
    with pytest.raises(Unfit, match=named):
        rendered(template)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("{{ x | no_such_filter }}", "line 1: No filter named"),
        ("{{ " + "(" * 100_000, "nested too deeply"),
        ("{% break %}", "cannot be compiled: 'break' outside loop"),
        ("{% if messages %}{% continue %}{% endif %}", "cannot be compiled: 'continue' not properly in loop"),
        ("{{ " + "+" * 200 + "messages }}", "cannot be compiled: "),
        ("{{ messages" + " + messages" * 300 + " }}", "cannot be compiled: "),
        ("{{ " + "9" * 5000 + " }}", "cannot be compiled: Exceeds the limit"),
    ],
)
def test_a_template_that_is_none_is_refused_when_it_is_read(template: str, said: str) -> None:
    with pytest.raises(Unfit) as refused:
        chat_template.compiled(template)
    assert str(refused.value).startswith(said)
    assert str(refused.value) != "cannot be compiled: "


# What published templates do, and the loops and products that are looked at here.
SOUND = [
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}{{ eos }}\n{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% for m in [] %}x{% else %}nobody{% endfor %}",
    "{{ '=' * 20 }}{{ 3 * 'ab' }}{{ [1, 2] * 2 }}{{ 6 * 7 }}{{ 2 ** 40 }}",
    "{{ 2.5 * 4 }}{{ -3 * 5 }}{{ true * 3 }}{{ 10 ** -2 }}{{ 0 * 'x' }}{{ 'x' * -1 }}",
    "{% for n in tree recursive %}({{ n.name }}{{ loop.depth }}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
    "{{ loop(n.more) }}){% else %}-{% endfor %}",
    "{% for k in tree[0] recursive %}{{ k }}{% if loop.depth < 2 %}{{ loop(tree[1].items()) }}{% endif %}{% endfor %}",
    "{% macro say(m) %}{{ m.role ~ ': ' ~ m.content }}{{ caller() }}{% endmacro %}"
    "{% for m in messages %}{% call say(m) %}!{% endcall %}{% endfor %}",
    "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}",
]
TREE = [{"name": "a", "more": [{"name": "b", "more": []}, {"name": "c"}]}, {"name": "d", "more": ()}]


@pytest.mark.parametrize("template", SOUND, ids=range(len(SOUND)))
def test_a_sound_template_gives_what_jinja_gives(template: str) -> None:
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    variables: dict[str, Any] = {"messages": MESSAGES, "eos": "</s>", "tree": TREE}
    assert rendered(template, **variables) == plain.from_string(template).render(**variables)


def test_what_is_as_large_as_the_limits_is_computed() -> None:
    assert rendered("{{ ('x' * n) | length }}", n=MOST_ITEMS) == str(MOST_ITEMS)
    assert rendered("{{ a * b > 0 }}", a=2 ** (MOST_BITS // 2 - 1), b=2 ** (MOST_BITS // 2 - 1)) == "True"


def test_steps_are_counted_anew_for_each_conversation_and_a_loop_knows_its_length() -> None:
    render = chat_template.compiled(
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ' ' }}{% endfor %}"
    )
    for count in (1, 40_000, 40_000, 40_000):
        assert render(messages=MESSAGES[:1] * count).endswith(f"{count}/{count}.")
    with pytest.raises(Unfit, match=ENDLESS):
        render(messages=MESSAGES[:1] * 250_001)
    assert render(messages=MESSAGES)
