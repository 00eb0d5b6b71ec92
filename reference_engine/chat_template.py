"""Chat templates: strangers' programs, so they run in a sandbox and end; with the helpers that transformers gives."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Passes of its loops and calls of its macros and methods: sixty for each message of the longest conversation, where
# published templates take about ten. One that takes all of them holds up every stream for a third of a second.
MOST_STEPS = 250_000
MOST_BITS = 4096  # of a power: a larger one may take hours, and no loop
# What a template's own expressions raise: a division by zero, a method that is not there, a text without end.
BUGS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class Unfit(ValueError):  # noqa: N818 - says what the template or the messages are
    """A template that is none, or that does not take these messages; the text says why."""


class _Environment(ImmutableSandboxedEnvironment):
    """jinja's sandbox keeps a template from this machine; this keeps it from running for ever as well."""

    intercepted_binops = frozenset({"**"})  # not folded when it is compiled either

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.run = threading.local()  # of each thread's rendering: the steps that are left
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = self._counted

    def step(self) -> None:
        self.run.left -= 1
        if self.run.left < 0:
            raise jinja2.TemplateRuntimeError(f"more than {MOST_STEPS:,} steps")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield item

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.step()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
            raise jinja2.TemplateRuntimeError(f"a power of more than {MOST_BITS} bits")
        return super().call_binop(context, operator, left, right)


def compiled(text: str) -> Callable[..., str]:
    """The template as a function of its variables, for any thread; it raises Unfit. Raises Unfit itself."""
    environment = _Environment()
    try:
        tree = environment.parse(text)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        template = environment.from_string(tree)
    except RecursionError as error:
        raise Unfit("nested too deeply") from error
    except jinja2.TemplateSyntaxError as error:
        raise Unfit(f"line {error.lineno}: {error.message}") from error

    def render(**variables: Any) -> str:
        environment.run.left = MOST_STEPS
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
