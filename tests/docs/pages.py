"""The pages that users read, and the blocks of code in them."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)

# A fence, indented in a list, and what may be said of it on the line above.
_FENCE = re.compile(
    r"(?:^[ ]*<!--[ ]*(?P<note>[^\n]*?)[ ]*-->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)"
    r"^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of code.

    Attributes:
        line: the line of its first line of code, from 1.
        language: what stands behind the fence.
        code: without the indentation of the fence.
        note: the HTML comment on the line above, or "".
    """

    line: int
    language: str
    code: str
    note: str

    @property
    def not_run(self) -> str | None:
        """Why it does not run, where its note says so."""
        said = re.fullmatch(r"not run: (.+)", self.note)
        return said and said[1]

    @property
    def needs(self) -> str | None:
        """The module without which it does not run, where its note says so."""
        said = re.fullmatch(r"needs ([\w.]+)", self.note)
        return said and said[1]


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of a language on a page, in order."""
    text = page.read_text()
    return [
        Block(
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            textwrap.dedent(found["code"]),
            found["note"] or "",
        )
        for found in _FENCE.finditer(text)
        if found["language"] == language
    ]


def without_code(page: Path) -> str:
    """A page's text without its blocks of code."""
    return _FENCE.sub("", page.read_text())


def name_of(page: Path) -> str:
    """A page's path, for the names of tests."""
    return str(page.relative_to(ROOT))


def callbacks_by_rank() -> dict[str, str]:
    """Which ranks run each of Keras's callbacks, in the words of the page."""
    text = (ROOT / "docs" / "processes.md").read_text()
    _, after = text.split("| Keras's callbacks | run on |\n|---|---|\n")
    rows = [row.split("|") for row in after.split("\n\n")[0].splitlines()]
    return {
        name: ranks.strip()
        for _, names, ranks, _ in rows
        for name in re.findall(r"`(\w+)`", names)
    }
