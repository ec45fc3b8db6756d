"""``keras-towers verify``: what it prints, and its exit codes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

from keras_towers.cli.main import app

pytestmark = pytest.mark.alternate

X = np.random.default_rng(1).random((24, 6), "float32")


def model():
    made = keras.Sequential([keras.layers.Dense(3)])
    made.compile("adam", "mse", jit_compile=False)
    return made


def arrays():
    return model(), X, X[:, :3]


def dataset():
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :3]))
    return model(), data.batch(8)


def other_shapes():
    return model(), X, X[:, :2]


def fails():
    raise ValueError("no data today")


def only_a_model():
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    made.compile("adam", "mse", jit_compile=False)
    return made


def run(target, *options):
    """Verify what a function of this file returns."""
    words = ["verify", f"{__name__}:{target}", *options]
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output


def test_text_says_the_difference_and_describes_the_strategy():
    code, output = run("arrays", "--towers", "3", "--batch-size", "9")
    assert code == 0, output
    assert "After 3 steps the largest relative difference" in output
    assert "TowerStrategy: 3 towers" in output


def test_a_model_without_data_gets_some():
    code, output = run("only_a_model", "--towers", "2", "--batch-size", "6")
    assert code == 0, output
    assert "After 3 steps" in output


@pytest.mark.parametrize(("tolerance", "code"), [("1e-4", 0), ("-1", 1)])
def test_a_difference_above_the_tolerance_exits_with_1(tolerance, code):
    ended, output = run("dataset", "--tolerance", tolerance)
    assert ended == code
    assert "2 towers" in output
    assert ("is larger than --tolerance -1" in output) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fails"], "ValueError: no data today"),
        (["other_shapes"], "cannot be measured: ValueError"),
        (["arrays", "--towers", "0"], "Invalid value for '--towers': '0'"),
    ],
)
def test_what_cannot_be_measured_exits_with_2(arguments, said):
    code, output = run(*arguments)
    assert code == 2, output
    assert said in output
