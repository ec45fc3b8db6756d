"""An unmodified script under a strategy by name."""

import re

import pytest

from tests.launch.jobs import Launched

STRATEGY = """
class Loud:
    def __init__(self, towers=1):
        self.towers = towers
    def __enter__(self):
        print("enter", self.towers)
    def __exit__(self, *error):
        print("leave")
"""

SCRIPT = """
import os, random, sys
import keras
import helper
assert __name__ == "__main__"
assert sys.modules["__main__"].__dict__ is globals()
layer = keras.layers.Dense(3)
layer.build((None, 2))
print("seen", sys.argv, os.path.basename(sys.path[0]), random.random(),
      layer.kernel.numpy().sum(), list({"a", "b", "c", "d"}))
if "fail" in sys.argv:
    def inner():
        raise ValueError("bad data")
    inner()
sys.exit(4)
"""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "helper.py").write_text("")
    (folder / "script.py").write_text(SCRIPT)
    (tmp_path / "loud_package.py").write_text(STRATEGY)
    info = tmp_path / "loud_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: loud-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[keras_towers.strategies]\nloud = loud_package:Loud\n"
    )

    def run(*arguments, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        return Launched(tmp_path, arguments).finish(60)

    return run


def test_script_sees_what_it_would_alone(run, monkeypatch):
    done = run(
        *("-np", "2", "--strategy", "loud", "--towers", "3"),
        *("there/script.py", "--strategy", "mine"),
        monkeypatch=monkeypatch,
    )
    assert done.code == 4, done.err
    assert done.out.count("enter 3\n") == done.out.count("leave\n") == 2
    seen = re.findall(r"\[\d\] seen (.*)\n", done.out)
    # Random numbers, weights and the order of sets are the same on both.
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0].startswith("['there/script.py', '--strategy', 'mine'] there")
    assert re.search(r"seed \d+\n", done.err)


def test_traceback_is_the_scripts_own(run, monkeypatch):
    done = run(
        *("-np", "1", "--strategy", "loud", "--seed", "1"),
        *("there/script.py", "fail"),
        monkeypatch=monkeypatch,
    )
    assert done.code == 1
    assert "ValueError: bad data" in done.err
    assert re.search(r'script.py", line \d+, in inner', done.err)
    assert "runpy" not in done.err
    assert "launch/script.py" not in done.err
    assert "leave" in done.out
