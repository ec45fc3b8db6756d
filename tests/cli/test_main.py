"""The ``keras-towers`` command itself."""

import re
import runpy
import sys

import pytest
import typer
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
        "plan none:f --towers 2",
        "install m",
    ],
)
def test_errors_are_one_line_that_names_the_command(
    words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "breaks.py").write_text("[][0]")
    ended = CliRunner().invoke(app, words.split())
    assert ended.exit_code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"keras-towers {words.split()[0]}: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nope.py", "'nope.py' is neither a script nor one of the commands be"),
        ("folder", "script not found: folder"),
        ("-m", "-m needs the name of a module"),
        ("-m none.inner", "no module named 'none.inner'"),
        ("half.py", "half.py, line 2: '(' was never closed: print("),
    ],
)
def test_what_the_package_cannot_run(
    words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "half.py").write_text("print('never')\nprint(")
    monkeypatch.setattr(sys, "argv", ["__main__.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("keras_towers", run_name="__main__")
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith(f"python -m keras_towers: {said}")
    assert not output.out


def test_the_command_names_what_runs_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    ended = CliRunner().invoke(app, ["train.py", "-np", "2"])
    assert ended.exit_code == 2
    (line,) = ended.stderr.splitlines()
    assert "`keras-towers run train.py`" in line
    assert "`python -m keras_towers train.py`" in line


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_explained_and_no_other(name):
    said = {p.name: p.help for p in COMMANDS[name].params if p.name != "help"}
    assert all(said.values()), said
    documented = re.findall(
        r"^ {8}(\w+): ", COMMANDS[name].callback.__doc__, re.MULTILINE
    )
    assert set(documented) <= set(said)
    assert "Args:" not in COMMANDS[name].help


@pytest.mark.parametrize(
    "command", ["", "run", "verify", "install", "bench", "doctor", "plan"]
)
def test_help_shows_what_to_write(command):
    words = [*command.split(), "--help"]
    said = CliRunner().invoke(app, words, terminal_width=78)
    first, *rest = said.output.splitlines()
    assert first.startswith(f"Usage: keras-towers {command}".strip())
    assert command or "--install-completion" in said.output
    # Sentences of the overview are whole, in a terminal of 80 columns.
    assert command or "..." not in "".join(rest)


@pytest.mark.parametrize(
    ("words", "offered"),
    [("doc", ["doctor"]), ("run --strategy mult", ["multi-worker"])],
)
def test_words_are_completed(words, offered):
    ended = CliRunner().invoke(
        app,
        env={
            "_KERAS_TOWERS_COMPLETE": "complete_bash",
            "COMP_WORDS": f"keras-towers {words}",
            "COMP_CWORD": str(len(words.split())),
        },
        prog_name="keras-towers",
    )
    assert ended.stdout.split() == offered
