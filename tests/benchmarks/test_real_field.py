"""``python -m benchmarks field`` and the processes that it starts."""

import json
import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.kit import warm

# What it plans, counts and draws is shown with processes that only say so.
pytestmark = [pytest.mark.long, pytest.mark.slow]
MINE = """
import keras

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
"""


def test_rows_that_train_the_same_count(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    path = tmp_path / "field.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "field", "--towers", "2"),
            *("--models", "mine:build", "--strategies", "tower,stock-loop"),
            *("--device", "cpu", "--steps", "5", "--timeout", "150"),
            *("--json", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **warm.environment(), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    losses = {
        sample["cell"]["row"]: sample["result"]["losses"]
        for sample in document["samples"]
    }
    rows = ["plain", "plain-frozen", "compute", "tower", "stock-loop"]
    assert sorted(losses) == sorted(rows)
    assert losses["plain"][0] > losses["plain"][-1]
    assert losses["tower"] == pytest.approx(losses["plain"], rel=1e-4)
    # What exchanges nothing would not count.
    assert losses["compute"] != pytest.approx(losses["plain"], rel=1e-3)
    for result in document["results"]:
        assert not result["reason"]
        assert result["examples_per_s"]["median"] > 0
