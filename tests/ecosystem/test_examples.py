"""The examples that need other packages run."""

import re
import runpy

import pytest

from tests.kit.scripts import ROOT

EXAMPLES = ROOT / "examples"


def run(name):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_keras_hub(capsys):
    pytest.importorskip(
        "keras_hub", reason="KerasHub is not installed: make test-ecosystem"
    )
    run("keras_hub_bert")
    difference = re.search(r"to one device: (\S+)", capsys.readouterr().out)
    assert float(difference[1]) < 1e-5


def test_mlflow_and_keras_tuner(tmp_path, monkeypatch, capsys):
    # Files in place of a database.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    for name in ("keras_tuner", "mlflow"):
        pytest.importorskip(
            name, reason=f"{name} is not installed: make test-ecosystem"
        )
    monkeypatch.chdir(tmp_path)
    try:
        run("mlflow_keras_tuner")
    finally:
        import mlflow

        mlflow.tensorflow.autolog(disable=True)
    out = capsys.readouterr().out
    assert "best: " in out
    assert len(re.findall(r"units: \d", out)) == 3
