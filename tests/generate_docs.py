"""Writes the generated blocks of README.md and docs/ from the tables in the code. `make docs`; test_docs.py checks."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from llm_bench.cli import app

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, command) of every command, those of groups as `group command`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


COMMANDS = dict(leaves(typer.main.get_command(app)))


def commands() -> str:
    rows = ["| command | does |", "|---|---|"]
    rows += [f"| `llm-bench {name}` | {command.help.splitlines()[0]} |" for name, command in COMMANDS.items()]
    return "\n".join(rows)


def options() -> str:
    return _options("run")


def _options(command: str) -> str:
    rows = [f"| option of `{command}` | meaning | default |", "|---|---|---|"]
    for option in COMMANDS[command].params:
        if option.name != "help":
            default = "" if option.default in (None, "", False) or callable(option.default) else f"{option.default}"
            name = option.opts[0] if option.opts[0].startswith("-") else option.opts[0].upper()
            rows.append(f"| `{name}` | {_cell(option.help)} | {default} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def other_options() -> str:
    """Of every other command that has some."""
    others = [name for name, command in COMMANDS.items() if name != "run" and len(command.params) > 1]
    return "\n\n".join(f"### {name}\n{_options(name)}" for name in others)


def presets() -> str:
    from llm_bench.objectives import PRESETS

    return "\n".join(
        ["| preset of `--slo` | limits |", "|---|---|"] + [f"| `{n}` | `{t}` |" for n, t in PRESETS.items()]
    )


def dialects() -> str:
    from llm_bench.dialects import DIALECTS

    lines = ["| api | the URL ends in | path after it | lengths held by | tried on |", "|---|---|---|---|---|"]
    for name, row in DIALECTS.items():
        unheld = "no length is asked" if row.comes.single_pass else "nothing"
        pins, tried = ", ".join(row.takes.pins) or unheld, row.tried or "from its documented protocol"
        lines.append(f"| `{name}` | `{row.site.base or '/'}` | `{row.path or '/'}` | {pins} | {tried} |")
    return "\n".join(lines)


def formats() -> str:
    from llm_bench.formats import FORMATS

    return "\n".join(
        ["| format | what it is |", "|---|---|"] + [f"| `{name}` | {row.about} |" for name, row in FORMATS.items()]
    )


def metrics() -> str:
    from llm_bench.metrics import SERIES, WHOLE

    rows = ["| metric | unit | meaning |", "|---|---|---|"]
    rows += [f"| `{name}_pQ` | {row.unit} | {row.meaning} |" for name, row in SERIES.items()]
    rows += [f"| `{name}` | {row.unit} | {row.meaning} |" for name, row in WHOLE.items()]
    return "\n".join(rows)


BLOCKS = {f.__name__: f for f in (commands, options, other_options, presets, dialects, formats, metrics)}


def generate(text: str) -> str:
    return BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}\n{m[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(generate(page.read_text()))
