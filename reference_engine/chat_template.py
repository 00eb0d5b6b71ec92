"""Chat templates: strangers' programs, so they run in a sandbox, their steps counted and what they make weighed.

With the helpers that transformers gives them.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Passes of its loops and calls of its macros, methods and filters: sixty for each message of the longest conversation,
# where published templates take about ten. One that takes all of them holds up every stream for a third of a second.
MOST_STEPS = 250_000
# Of what it makes, and of what it goes through to make that, all together: some hundred times a long context's text.
MOST_BYTES = 2**27  # a character is 1 here, whatever it takes
LINK, NODE = 8, 512  # bytes of a place in a list; what is looked at within lists takes as long as so many
MOST_BITS = 4096  # of a product or a power: a larger one may take hours, and no loop
MOST_NUMBER = 2**16  # as an argument: widths, counts, indents
MOST_WIDTH = 999  # within a format
# What a template's own expressions raise: a division by zero, a method that is not there, a text without end.
BUGS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)

TEXTS = (str, bytes)
LISTS = (list, tuple, set, frozenset)
SIZED = (*TEXTS, *LISTS, dict, range)
# A width that a format takes from elsewhere, or of more digits than MOST_WIDTH has.
WIDE = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4})|\{[^{}]*(?:\{|\d{4})")
ABSENT = ("urlize", "xmlattr", "wordwrap")  # filters that make pages, and take long over some texts

# What filters and methods cost. Those that look at a place or two, and those whose items are counted as they come:
CONSTANT = frozenset(
    "length count first last default d attr items keys values get safe int float abs startswith endswith "
    "map select reject selectattr rejectattr".split()
)
# that go through it once and make nothing larger, but for what is said of them below;
LINEAR = frozenset(
    "trim strip lstrip rstrip removeprefix removesuffix find rfind index rindex lower upper capitalize swapcase "
    "casefold string center ljust rjust zfill join replace encode decode format format_map".split()
)
# that put a text, or so many spaces, into many places; and that go through all for each. Others: a few bytes of each.
INSERTING = frozenset("indent truncate batch slice expandtabs tojson".split())
SQUARE = frozenset("sum translate".split())


class Unfit(ValueError):  # noqa: N818 - says what the template or the messages are
    """A template that is none, or that does not take these messages; the text says why."""


class _Environment(ImmutableSandboxedEnvironment):
    """jinja's sandbox keeps a template from this machine; this keeps it from running for ever, and from all memory.

    Before something is made it is weighed by what it is made of; `compiled` rewrites a template so that no expression
    comes by its text otherwise.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})  # not folded when it is compiled either

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.run = threading.local()  # of each thread's rendering: the steps and the bytes that are left
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._weighed(name, f) for name, f in self.filters.items() if name not in ABSENT}
        self.tests: dict[str, Any] = {name: self._looking(f) for name, f in self.tests.items()}
        self.filters["_counted"] = self._counted
        # With a context, so that jinja folds none when it compiles.
        self.filters["_text"] = pass_context(lambda context, value: self._weigh(value))
        self.filters["_seen"] = pass_context(lambda context, value: self._see(value))

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
        elif isinstance(value, SIZED):
            self._take(LINK * len(value))
        return value

    def _weigh(self, value: Any) -> Any:
        """Take what a value is as a text, or compared, with all that it holds, as often as it holds it."""
        if isinstance(value, TEXTS):  # most are
            self._take(len(value))
            return value
        left = [value]
        while left:
            inner = left.pop()
            self._take(NODE)
            self._see(inner)
            if isinstance(inner, LISTS):
                left += inner
            elif isinstance(inner, dict):
                left += [*inner, *inner.values()]
            elif isinstance(inner, Namespace):
                left.append(inner._Namespace__attrs)  # its text is that of a dict
        return value

    def _before(self, name: str, value: Any, given: Sequence[Any]) -> None:
        """Take what a filter or a method may make of a value and its arguments."""
        numbers = [abs(v) for v in given if isinstance(v, int)]
        if max(numbers, default=0) > MOST_NUMBER and name not in ("default", "d", "get"):
            raise jinja2.TemplateRuntimeError(f"{name} with a number of more than {MOST_NUMBER:,}")
        if name in CONSTANT:
            return
        before = self.run.bytes
        for v in (value, *given):
            self._weigh(v)
        whole = before - self.run.bytes
        size = len(value) if isinstance(value, SIZED) else 1
        texts = [v for v in given if isinstance(v, TEXTS)]
        if name in ("format", "format_map"):
            self._check_format(value, whole)
        elif name == "replace" and isinstance(value, str) and len(texts) > 1:
            self._take(value.count(str(texts[0])) * len(texts[1]))
        elif name == "join":  # of a filter the list comes first, of a method the separator
            separator, joined = (
                (size, given) if isinstance(value, TEXTS) and given else (max(map(len, texts), default=0), [value])
            )
            self._take(separator * sum(len(v) for v in joined if isinstance(v, SIZED)))
        elif name in ("split", "rsplit") and isinstance(value, str):
            self._take(LINK * LINK * (value.count(str(texts[0])) if texts else size))
        elif name in SQUARE:
            self._take(whole * size)
        elif name in INSERTING:
            self._take(whole * (LINK + sum(numbers) + sum(map(len, texts))))
        else:
            self._take(sum(numbers) if name in LINEAR else whole * LINK)

    def _check_format(self, form: Any, whole: int) -> None:
        """Of a text with places, each of which may hold all that there is."""
        if not isinstance(form, TEXTS):
            return
        text = form if isinstance(form, str) else form.decode("latin-1")
        if WIDE.search(text.replace("{{", "").replace("%%", "")):
            raise jinja2.TemplateRuntimeError(f"a format with a width of more than {MOST_WIDTH}, or from elsewhere")
        self._take((text.count("{") + text.count("%")) * (whole + MOST_WIDTH))

    def _weighed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that says first what it may take. jinja's own arguments, a context for one, are no part of it."""
        own = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def weighed(*args: Any, **kwargs: Any) -> Any:
            self._step()
            values = list(args)
            if len(args) > own:
                self._before(name, args[own], [*args[own + 1 :], *kwargs.values()])
                if isinstance(args[own], Iterator):
                    values[own] = map(self._weigh, args[own])
            made = function(*values, **kwargs)
            return self._counted(made) if isinstance(made, Iterator) else made

        return weighed

    def _looking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A test that goes through what it compares."""

        @wraps(function)
        def looking(*args: Any) -> Any:
            for value in args:
                self._see(value)
            return function(*args)

        return looking

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._step()
        if isinstance(
            obj, LoopContext
        ):  # loop(items) of a recursive loop: its body over those, not by the For's filter
            args = tuple(map(self._counted, args))
            kwargs = {k: v if k.startswith("_") else self._counted(v) for k, v in kwargs.items()}  # jinja's own: _
        method = getattr(obj, "__wrapped__", obj)  # a text's `format` is the sandbox's own
        if isinstance(method, MethodType | BuiltinMethodType) and isinstance(method.__self__, (*SIZED, int, float)):
            self._before(method.__name__, method.__self__, [*args, *kwargs.values()])
        elif obj is dict:
            self._weigh([args, kwargs])
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if problem := _oversized(operator, left, right):
            raise jinja2.TemplateRuntimeError(problem)
        if operator == "%" and isinstance(left, TEXTS):
            before = self.run.bytes
            self._weigh(right)
            self._check_format(left, len(left) + before - self.run.bytes)
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(items, (*TEXTS, *LISTS)):
                    self._take(max(0, times) * len(items) * (1 if isinstance(items, TEXTS) else LINK))
        else:
            self._see(left)
            self._see(right)
        return super().call_binop(context, operator, left, right)


def _oversized(operator: str, left: Any, right: Any) -> str:
    """What is wrong with computing a product or a power of numbers; "" where nothing is."""
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return f"a number of more than {MOST_BITS} bits" if bits > MOST_BITS else ""
    return ""


def _rewritten(tree: nodes.Template) -> nodes.Template:
    """The same template, where loops count and every text and list is weighed that is no filter's and no method's."""

    def through(name: str, inner: Any) -> nodes.Filter:
        return nodes.Filter(inner, name, [], [], None, None, lineno=inner.lineno)

    for loop in tree.find_all(nodes.For):
        loop.iter = through("_counted", loop.iter)
    for joined in tree.find_all(nodes.Concat):
        joined.nodes = [through("_text", node) for node in joined.nodes]
    for compared in tree.find_all(nodes.Compare):
        compared.expr = through("_seen", compared.expr)
        for operand in compared.ops:
            operand.expr = through("_seen", operand.expr)
    for sliced in tree.find_all(nodes.Getitem):
        if isinstance(sliced.arg, nodes.Slice):
            sliced.node = through("_seen", sliced.node)
    listed: Any
    for listed in tree.find_all((nodes.List, nodes.Tuple)):
        if getattr(listed, "ctx", "load") == "load":
            listed.items = [through("_text", node) for node in listed.items]
    for pair in tree.find_all(nodes.Pair):
        pair.value = through("_text", pair.value)
    for output in tree.find_all(nodes.Output):
        output.nodes = [through("_text", node) for node in output.nodes]
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


def _tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)
