"""Chat templates: hostile ones end soon and are told why, others give what jinja gives."""

import tracemalloc
from typing import Any

import jinja2
import pytest

from reference_engine import chat_template
from reference_engine.chat_template import MOST_BITS, Unfit
from reference_engine.template_costs import MOST_BYTES

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
    ],
)
def test_a_template_that_refuses_or_misbehaves_says_so(template: str, named: str) -> None:
    with pytest.raises(Unfit, match=named):
        rendered(template)


LARGE = "more than 134,217,728 bytes of texts and lists"
NUMBER = "with a number of more than 65,536"
WIDTH = "a format with a width of more than 999"
BITS = "a number of more than 4096 bits"


def doubled(first: str, grown: str, then: str = "") -> str:
    """A template that grows something seventy times."""
    loop = "{% for i in range(70) %}{% set ns.x = " + grown + " %}{% endfor %}"
    return "{% set ns = namespace(x=" + first + ") %}" + loop + then


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (doubled("'ab'", "ns.x ~ ns.x"), LARGE),
        (doubled("'ab'", "ns.x + ns.x"), LARGE),
        (doubled("[1]", "ns.x + ns.x"), LARGE),
        (doubled("'ab'", "ns.x.replace('a', ns.x)"), LARGE),
        (doubled("'ab'", "ns.x | replace('a', ns.x)"), LARGE),
        (doubled("'ab'", "[ns.x, ns.x] | join"), LARGE),
        (doubled("'ab'", "'%s%s' % (ns.x, ns.x)"), LARGE),
        (doubled("'ab'", "'%s%s' | format(ns.x, ns.x)"), LARGE),
        (doubled("'ab'", "'{0}{0}'.format(ns.x)"), LARGE),
        (doubled("'ab'", "ns.x.join([ns.x, ns.x])"), LARGE),
        (doubled("'ab'", "ns.x * 2"), LARGE),
        # Small in memory, and without end as a text or when compared.
        (doubled("[1]", "[ns.x, ns.x]"), LARGE),
        (doubled("1", "{'a': ns.x, 'b': ns.x}", "{{ ns.x == 1 }}"), LARGE),
        (doubled("1", "(ns.x, ns.x)", "{{ ns.x | tojson }}"), LARGE),
        (doubled("1", "dict(a=ns.x, b=ns.x)", "{{ ns.x | string }}"), LARGE),
        (doubled("1", "namespace(a=ns.x, b=ns.x)", "{{ ns.x }}"), LARGE),
        ("{% set x %}" + "x" * 10_000 + "{% endset %}{% for i in range(99999) %}{{ x }}{% endfor %}", LARGE),
        ("{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}", LARGE),
        ("{% filter replace('x', 'y' * 99999) %}" + "x" * 10_000 + "{% endfilter %}", LARGE),
        ("{{ 'x' * 10 ** 17 }}", LARGE),
        ("{{ 10 ** 17 * 'x' }}", LARGE),
        ("{{ ([0] * 5000) * 5000 }}", LARGE),
        ("{{ ([messages * 999] * 999) | join }}", LARGE),
        ("{{ ('x' * 9999) .join('y' * 99999) }}", LARGE),
        ("{{ ('y' * 99999) | join('x' * 9999) }}", LARGE),
        ("{{ ([{'a': 'x' * 9999}] * 99999) | map(attribute='a') | join }}", LARGE),
        ("{{ ('\n' * 99999) | indent(9999, blank=true) }}", LARGE),
        ("{{ ('x ' * 999999).split() }}{{ ('x ' * 999999).split(' ') }}", LARGE),
        ("{{ ('\t' * 99999).expandtabs(9999) }}", LARGE),
        ("{{ ('a' * 99999).translate({97: 'x' * 9999}) }}", LARGE),
        ("{{ ([[0] * 9999] * 9999) | sum(start=[]) | length }}", LARGE),
        ("{{ [0] | tojson(indent=10 ** 9) }}", NUMBER),
        ("{{ 'x'.center(10 ** 17) }}", "center " + NUMBER),
        ("{{ 'x' | center(10 ** 9) }}", "center " + NUMBER),
        ("{{ ['x'] | map('center', 10 ** 9) | list }}", "map " + NUMBER),
        ("{{ 'x'.ljust(width=10 ** 9) }}", "takes no keyword|ljust " + NUMBER),
        ("{{ '5'.zfill(10 ** 9) }}", "zfill " + NUMBER),
        ("{{ (5).to_bytes(10 ** 9, 'big') }}", "to_bytes " + NUMBER),
        ("{{ [1] | batch(10 ** 9, 0) | list }}", "batch " + NUMBER),
        ("{{ [1] | slice(10 ** 9) | list }}", "slice " + NUMBER),
        ("{{ '%999999999d' % 5 }}", WIDTH),
        ("{{ '%*d' % (999999999, 5) }}", WIDTH),
        ("{{ '%999999999d' | format(5) }}", WIDTH),
        ("{{ '{:>999999999}'.format('x') }}", WIDTH),
        ("{{ '{:{}}'.format('x', '999999999') }}", WIDTH),
        # Widths that only a reader of formats sees: behind a key, or a bracket in an index.
        ("{{ '%(a)999999999d' % {'a': 5} }}", WIDTH),
        ("{{ '%(a)999999999d' | format(a=5) }}", WIDTH),
        ("{{ '%(a(b)c)999999999d' % {'a(b)c': 5} }}", WIDTH),
        ("{{ '%.999999999f' % 5 }}", WIDTH),
        ("{{ '%999999999d'.encode() % 5 }}", WIDTH),
        ("{{ ['%999999999d'] | format(5) }}", WIDTH),
        ("{{ '{0[}]:999999999}'.format({'}': 5}) }}", WIDTH),
        ("{{ '%999999999d' is odd }}", WIDTH),
        ("{{ '%999999999d' is divisibleby(5) }}", WIDTH),
        ("{{ '%999999999d' is divisibleby(num=5) }}", WIDTH),
        ("{{ range(3) | tojson(default='{0!s:>999999999}'.format) }}", "unexpected keyword argument 'default'"),
        ("{{ 'x' | round(10, 'floor') }}", "a str cannot be rounded"),
        ("{{ [0] | round(10, 'floor') }}", "a list cannot be rounded"),
        ("{{ 5 | round(99999, 'floor') }}", "round " + NUMBER),
        # Of what comes one by one, and of views and classes.
        ("{{ range(99999) | map('string') | join('x' * 99999) }}", LARGE),
        ("{{ ('x' * 99999).join(range(99999) | map('string')) }}", LARGE),
        ("{{ range(9999) | map('string') | map('list') | sum(start=[]) }}", LARGE),
        ("{% set x = 'x' * 10 ** 5 %}{{ {}.fromkeys(range(99999), x).values() | join }}", LARGE),
        ("{% set x = 'x' * 10 ** 5 %}{{ {}.fromkeys(range(99999), x).items() | string }}", LARGE),
        ("{% set x = 'x' * 10 ** 5 %}{{ ([{}.fromkeys([1], x).keys().mapping] * 99999) | string }}", LARGE),
        (doubled("1", "{}.fromkeys([1, 2], ns.x)"), LARGE),
        ("{{ {}.fromkeys(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1)) }}", "range with a number of more than"),
        ("{{ dict.fromkeys([1]) }}", "has no attribute 'fromkeys'"),
        ("{{ dict['x'].y }}", "has no attribute 'x'"),
        ("{% set x = 'x' * 10 ** 5 %}{{ ([(x | safe).unescape] * 99999) | join }}", LARGE),
        ("{% set j = joiner('x' * 10 ** 5) %}{{ ([j] * 99999) | join(attribute='sep') }}", LARGE),
        ("{% set c = cycler('x' * 10 ** 5) %}{{ ([c] * 99999) | join(attribute='current') }}", LARGE),
        (
            "{% for x in ['x' * 10 ** 5, 1] %}{% if loop.last %}{{ ([loop] * 99999) | join(attribute='previtem') }}"
            "{% endif %}{% endfor %}",
            LARGE,
        ),
        # Of arguments that are no texts themselves, or come by name or in another order.
        ("{{ ('5' * 99999) | replace(5, 'x' * 9999) | length }}", LARGE),
        ("{{ ([5] * 99999) | replace('5', 'x' * 9999) | length }}", LARGE),
        ("{{ ('a' * 99999) | replace(new='x' * 9999, old='a') | length }}", LARGE),
        ("{{ ('a' * 99999).encode().replace('a'.encode(), ('x' * 9999).encode()) | length }}", LARGE),
        ("{{ ('\x00' * 99999).encode() | replace('0', 'x' * 9999) | length }}", LARGE),
        ("{% autoescape 1 %}{{ ('<' * 9999) | replace('&' | safe, 'x' * 99999) | length }}{% endautoescape %}", LARGE),
        ("{{ (['a', 'b'] * 9999) | join(['x' * 99999]) | length }}", LARGE),
        ("{{ ([0] * 9999) | tojson(separators=('y' * 99999, ':')) | length }}", LARGE),
        ("{{ ([0] * 9999) | tojson(separators={'y' * 99999: 1, ':': 2}) | length }}", LARGE),
        ("{{ ([0] * 9999) | tojson(separators=['y' * 99999, ':'] | map('string')) | length }}", LARGE),
        # Small, of many objects.
        ("{{ ('中' * 10 ** 7) | list | length }}", LARGE),
        ("{{ ('中' * 10 ** 7) | sort | length }}", LARGE),
        ("{% for s in ('中' * 5 * 10 ** 6) | slice(1) %}{{ s | length }}{% endfor %}", LARGE),
        ("{{ ('中\n' * 3 * 10 ** 6).splitlines() | length }}", LARGE),
        ("{{ ('中\n' * 3 * 10 ** 6) | indent(0) | length }}", LARGE),
        # Numbers, which no operator sees grow.
        ("{{ ('f' * 99999) | int(base=16) // 3 }}", BITS),
        ("{{ (5).from_bytes(('x' * 99999).encode(), 'big') % 3 }}", BITS),
        ("{{ strftime_now('%A' * 10 ** 6) }}", LARGE),
        # Long without being large.
        ("{% set a = [[0] * 99999] * 99999 %}{% set b = [[0] * 99999] * 99999 %}{{ a == b }}", LARGE),
        ("{% set a = [[0] * 99999] * 99999 %}{% set b = [[0] * 99999] * 99999 %}{{ a is eq(b) }}", LARGE),
        ("{% set a = [[0] * 99999] * 99999 %}{% set b = [[0] * 99999] * 99999 %}{{ 0 < 1 == a == b }}", LARGE),
        ("{% set a = [0] * 99999 %}{% set b = [0] * 99999 %}{{ a in [b] * 99999 }}", LARGE),
        ("{% set a = [0] * 99999 %}{% set b = [0] * 99999 %}{{ a not in ([b] * 99999) | map('default') }}", LARGE),
        (
            "{% set a = [[0] * 99999] * 99999 %}{% set b = [[0] * 99999] * 99999 %}"
            "{% for i in range(2) %}{{ loop.changed(a if i else b) }}{% endfor %}",
            LARGE,
        ),
        (
            "{% macro m() %}{{ varargs | length }}{% endmacro %}{% set t = range(99999) | list %}"
            "{% for i in range(99999) %}{{ m(*t) }}{% endfor %}",
            LARGE,
        ),
        ("{{ ('a' * 10 ** 6).rfind('ab' + 'a' * 5 * 10 ** 5) }}", LARGE),
        ("{{ ('a' * 10 ** 6).strip('b' * 10 ** 5 + 'a') }}", LARGE),
        ("{{ ('<>' * 10 ** 6) | striptags }}", LARGE),
        ("{{ (range(99999) | map('string') | join).encode('punycode') }}", LARGE),
        ("{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{{ x.count('y') }}{% endfor %}", LARGE),
        ("{% set x = '9' * 10 ** 6 %}{% for i in range(99999) %}{{ x | float }}{% endfor %}", LARGE),
        (
            doubled("1", "(ns.x, ns.x)", "{% for i in range(99999) %}{{ {}[ns.x] }}{% endfor %}").replace("70", "9"),
            LARGE,
        ),
        ("{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{% if 'y' in x %}{% endif %}{% endfor %}", LARGE),
        ("{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{% if x[1:] %}{% endif %}{% endfor %}", LARGE),
        ("{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{% if x | lower %}{% endif %}{% endfor %}", LARGE),
        ("{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{% if 'y' is in x %}{% endif %}{% endfor %}", LARGE),
        ("{{ range(99999) | map('string') | map('string') | map('string') | list | length }}", ENDLESS),
        ("{{ 'x' | urlize }}{{ lipsum(99999) }}", "No filter named 'urlize'"),
        ("{{ lipsum(99999) }}", "'lipsum' is undefined"),
    ],
)
def test_a_template_that_would_take_memory_or_time_without_end_is_ended(template: str, named: str) -> None:
    with pytest.raises(Unfit, match=named):
        rendered(template)


