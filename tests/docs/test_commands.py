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
_CODE = re.compile(r"`([^`\n]+)`")


def written(page, program):
    """The words behind a program's name, in blocks and in running text."""
    lines = _CODE.findall(page.read_text())
    for block in blocks(page, "bash"):
        lines += block.code.splitlines()
    return [
        line.partition("#")[0].split()[1:]
        for line in lines
        if line.startswith(f"{program} ")
    ]


def check(words):
    """Follow a command line as far as its own options go."""
    command = COMMANDS
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"no command {name!r}"
        command = command.commands[name]
    options = {
        name: option
        for option in command.params
        if option.param_type_name == "option"
        for name in (*option.opts, *option.secondary_opts)
    }
    while words and words[0].startswith("-"):
        name = words.pop(0)
        assert name == "--help" or name in options, f"no option {name!r}"
        if name != "--help" and not options[name].is_flag and words:
            words.pop(0)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    for words in written(page, "keras-towers"):
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page):
    for target, *_ in written(page, "make"):
        assert target in TARGETS


def test_options_of_running_text_exist():
    """Those that a page names alone, such as ``--stall-warning``."""
    known = {"--help"} | {
        name
        for command in COMMANDS.commands.values()
        for option in command.params
        for name in option.opts
    }
    for page in PAGES:
        for code in _CODE.findall(page.read_text()):
            if re.fullmatch(r"--[a-z-]+", code):
                assert code in known, f"{name_of(page)}: {code}"


def test_a_wrong_command_is_seen():
    for words in (["fly"], ["run", "--far", "x.py"], ["install", "mpi"]):
        with pytest.raises(AssertionError):
            check(words)
