"""README's generated blocks are current, and what it tells a newcomer exists."""

import re

import pytest

from tests.generate_docs import BLOCKS, COMMANDS, README, generate


def test_generated_blocks_are_current():
    text = README.read_text()
    assert generate(text) == text, "run `make docs`"


def test_every_block_is_used():
    assert set(re.findall(r"generated: (\w+)", README.read_text())) == set(BLOCKS)


def test_every_command_line_in_the_readme_parses():
    lines = re.findall(r"^ +llm-bench (.+?)(?:  #.*)?$", README.read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = line.split()
        name = next(n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS)
        arguments = words[len(name.split()) :]
        COMMANDS[name].make_context(name, arguments)  # raises a usage error on a wrong option


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name):
    assert COMMANDS[name].help
    for param in COMMANDS[name].params:
        if param.name != "help":
            assert param.help, f"{name} {param.opts}"