@pytest.mark.parametrize("grown", ["ns.x ~ ns.x", "ns.x | replace('a', ns.x)", "[ns.x, ns.x]", "[ns.x, ns.x] | join"])
def test_no_more_memory_is_taken_than_the_limit_says(grown: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Unfit, match=LARGE):
            rendered(doubled("'ab'", grown))
        assert tracemalloc.get_traced_memory()[1] < 2 * MOST_BYTES
    finally:
        tracemalloc.stop()


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
    "{{ messages | map(attribute='role') | join(', ') }}{{ 'a-b' | replace('-', '--') }}{{ [1] | string }}",
    "{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content.split('w')[-1].lstrip() }}",
    "{{ '%s: %5.2f' % ('a', 1.5) }}{{ '{:>5}{{}}{}'.format('b', 'c') }}{{ '{a}'.format_map({'a': 1}) }}",
    "{{ '%d%%' | format(5) }}{{ 'x' | indent(2) }}{{ 10 ** 9 | default(10 ** 9) }}{{ 'ab'[::-1] }}",
    "{% set a = messages[1:] + [{'role': 'tool', 'content': 'x' ~ 1 ~ none}] %}{{ a | length }}{{ a }}",
    "{{ (1, 'b') }}{{ {'c': 2.5} }}{% for a, b in [(1, 2)] %}{{ b, a }}{% endfor %}{{ 'be' in messages[0].content }}",
    "{{ messages[0].role == 'system' }}{{ [3, 1, 2] | sort | first }}{{ messages | last }}{{ 1 < 2 < 3 }}",
    "{% autoescape true %}<b>{{ '<' }}{{ '<b>' | safe }}{{ 'a' ~ '<' }}</b>{% endautoescape %}{{ '<' | e }}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}<{{ 1 + 1 }}>{% endset %}{{ x | trim }}",
    "{% macro say(m) %}{{ m.role ~ ': ' ~ m.content }}{{ caller() }}{% endmacro %}"
    "{% for m in messages %}{% call say(m) %}!{% endcall %}{% endfor %}",
    "{{ 6 is divisibleby(num=3) }}{{ 3 is odd }}{{ 1 is in([1]) }}{{ 1 is in(seq=[2]) }}{{ 'a' is lower }}",
    "{{ 'x' not in messages[0] }}{{ 'role' in messages[0] }}{{ messages[0] in messages }}",
    "{{ 2 in range(3) | map('abs') }}{{ 'b' in ['a', 'b'] }}{{ no == 1 }}",
    "{{ messages[0] == messages[1] }}{{ messages == messages[:] }}{{ (1, 2) < (1, 3) }}{{ not 1 >= 2 }}",
    "{{ 7 // 2 }}{{ 7 % 4 }}{{ 7 / 2 }}{{ 1 - 2 }}{{ 4 is even }}",
    "{{ {1: 2, 3: 4}.keys() - [1] }}{{ 2.55 | round(1, 'floor') }}{{ 7 | round }}",
    "{{ dict(a=1, b=2).items() | list }}{{ {(1, 2): 3}[(1, 2)] }}{{ {'a': 1}.values() | sum }}",
    "{{ 'aXbX'.replace('X', '-', 1) }}{{ 'aXbX' | replace(new='', old='X') }}",
    "{{ 505 | replace(5, 6) }}{{ 'a b'.rsplit(' ', 1) }}",
    "{{ range(3) | map('string') | join('-') }}{{ '-'.join(range(3) | map('string')) }}",
    "{{ messages | join('+', attribute='role') }}",
    "{{ '%(a)s %% %5d' | replace('%5d', '') | format(a=5) }}{{ '%-4s|' % 'a' }}{{ '{0[a]:>4}'.format({'a': 100000}) }}",
    "{{ '%d' | format(100000) }}{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2] | sum }}{{ 'bé'.encode('utf-8').decode() }}",
    "{% for m in messages %}{{ loop.changed(m.role) }}{{ loop.cycle('a', 'b') }}{{ loop.previtem }}{% endfor %}",
    "{{ '<b>x</b>' | striptags }}{{ 'xaax'.strip('x') }}{{ 'ab' | list }}",
    "{{ [1, 2] | reverse | list }}{{ 'ff' | int(base=16) }}",
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
    assert rendered("{% if 'x' * n %}y{% endif %}", n=MOST_BYTES - 1) == "y"
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
