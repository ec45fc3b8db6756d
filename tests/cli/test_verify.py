"""``keras-towers verify``: what it prints, and its exit codes."""

import json

import pytest
from typer.testing import CliRunner

from keras_towers.cli.main import app

HOME = "tests.cli.to_verify"


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *arguments])


def test_safe():
    result = run(f"{HOME}:safe", "--towers", "3", "--batch-size", "9")
    assert result.exit_code == 0, result.output
    assert "is safe to split: on 3 towers" in result.output


def test_unsafe():
    result = run(f"{HOME}:unsafe")
    assert result.exit_code == 1, result.output
    assert "NOT safe" in result.output
    assert "batch_norm" in result.output


def test_json():
    result = run(f"{HOME}:unsafe", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert not told["safe"]
    assert told["findings"][0]["kind"] == "batch-norm"
    assert told["findings"][0]["difference"] > 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "MODULE:FUNCTION"),
        ("no_such_module:build", "no_such_module"),
        (f"{HOME}:missing", "missing"),
        (f"{HOME}:fails", "ValueError: no data today"),
        (f"{HOME}:only_a_model", "has to return"),
        (f"{HOME}:uncompiled", "not compiled"),
    ],
)
def test_errors(target, said):
    result = run(target)
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_too_few_towers():
    assert run(f"{HOME}:safe", "--towers", "1").exit_code == 2
