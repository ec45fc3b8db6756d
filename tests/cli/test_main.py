"""The ``keras-towers`` command itself."""

from typer.testing import CliRunner

from keras_towers.cli.main import app


def test_version_names_the_package():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert "keras " in result.output
