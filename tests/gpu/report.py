"""The report of a session on GPUs, in Markdown."""

import dataclasses
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

# Of what a test failed with.
_LINES = 8


@dataclasses.dataclass(frozen=True)
class Results:
    """What became of the tests.

    Attributes:
        passed: how many passed.
        seconds: how long all took.
        failed: of each that failed its name, and with what.
        skipped: how many were skipped, by reason.
    """

    passed: int
    seconds: float
    failed: tuple[tuple[str, str], ...] = ()
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)


def read(path: Path) -> Results:
    """Read what pytest's ``--junitxml`` has written.

    Raises:
        OSError, ElementTree.ParseError: it has written none.
    """
    passed, failed, skipped = 0, [], {}
    root = ElementTree.parse(path).getroot()
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = [*case.iter("failure"), *case.iter("error")]
        left_out = case.find("skipped")
        if wrong:
            failed.append((name, _first_lines(wrong[0])))
        elif left_out is not None:
            reason = left_out.get("message", "")
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            passed += 1
    seconds = sum(float(s.get("time", 0)) for s in root.iter("testsuite"))
    return Results(passed, seconds, tuple(failed), skipped)


def _first_lines(element: ElementTree.Element) -> str:
    """What was wrong; a traceback says it in its lines with an E."""
    lines = (element.text or "").splitlines()
    said = [line[1:].strip() for line in lines if line.startswith("E ")]
    said = said or (element.get("message") or "").splitlines() or lines
    return "\n".join([line for line in said if line.strip()][:_LINES])


def of_tests(results: Results) -> str:
    """The section about the tests."""
    skipped = sum(results.skipped.values())
    counts = (
        f"**{results.passed} passed, {len(results.failed)} failed, {skipped} "
        f"skipped** in {results.seconds:.0f} s."
    )
    reasons = [f"* {n} x {why}" for why, n in results.skipped.items()]
    parts = [counts]
    if reasons:
        parts.append("\n".join(["Skipped:", "", *reasons]))
    for name, text in results.failed:
        parts.append(f"`{name}`:\n\n{block(text)}")
    return "\n\n".join(parts)


def block(text: str) -> str:
    """Text as it is, in a fence that it does not close itself."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    lines = ["| | |", "|---|---|"]
    for name, value in rows:
        shown = " ".join(value.split()).replace("|", "\\|")
        lines.append(f"| {name} | {shown} |")
    return "\n".join(lines)


def document(sections: Iterable[tuple[str, str]]) -> str:
    """A report of titles and texts."""
    parts = ["# keras_towers on GPUs"]
    parts += [f"## {title}\n\n{text}" for title, text in sections]
    return "\n\n".join(parts) + "\n"
