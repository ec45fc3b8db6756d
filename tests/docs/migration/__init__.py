"""What the page on migration says, row by row: each has a check here."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.strategies import distributed
from tests.docs.pages import ROOT, blocks
from tests.kit.served import Job

PAGE = ROOT / "docs" / "migration.md"
DEVICES = ["/cpu:0", "/cpu:1"]
X = np.random.default_rng(0).random((37, 20), "float32")
Y = X.sum(axis=1, keepdims=True)


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        section: the heading of its section.
        there: its first cell.
        here: the code in its second cell.
    """

    section: str
    there: str
    here: tuple[str, ...]

    def made(self, index: int = 0, **names: Any) -> Any:
        """Evaluate a piece of code of the second cell."""
        names = {"kt": kt, "gpus": DEVICES, "devices": DEVICES, **names}
        strategies = {name: getattr(kt, name) for name in kt.__all__}
        return eval(self.here[index], strategies, names)


Key = tuple[str, str]
CHECKS: dict[Key, Callable[[Row], None]] = {}
# What other tests show, too.
LONG: set[Key] = set()


def row(section: str, there: str, long: bool = False) -> Callable[..., Any]:
    """Make a function the check of the row whose first cell this is."""
    key = section, there

    def register(check: Callable[[Row], None]) -> Callable[[Row], None]:
        assert key not in CHECKS, there
        CHECKS[key] = check
        LONG.update({key} if long else ())
        return check

    return register


def rows() -> list[Row]:
    """All rows of the page."""
    found, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| ") and len(cells) > 1:
            code = tuple(re.findall(r"`([^`]+)`", cells[1]))
            found.append(Row(section, cells[0].removeprefix("| "), code))
    # Of each table the first row is its head.
    heads = re.findall(r"^\| (.+?) \|.*\n\|---", PAGE.read_text(), re.M)
    return [one for one in found if one.there not in heads]


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


def model(*layers: keras.layers.Layer, **options: Any) -> keras.Model:
    """A compiled model, the same every time; eager, where nothing else is said.

    To trace it takes most of what it costs.
    """
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [keras.Input((20,)), *layers, keras.layers.Dense(1)]
    )
    given = {"optimizer": "sgd", "loss": "mse", "run_eagerly": True}
    made.compile(**given | options)
    return made


def fit(it: keras.Model, **options: Any) -> keras.Model:
    """Train in order, with a last batch that is uneven."""
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, **options}
    it.fit(X, Y, **options)
    return it


def differ(one: keras.Model, other: keras.Model) -> float:
    """The largest difference of a weight."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def option(strategy: Any, name: str) -> Any:
    """What a strategy has been given, or its default."""
    return getattr(strategy._options, name)


_jobs = itertools.count()


@contextlib.contextmanager
def served(make: Callable[[], Any]) -> Iterator[Any]:
    """Make a strategy in the only worker of a server that is this process."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(f"migration_{next(_jobs)}", 1, patch)
        connection = job.connect(0)
        patch.setattr(distributed, "take_role", lambda *_: connection)
        written = connection.cluster.written()
        with mock.patch.dict(os.environ, TF_CONFIG=written):
            try:
                yield make()
            finally:
                job.close()
