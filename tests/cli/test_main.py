"""The ``keras-towers`` command itself."""

import runpy
import sys

import pytest
from typer.testing import CliRunner

from keras_towers import __version__
from keras_towers.cli.main import app

pytestmark = pytest.mark.core


def test_the_package_is_the_command_and_names_versions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("keras_towers", run_name="__main__")
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    for name in (f"keras-towers {__version__}", "keras", "tensorflow"):
        assert any(line.startswith(name) for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        "run -np 2 none.py",
        "bench --towers none",
        "bench --json none/a.json",
        "verify none:f",
        "verify breaks:f",
        # What Typer refuses.
        "run",
        "run -np 0 none.py",
        "run -np",
        "bench --repeats none",
        "doctor none",
        "install horovod --none",
    ],
)
def test_errors_begin_with_the_command(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "breaks.py").write_text("[][0]")
    ended = CliRunner().invoke(app, words.split())
    command = words.split()[0]
    assert ended.exit_code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"keras-towers {command}")
    assert ": " in line.removeprefix(f"keras-towers {command}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("runn", "keras-towers: unknown command 'runn'; choose bench, doctor,"),
        (
            "install m",
            "-towers install: unknown engine 'm'; choose byteps or horovod",
        ),
    ],
)
def test_unknown_commands_and_engines_list_the_known_ones(words, says):
    ended = CliRunner().invoke(app, words.split())
    assert ended.exit_code == 2 and says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("", "COMMAND [ARGS]..."),
        ("run", "SCRIPT [ARGUMENTS]..."),
        ("verify", "MODULE:FUNCTION"),
        ("install", "ENGINE"),
        ("bench", ""),
        ("doctor", ""),
    ],
)
def test_help_shows_what_to_write(command, usage):
    said = CliRunner().invoke(app, [*command.split(), "--help"])
    first = said.output.splitlines()[0]
    words = ["Usage: keras-towers", command, "[OPTIONS]", usage]
    assert first == " ".join(filter(None, words))
    # Sentences of the overview are whole.
    assert command or "..." not in said.output.removeprefix(first)
