"""A package that is installed apart has one of each part of a strategy.

``package/`` is written against ``keras_towers.extending`` alone.
"""

import functools
import os
import sys
import zipfile
from pathlib import Path

import pytest

import keras_towers as kt
from keras_towers.extending import check_strategy
from tests.kit.processes import Launched
from tests.kit.wheels import build

PACKAGE = Path(__file__).with_name("package")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that has the package, as ``pip install --target`` fills it."""
    wheel = build("wheel", tmp_path_factory.mktemp("wheel"), PACKAGE)
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


@pytest.fixture
def parts(installed, monkeypatch):
    """The package can be imported."""
    monkeypatch.syspath_prepend(installed)
    yield
    for name in [n for n in sys.modules if n.startswith("parts_of_mine")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("by-size", {"elements": 20}, "Largest places trained weights"),
        ("in-float64", {}, 'mode "parts_of_mine.reductions.in_float64"'),
    ],
)
def test_parts_of_one_process_train_as_one_device(name, options, said, parts):
    towers = ["/device:CPU:1", "/device:CPU:2"]
    make = functools.partial(kt.strategy, name, towers, **options)
    assert said in make().describe()
    check_strategy(make, ["embedding-clipped", "accumulation"])


@pytest.mark.slow
def test_parts_of_several_processes_train_as_one_device(installed, tmp_path):
    paths = os.pathsep.join([str(installed), os.environ["PYTHONPATH"]])
    job = Launched(
        tmp_path,
        *("-np", 2, "--no-strategy", "-m", "parts_of_mine.check"),
        PYTHONPATH=paths,
        TMPDIR=str(tmp_path),
    ).finish(240)
    assert job.code == 0, job.output[-3000:]
    assert job.out.count("as one device") == 2
