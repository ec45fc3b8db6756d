"""The ``keras-towers`` command itself."""

import runpy
import sys

import pytest
from typer.testing import CliRunner

from keras_towers import __version__
from keras_towers.cli.main import app

pytestmark = pytest.mark.core


def test_version_names_the_package():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    for name in ("keras-towers", "keras", "tensorflow"):
        assert f"\n{name}" in f"\n{result.output}"


def test_the_package_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("keras_towers", run_name="__main__")
    assert not ended.value.code
    assert __version__ in capsys.readouterr().out
