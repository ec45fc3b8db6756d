"""What the page on migration shows: its tables, and its scripts."""

import re
from typing import NamedTuple

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "migration.md"
DEVICES = ["/cpu:0", "/cpu:1"]


def pieces() -> list[str]:
    """The code in the second cells of the tables."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = line.split(" | ")
        if line.startswith("| ") and len(cells) > 1:
            found += re.findall(r"`([^`]+)`", cells[1])
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
