"""The ``keras-towers`` command itself."""

import pytest
from typer.testing import CliRunner

from keras_towers.cli.main import app

pytestmark = pytest.mark.core


def test_version_names_the_package():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    for name in ("keras-towers", "keras", "tensorflow"):
        assert f"\n{name}" in f"\n{result.output}"
