"""``keras-towers verify``: what it prints, and its exit codes."""

import json

import keras
import pytest
import tensorflow as tf
from typer.testing import CliRunner

from keras_towers.cli.main import app
from tests.verification import models as m


def safe():
    return m.compiled(m.classifier()), m.FEATURES, m.TARGETS


def unsafe():
    model = m.compiled(m.classifier(keras.layers.BatchNormalization()))
    data = tf.data.Dataset.from_tensor_slices((m.FEATURES, m.TARGETS))
    return model, data.batch(8)


def fails():
    raise ValueError("no data today")


def only_a_model():
    return m.classifier()


def uncompiled():
    return m.classifier(), m.FEATURES, m.TARGETS


def run(target, *options):
    """Verify what a function of this file returns."""
    if not target.startswith("no"):
        target = f"{__name__}:{target}"
    result = CliRunner().invoke(app, ["verify", target, *options])
    return result.exit_code, result.stdout or result.output


def test_safe():
    code, output = run("safe", "--towers", "3", "--batch-size", "9")
    assert code == 0, output
    assert "is safe to split: on 3 towers" in output


def test_unsafe():
    code, output = run("unsafe", "--json")
    told = json.loads(output)
    assert code == 1 and not told["safe"]
    assert told["findings"][0]["kind"] == "batch-norm"
    assert told["verdict"] == "differs"
    assert told["findings"][0]["difference"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "MODULE:FUNCTION"),
        (["no_such_module:build"], "no_such_module"),
        (["missing"], "missing"),
        (["fails"], "ValueError: no data today"),
        (["only_a_model"], "has to return"),
        (["uncompiled"], "not compiled"),
        (["safe", "--towers", "1"], "towers"),
    ],
)
def test_errors(arguments, said):
    code, output = run(*arguments)
    assert code == 2, output
    assert said in output
