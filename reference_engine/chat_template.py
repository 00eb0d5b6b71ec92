"""Chat templates: strangers' programs, so they run in a sandbox, their steps counted and what they make weighed.

With the helpers that transformers gives them.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType, NoneType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from reference_engine.template_costs import (
    ANY_NUMBER,
    COSTS,
    DICTS,
    FILTER_COSTS,
    ITEMS,
    KEYS,
    LINK,
    LISTS,
    MOST_BYTES,
    SIZED,
    TEXTS,
    VALUES,
    WHOLE,
    Use,
    glance,
    larger,
    percent,
)

# Passes of its loops and calls of its macros, methods and filters: sixty for each message of the longest conversation,
# where published templates take about ten. One that takes all of them holds up every stream for a third of a second.
MOST_STEPS = 250_000
NODE = 512  # bytes: what is looked at within lists takes as long as so many
MOST_BITS = 4096  # of a number: sums with a larger one may take hours, and no loop
MOST_NUMBER = 2**16  # as an argument: widths, counts, indents
MOST_BOUND = 2**53  # of a range: keys that are far apart may all have one hash, and a dict of them takes their square
# What a template's own expressions raise: a division by zero, a method that is not there, a text without end.
BUGS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)

OBJECTS = (Namespace, LoopContext, Cycler, Joiner)
HOLDERS = (*LISTS, *DICTS, *OBJECTS, MethodType)  # what holds values that come out with it as a text, or compared
WITHIN = (*LISTS, *DICTS)
HASHED = (*DICTS, set, frozenset, KEYS, ITEMS)  # `in` looks at a place
ABSENT = ("urlize", "xmlattr", "wordwrap")  # filters that make pages, and take long over some texts
PLAIN = (*TEXTS, int, float, NoneType)  # none of those, as most are
JINJAS = ("_loop_vars", "_block_vars")  # arguments that are jinja's own

# Tests that compare, that divide, and that look at a text of it; operators as tests.
COMPARING = frozenset("eq == equalto ne != gt > greaterthan ge >= lt < lessthan le <=".split())
DIVIDING = frozenset("odd even divisibleby".split())
WRITTEN = frozenset("lower upper".split())
OPERATORS = {"eq": "eq", "ne": "ne", "gt": "gt", "gteq": "ge", "lt": "lt", "lteq": "le", "in": "in", "notin": "in"}


class Unfit(ValueError):  # noqa: N818 - says what the template or the messages are
    """A template that is none, or that does not take these messages; the text says why."""


class _Environment(ImmutableSandboxedEnvironment):
    """jinja's sandbox keeps a template from this machine; this keeps it from running for ever, and from all memory.

    Before something is made it is weighed by what it is made of; `compiled` rewrites a template so that no expression
    comes by its text otherwise.
    """

    intercepted_binops = frozenset({"+", "-", "*", "**", "/", "//", "%"})  # not folded when it is compiled either

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.run = threading.local()  # of each thread's rendering: the steps and the bytes that are left
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = self._now
        self.globals["range"] = _range
        self.globals["dict"] = _dict
        self.filters["tojson"] = _tojson
        self.filters = {name: self._weighed(name, f) for name, f in self.filters.items() if name not in ABSENT}
        self.tests: dict[str, Any] = {name: self._looking(name, f) for name, f in self.tests.items()}
        self.tests["in"] = self._contains
        self.filters["_counted"] = self._counted
        # With a context, so that jinja folds none when it compiles.
        self.filters["_text"] = pass_context(lambda context, value: self._weigh(value))
        self.filters["_seen"] = pass_context(lambda context, value: self._see(value))
        self.filters["_hashed"] = pass_context(lambda context, value: self._hash(value))

    def _step(self) -> None:
        self.run.left -= 1
        if self.run.left < 0:
            raise jinja2.TemplateRuntimeError(f"more than {MOST_STEPS:,} steps")

    def _take(self, count: int) -> None:
        self.run.bytes -= count
        if self.run.bytes < 0:
            raise jinja2.TemplateRuntimeError(f"more than {MOST_BYTES:,} bytes of texts and lists")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _see(self, value: Any) -> Any:
        """Take what a value has itself."""
        if isinstance(value, TEXTS):
            self._take(len(value))
        elif isinstance(value, int):
            self._take(LINK + value.bit_length() // 3)  # three bits a digit
        else:
            self._take(LINK * (len(value) if isinstance(value, SIZED) else 1))
        return value

    def _weigh(self, value: Any) -> Any:
        """Take what a value is as a text, or compared, with all that it holds, as often as it holds it."""
        if isinstance(value, PLAIN) or not isinstance(value, HOLDERS):
            return self._see(value)
        left = [value]
        while left:
            inner = left.pop()
            self._take(NODE)
            self._see(inner)
            left += _held(inner)
        return value

    def _hash(self, value: Any) -> Any:
        """As a key. Only a text's hash is kept by it."""
        return self._weigh(value) if isinstance(value, tuple) else value

    def _fit(self, made: Any) -> Any:
        """What a call made. Raises: a number that is too large."""
        if isinstance(made, int) and made.bit_length() > MOST_BITS:
            raise _too_large()
        return made

    def _before(
        self, name: str, value: Any, given: Sequence[Any], costs: dict[str, Callable[[Use], int]] = COSTS
    ) -> None:
        """Take what a filter or a method may make of a value and its arguments."""
        numbers = [abs(v) for v in given if isinstance(v, int)]
        if max(numbers, default=0) > MOST_NUMBER and name not in ANY_NUMBER:
            raise jinja2.TemplateRuntimeError(f"{name} with a number of more than {MOST_NUMBER:,}")
        cost = costs.get(name, larger)
        if cost is glance:
            for v in given:
                if isinstance(v, (*TEXTS, tuple)):
                    self._weigh(v)
            return
        start = self.run.bytes
        self._weigh(value)
        before = self.run.bytes
        for v in given:
            self._weigh(v)
        texts = [u for v in given for u in (v if isinstance(v, WITHIN) else (v,)) if isinstance(u, TEXTS)]
        size = len(value) if isinstance(value, SIZED) else 1
        use = Use(value, given, start - self.run.bytes, before - self.run.bytes, size, sum(numbers), texts,
                  sum(map(len, texts)))  # fmt: skip
        self._take(cost(use))

    def _weighed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that says first what it may take. jinja's own arguments, a context for one, are no part of it."""
        own = int(hasattr(function, "jinja_pass_arg"))
        glances = FILTER_COSTS.get(name) is glance

        @wraps(function)
        def weighed(*args: Any, **kwargs: Any) -> Any:
            self._step()
            value, *given = args[own:]
            if isinstance(value, Iterator):
                value = list(value) if name in WHOLE else map(self._weigh, value)
            if not glances:
                given, kwargs = [_listed(v) for v in given], {k: _listed(v) for k, v in kwargs.items()}
            self._before(name, value, [*given, *kwargs.values()], FILTER_COSTS)
            made = self._fit(function(*args[:own], value, *given, **kwargs))
            return self._counted(made) if isinstance(made, Iterator) else made

        return weighed

    def _looking(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A test that says first what it goes through."""

        def compared(left: Any, right: Any) -> Any:  # it ends with the smaller one
            plain = isinstance(left, PLAIN) or isinstance(right, PLAIN)
            for value in (left, right):
                self._see(value) if plain else self._weigh(value)
            return function(left, right)

        @wraps(function)
        def divided(value: Any, num: int = 2) -> Any:  # of a text % is a format
            self._operands("%", value, num)
            return function(value, num) if name == "divisibleby" else function(value)

        def written(value: Any) -> Any:
            return function(self._weigh(value))

        ways = ((COMPARING, compared), (DIVIDING, divided), (WRITTEN, written))
        return next((way for names, way in ways if name in names), function)

    def _contains(self, value: Any, seq: Any) -> bool:
        """jinja's test `in`. A text is compared with texts alone."""
        self._weigh(value)
        if isinstance(seq, Iterator):
            return value in map(self._weigh, seq)
        if isinstance(value, HOLDERS) and not isinstance(seq, HASHED):
            self._weigh(seq)
        else:
            self._see(seq)
            if isinstance(seq, (list, tuple, VALUES)):
                self._take(sum(len(v) for v in seq if isinstance(v, TEXTS)))
        return value in seq

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._step()
        self._take(LINK * (len(args) + len(kwargs)))
        method = getattr(obj, "__wrapped__", obj)  # a text's `format` is the sandbox's own
        if isinstance(obj, LoopContext):  # loop(items) of a recursive loop: its body over those, not by `_counted`
            args = tuple(map(self._counted, args))
            kwargs = {k: v if k in JINJAS else self._counted(v) for k, v in kwargs.items()}
        elif isinstance(method, MethodType | BuiltinMethodType) and isinstance(
            method.__self__, (*SIZED, int, float, type)
        ):
            if COSTS.get(method.__name__) is not glance:
                args, kwargs = tuple(map(_listed, args)), {k: _listed(v) for k, v in kwargs.items()}
            self._before(method.__name__, method.__self__, _given(args, kwargs))
        elif not isinstance(obj, Macro):  # whose body says itself what it takes
            self._weigh(_given(args, kwargs))
        return self._fit(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _operands(self, operator: str, left: Any, right: Any) -> None:
        """Take what an operator may make of them."""
        if isinstance(left, int) and isinstance(right, int):
            if _oversized(operator, left, right):
                raise _too_large()
        elif operator == "%" and isinstance(left, TEXTS):
            before = self.run.bytes
            self._weigh(left)
            self._weigh(right)
            form = left if isinstance(left, str) else left.decode("latin-1")
            self._take(percent(form, before - self.run.bytes))
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(items, (*TEXTS, *LISTS)):
                    self._take(max(0, times) * len(items) * (1 if isinstance(items, TEXTS) else LINK))
        else:
            take = self._weigh if operator == "-" else self._see  # what a view has less is found by hashes
            take(left)
            take(right)

    def _now(self, form: str) -> str:
        self._take(256 * len(form))  # Python's own limit of what becomes of it
        return datetime.now().astimezone().strftime(form)


def _oversized(operator: str, left: int, right: int) -> bool:
    """Whether computing with two numbers takes or makes one that is too large."""
    first, second = left.bit_length(), right.bit_length()
    made = first * right if operator == "**" else first + second if operator == "*" else 0
    return max(first, second, made) > MOST_BITS


def _too_large() -> jinja2.TemplateRuntimeError:
    return jinja2.TemplateRuntimeError(f"a number of more than {MOST_BITS} bits")


def _held(value: Any) -> Iterable[Any]:
    """What comes out with it as a text, compared, or as an attribute."""
    if isinstance(value, LISTS):
        return value
    if isinstance(value, DICTS):
        return [*value, *value.values()]
    if isinstance(value, OBJECTS):
        return list(object.__getattribute__(value, "__dict__").values())  # a Namespace shows nothing else of itself
    return [value.__self__] if isinstance(value, MethodType) else ()


def _listed(value: Any) -> Any:
    """What has no length until it has come."""
    return list(value) if isinstance(value, Iterator) else value


def _given(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [*args, *(v for k, v in kwargs.items() if k not in JINJAS)]


def _through(name: str, inner: Any) -> nodes.Filter:
    return nodes.Filter(inner, name, [], [], None, None, lineno=inner.lineno)


class _Tested(NodeTransformer):
    """Comparisons become tests, which see both sides at once; in a chain each is weighed for itself."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 - jinja's name
        self.generic_visit(node)
        if len(node.ops) > 1:
            node.expr = _through("_text", node.expr)
            for operand in node.ops:
                operand.expr = _through("_text", operand.expr)
            return node
        (operand,) = node.ops
        test = nodes.Test(node.expr, OPERATORS[operand.op], [operand.expr], [], None, None, lineno=node.lineno)
        return nodes.Not(test, lineno=node.lineno) if operand.op == "notin" else test


def _rewritten(tree: nodes.Template) -> nodes.Template:
    """The same template, where loops count and every text and list is weighed that is no filter's and no method's."""
    for loop in tree.find_all(nodes.For):
        loop.iter = _through("_counted", loop.iter)
    for joined in tree.find_all(nodes.Concat):
        joined.nodes = [_through("_text", node) for node in joined.nodes]
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Slice):
            item.node = _through("_seen", item.node)
        elif not isinstance(item.arg, nodes.Const):
            item.arg = _through("_hashed", item.arg)
    listed: Any
    for listed in tree.find_all((nodes.List, nodes.Tuple)):
        if getattr(listed, "ctx", "load") == "load":
            listed.items = [_through("_text", node) for node in listed.items]
    for pair in tree.find_all(nodes.Pair):
        pair.value = _through("_text", pair.value)
        if not isinstance(pair.key, nodes.Const):
            pair.key = _through("_hashed", pair.key)
    for output in tree.find_all(nodes.Output):
        output.nodes = [_through("_text", node) for node in output.nodes]
    _Tested().visit(tree)
    return tree


def compiled(text: str) -> Callable[..., str]:
    """The template as a function of its variables, for any thread; it raises Unfit. Raises Unfit itself."""
    environment = _Environment()
    try:
        template = environment.from_string(_rewritten(environment.parse(text)))
    except RecursionError as error:
        raise Unfit("nested too deeply") from error
    except jinja2.TemplateSyntaxError as error:
        raise Unfit(f"line {error.lineno}: {error.message}") from error
    except (SyntaxError, *BUGS) as error:  # of Python, which jinja makes of it; its lines are not the template's
        raise Unfit(f"cannot be compiled: {str(getattr(error, 'msg', error)) or type(error).__name__}") from error

    def render(**variables: Any) -> str:
        environment.run.left, environment.run.bytes = MOST_STEPS, MOST_BYTES
        try:
            return template.render(**variables)
        except (jinja2.TemplateError, *BUGS) as error:
            raise Unfit(str(error) or type(error).__name__) from error

    return render


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _range(*bounds: int) -> range:
    if any(abs(bound) > MOST_BOUND for bound in bounds):
        raise jinja2.TemplateRuntimeError(f"range with a number of more than {MOST_BOUND:,}")
    return safe_range(*bounds)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The class itself has methods that change others', and dict['x'], which holds what it is given."""
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own escapes HTML. No more arguments than transformers' has: a `default` would be called unweighed."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
