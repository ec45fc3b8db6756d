"""``keras-towers install``, with builds that only pretend.

The real build is what `make test` begins with.
"""

import importlib.util

import pytest
from typer.testing import CliRunner

from keras_towers.cli import main
from keras_towers.cli.main import app
from keras_towers.jobs.building.recipe import InstalledEngine, InstallError

PARTS = {"Gloo": True, "MPI": True, "NCCL": 0}
LOADS = InstalledEngine("0.28.1", "2.21.0", True, parts=PARTS)


def invoke(*arguments):
    result = CliRunner().invoke(app, ["install", *arguments])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What is asked of the building functions, which do nothing."""
    calls = []
    wheel = tmp_path / "horovod-0.28.1.whl"
    wheel.write_text("a wheel")

    def pretend_to_build(recipe, progress, rebuild):
        options = getattr(recipe, "with_mpi", None), recipe.with_nccl
        calls.append((*options, rebuild))
        progress("compiling")
        return wheel, not rebuild

    def install(recipe, wheel, cached, progress):
        calls.append("install")
        return cached, LOADS

    monkeypatch.setattr(main, "build_wheel", pretend_to_build)
    monkeypatch.setattr(main, "install_wheel", install)
    return calls


@pytest.mark.parametrize(
    ("arguments", "built", "said"),
    [
        ("horovod", (False,) * 3, "installed, from the cache; with Gloo, MPI"),
        ("byteps --with-nccl", (None, True, False), "BytePS 0.28.1"),
        ("horovod --with-mpi --with-nccl --rebuild", (True,) * 3, "built in"),
    ],
)
def test_what_is_built(asked, arguments, built, said, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, output = invoke(*arguments.split())
    assert code == 0 and said in output
    assert "compiling\n" in output
    assert asked == [built, "install"]


def test_what_is_there_already_is_installed_again(asked, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    assert "installed again, from the cache" in invoke("horovod")[1]


def test_a_misspelt_engine_is_recognized():
    code, output = invoke("Horovod")
    assert code == 2 and "Did you mean 'horovod'?" in output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InstallError("no compiler"), 1, "install: no compiler"),
        (KeyboardInterrupt(), 130, "nothing was installed"),
    ],
)
def test_what_goes_wrong(monkeypatch, error, code, said):
    def fail(*ignored):
        raise error

    monkeypatch.setattr(main, "build_wheel", fail)
    found, output = invoke("horovod")
    assert found == code and said in output
