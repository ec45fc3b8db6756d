"""``keras-towers install`` as a user types it, without a build."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from keras_towers import subprocesses
from keras_towers.building import build, toolchain
from keras_towers.building.recipe import Found, InstallError
from keras_towers.cli.main import app

LOADS = Found(
    "0.28.1", "2.21.0", True, parts={"Gloo": True, "MPI": True, "NCCL": 0}
)


def invoke(*arguments):
    return CliRunner().invoke(app, ["install", *arguments])


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What is asked of the building functions, which do nothing."""
    calls = []
    wheel = tmp_path / "horovod-0.28.1.whl"
    wheel.write_text("a wheel")

    def pretend_to_build(recipe, progress, rebuild):
        options = getattr(recipe, "with_mpi", None), recipe.with_nccl
        calls.append((*options, rebuild))
        progress("compiling", 0.0)
        progress("compiling", 0.3)
        return build.Built(wheel, cached=not rebuild, seconds=83.2)

    def install(recipe, built, progress):
        calls.append("install")
        return built, LOADS

    monkeypatch.setattr(build, "build", pretend_to_build)
    monkeypatch.setattr(build, "install", install)
    return calls


def test_help_lists_the_engines():
    output = invoke("--help").output
    assert "horovod" in output and "byteps" in output
    output = invoke("horovod", "--help").output
    assert "--with-mpi" in output and "--with-nccl" in output


def test_an_unknown_engine():
    result = invoke("horovodd")
    assert result.exit_code == 2
    assert "unknown engine 'horovodd'; choose horovod, byteps" in result.output


def test_from_the_cache(asked):
    result = invoke("horovod")
    assert result.exit_code == 0, result.output
    assert asked == [(False, False, False), "install"]
    assert "compiling\ncompiling 25%\n" in result.output
    assert (
        "Horovod 0.28.1 for TensorFlow 2.21.0 installed, from the cache; "
        "with Gloo, MPI" in result.output
    )


def test_byteps(asked):
    result = invoke("byteps", "--with-nccl")
    assert result.exit_code == 0, result.output
    assert asked == [(None, True, False), "install"]
    assert "BytePS 0.28.1" in result.output


def test_options(asked):
    result = invoke("horovod", "--with-mpi", "--with-nccl", "--rebuild")
    assert asked[0] == (True, True, True)
    assert "built in 83 s" in result.output


def test_the_wheel_only(asked, tmp_path):
    folder = tmp_path / "a" / "b"
    result = invoke("horovod", "--wheel-only", str(folder))
    assert asked == [(False, False, False)]
    (wheel,) = folder.iterdir()
    assert Path(result.output.splitlines()[-1].split(" (")[0]) == wheel


def test_what_goes_wrong(monkeypatch):
    def fail(*ignored):
        raise InstallError("no compiler\nget one")

    monkeypatch.setattr(build, "build", fail)
    result = invoke("horovod")
    assert result.exit_code == 1
    assert "keras-towers install horovod: no compiler\nget one" in result.output


@pytest.mark.parametrize("option", [True, False])
def test_folders_that_cannot_be_written_to(monkeypatch, tmp_path, option):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "a")
    monkeypatch.setattr(toolchain, "problems", lambda tools: [])
    monkeypatch.setattr(subprocesses, "run", lambda *a, **b: 1 / 0)
    monkeypatch.setenv("KERAS_TOWERS_CACHE", folder)
    chosen = ["--wheel-only", folder] if option else []
    result = invoke("horovod", *chosen)
    assert result.exit_code == 2
    line = result.output.splitlines()[-1]
    assert f"cannot write to the folder {folder}" in line
    assert "(Not a directory): " in line
    named = "--wheel-only" if option else "KERAS_TOWERS_CACHE"
    assert line.endswith(named)
    assert "Traceback" not in result.output


def test_an_interrupt(monkeypatch):
    def fail(*ignored):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", fail)
    result = invoke("horovod")
    assert result.exit_code == 130
    assert "nothing was installed" in result.output
