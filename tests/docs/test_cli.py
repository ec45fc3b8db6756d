"""``docs/cli.md`` has the commands of ``keras-towers`` and their help."""

import re

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_commands import COMMANDS

pytestmark = pytest.mark.core

PAGE = ROOT / "docs" / "cli.md"
HEAD = """# Command line

`keras-towers` starts jobs ([`run`](#keras-towers-run)), builds engines
([`install`](#keras-towers-install)), checks an installation
([`doctor`](#keras-towers-doctor)), plans memory and hosts
([`plan`](#keras-towers-plan)), measures speed
([`bench`](#keras-towers-bench)), and compares results with one device
([`verify`](#keras-towers-verify)).
"""
# The commands in the order of the page.
NAMES = re.findall(r"\[`(\w+)`\]", HEAD)
# The title of a group of options of ``run``, by the first of them.
GROUPS = {
    "processes": "Processes and hosts",
    "stall_warning": "Slow and failed ranks",
    "min_np": "Elastic jobs",
}


def line(parameter):
    """Return the line of an argument, or of an option with its default."""
    name, said = parameter.metavar, [parameter.help]
    if parameter.param_type_name == "option":
        name = ", ".join(parameter.opts)
        if not parameter.is_flag:
            name += f" {parameter.metavar}"
            if parameter.required:
                said.append("Required.")
            elif parameter.default is not None and "Default:" not in said[0]:
                said.append(f"Default: {parameter.default!s}.")
    if parameter.envvar:
        said.append(f"Variable: `{parameter.envvar}`.")
    return f"* `{name}`: {' '.join(said)}\n"


def section(name, command):
    # Every such command has these, too.
    common = "help", "install_completion", "show_completion"
    parameters = [p for p in command.params if p.name not in common]
    usage = [name, "[OPTIONS]"]
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            is_list = parameter.nargs < 0
            shown = parameter.metavar + ("..." if is_list else "")
            usage.append(shown if parameter.required else f"[{shown}]")
    # An example in the help is a line of its own.
    text = re.sub(
        r"^(keras-towers|srun) .+$",
        r"```bash\n\g<0>\n```",
        command.help,
        flags=re.MULTILINE,
    )
    lines = []
    for parameter in parameters:
        if name == "keras-towers run" and parameter.name in GROUPS:
            lines.append(f"\n**{GROUPS[parameter.name]}**\n\n")
        lines.append(line(parameter))
    return (
        f"\n## {name}\n\n```\n{' '.join(usage)}\n```\n\n{text.strip()}\n\n"
        f"{''.join(lines)}"
    )


def page():
    """The page, from the commands, their arguments and their options."""
    assert {*NAMES} == COMMANDS.commands.keys()
    commands = {f"keras-towers {n}": COMMANDS.commands[n] for n in NAMES}
    return HEAD + "".join(
        section(name, command)
        for name, command in (*commands.items(), ("keras-towers", COMMANDS))
    )


def test_the_page_has_every_command_and_option():
    """To write it: ``python -m tests.docs.test_cli``."""
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
