"""What stands on the page on migration: its rows and its scripts."""

import ast
import contextlib
import re
from typing import NamedTuple

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "migration.md"


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        section: the heading of its section.
        there: its first cell.
        here: its second cell.
    """

    section: str
    there: str
    here: str

    @property
    def code(self) -> list[str]:
        """The code in its second cell."""
        return re.findall(r"`([^`]+)`", self.here)

    @property
    def expressions(self) -> list[ast.expr]:
        """What is Python in it; options alone are those of a function ``_``."""
        found = []
        for code in self.code:
            text = code.removeprefix("with ").rstrip(":")
            if re.fullmatch(r"\w+=\S+", text):
                text = f"_({text})"
            with contextlib.suppress(SyntaxError):
                found.append(ast.parse(text, mode="eval").body)
        return found


def rows() -> list[Row]:
    """All rows of the page."""
    found, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        # Above the rows of each table are its head and a rule.
        if line.startswith("|---"):
            found.pop()
        elif line.startswith("| "):
            cells = line.strip("|").split(" | ")
            found.append(Row(section, *map(str.strip, cells[:2])))
    return found


class Script(NamedTuple):
    """A script before and after it has been migrated, and how to start it."""

    before: str
    after: str
    command: str


def scripts() -> dict[str, Script]:
    """The scripts of the page, by the strategy that each is given."""
    found = {}
    commands = blocks(PAGE, "bash")
    for block in blocks(PAGE, "diff"):
        lines = block.code.splitlines()
        before, after = (
            "\n".join(line[1:] for line in lines if line[:1] != other)
            for other in "+-"
        )
        # Where one is started by a launcher, the next block says how.
        end = block.line + len(lines)
        command = [c.code for c in commands if end < c.line < end + 5]
        name = re.search(r"\w+Strategy\(.*\)|DataParallel\(\)", after)[0]
        found[name] = Script(before, after, "".join(command).strip())
    return found
