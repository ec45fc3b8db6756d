"""The ``keras-towers`` command itself."""

import runpy
import sys

import pytest

from keras_towers import __version__

pytestmark = pytest.mark.core


def test_the_package_is_the_command_and_names_versions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("keras_towers", run_name="__main__")
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    for name in (f"keras-towers {__version__}", "keras", "tensorflow"):
        assert any(line.startswith(name) for line in lines)
