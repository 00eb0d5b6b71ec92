"""The generated blocks of README and docs are current, and what they tell a newcomer exists."""

import re
import shlex

import pytest

from tests.generate_docs import BLOCKS, COMMANDS, PAGES, generate

TEXT = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")  # a command over several lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_blocks_are_current(page):
    text = page.read_text()
    assert generate(text) == text, "run `make docs`"


def test_every_block_is_used():
    assert set(re.findall(r"generated: (\w+)", TEXT)) == set(BLOCKS)


def test_every_command_line_in_the_docs_parses():
    lines = re.findall(r"^ +llm-bench (.+?)(?:  #.*)?$", TEXT, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(re.sub(r"\$\w+", "1", line.partition(" || ")[0]))
        name = next(n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS)
        arguments = words[len(name.split()) :]
        COMMANDS[name].make_context(name, arguments)  # raises a usage error on a wrong option


def test_every_page_that_is_linked_is_there():
    for page in PAGES:
        for link in re.findall(r"\]\(((?!http)[^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name):
    assert COMMANDS[name].help
    for param in COMMANDS[name].params:
        if param.name != "help":
            assert param.help, f"{name} {param.opts}"
