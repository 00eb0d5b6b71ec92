"""Chat templates: strangers' programs, so they run in a sandbox, their loops and calls counted (what one filter does is
not); with the helpers that transformers gives.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Passes of its loops and calls of its macros and methods: sixty for each message of the longest conversation, where
# published templates take about ten. One that takes all of them holds up every stream for a third of a second.
MOST_STEPS = 250_000
MOST_BITS = 4096  # of a product or a power: a larger one may take hours, and no loop
MOST_ITEMS = 2**24  # of a text or a list that is repeated: the largest body has as many bytes
# What a template's own expressions raise: a division by zero, a method that is not there, a text without end.
BUGS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class Unfit(ValueError):  # noqa: N818 - says what the template or the messages are
    """A template that is none, or that does not take these messages; the text says why."""


class _Environment(ImmutableSandboxedEnvironment):
    """jinja's sandbox keeps a template from this machine; this keeps it from running for ever as well.

    Not from taking memory: a text that doubles by ~ or + is large within thirty steps, and one call of a filter or of a
    text's method (`center`, `format`) may go through it, or make it.
    """

    intercepted_binops = frozenset({"*", "**"})  # not folded when it is compiled either

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.run = threading.local()  # of each thread's rendering: the steps that are left
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = self._counted

    def _step(self) -> None:
        self.run.left -= 1
        if self.run.left < 0:
            raise jinja2.TemplateRuntimeError(f"more than {MOST_STEPS:,} steps")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._step()
        if isinstance(
            obj, LoopContext
        ):  # loop(items) of a recursive loop: its body over those, not by the For's filter
            args = tuple(map(self._counted, args))
            kwargs = {k: v if k.startswith("_") else self._counted(v) for k, v in kwargs.items()}  # jinja's own: _
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if problem := _oversized(operator, left, right):
            raise jinja2.TemplateRuntimeError(problem)
        return super().call_binop(context, operator, left, right)


def _oversized(operator: str, left: Any, right: Any) -> str:
    """What is wrong with computing a product or a power; "" where nothing is."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return f"a number of more than {MOST_BITS} bits" if bits > MOST_BITS else ""
    for items, times in ((left, right), (right, left)):
        if isinstance(items, Sequence) and isinstance(times, int) and len(items) * times > MOST_ITEMS:
            return f"a text or a list of more than {MOST_ITEMS:,} items"
    return ""


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
    except (SyntaxError, *BUGS) as error:  # of Python, which jinja makes of it; its lines are not the template's
        raise Unfit(f"cannot be compiled: {str(getattr(error, 'msg', error)) or type(error).__name__}") from error

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
