"""Commands and options that the pages name exist."""

import re

import pytest
import typer

from keras_towers.cli.main import app
from tests.docs.pages import PAGES, ROOT, blocks, name_of

pytestmark = pytest.mark.core

COMMANDS = typer.main.get_command(app)
TARGETS = re.findall(
    r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
)


def code(page):
    """What is written as code in running text."""
    return re.findall(r"`([^`\n]+)`", page.read_text())


def written(page, program):
    """The words behind a program's name, in blocks and in running text."""
    lines = code(page)
    for block in blocks(page, "bash"):
        lines += block.code.splitlines()
    return [
        line.partition("#")[0].split()[1:]
        for line in lines
        if line.startswith(f"{program} ")
    ]


def options_of(command):
    return {
        name: option
        for option in command.params
        if option.param_type_name == "option"
        for name in (*option.opts, *option.secondary_opts)
    }


def check(words):
    """Follow a command line as far as its own options go."""
    command = COMMANDS
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"no command {name!r}"
        command = command.commands[name]
    options = options_of(command)
    while words and words[0].startswith("-"):
        name = words.pop(0)
        assert name == "--help" or name in options, f"no option {name!r}"
        if name != "--help" and not options[name].is_flag and words:
            words.pop(0)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_targets_and_options_exist(page):
    for words in written(page, "keras-towers"):
        check(words)
    for target, *_ in written(page, "make"):
        assert target in TARGETS
    # Those that a page names alone, such as ``--stall-warning``.
    alone = {one for one in code(page) if re.fullmatch(r"--[a-z-]+", one)}
    known = map(options_of, [COMMANDS, *COMMANDS.commands.values()])
    assert alone <= {"--help"}.union(*known)
