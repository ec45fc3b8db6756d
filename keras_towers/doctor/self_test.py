"""Two processes train a small model and must match a single process.

Run as a module, this is the script that they run, written for one process:
``python -m keras_towers.doctor.self_test FOLDER`` trains and writes its weights
into the folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from keras_towers import subprocesses
from keras_towers.strategies.registry import STRATEGIES

RANKS = 2
# The last batch is uneven, so that the processes' shares differ.
EXAMPLES, BATCH_SIZE, EPOCHS = 53, 16, 2
# Room for the effect of summation order on float32 weights.
TOLERANCE = 1e-5
# Variables of a job that this may run in, hidden from the self-test's job.
_OTHER_JOBS = (
    *("DMLC_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TF_CONFIG"),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of the self-test; ``output``: of processes that failed."""

    passed: bool
    text: str
    output: str
    seconds: float


def run(strategy: str = "horovod", timeout_s: float = 180) -> Outcome:
    """Train alone and as a job, on the CPU, and compare the weights."""
    start = time.monotonic()

    def outcome(passed: bool, text: str, output: str = "") -> Outcome:
        tail = "\n".join(output.strip().splitlines()[-15:])
        return Outcome(passed, text, tail, time.monotonic() - start)

    with tempfile.TemporaryDirectory(prefix="keras-towers-") as name:
        script = ["-m", __name__, name]
        for what, command in (
            ("one process", [sys.executable, *script]),
            (f"a job of {RANKS} processes", [*_launcher(strategy), *script]),
        ):
            ended = subprocesses.run(command, timeout_s, _environment())
            output = ended.stdout + ended.stderr
            if ended.code is None:
                text = f"{what} did not end in {timeout_s:.0f} s"
                return outcome(False, text, output)
            if ended.code:
                return outcome(False, f"{what} failed", output)
        passed, text = compare(Path(name))
    return outcome(passed, text)


def compare(folder: Path) -> tuple[bool, str]:
    """Return whether the processes' weights match, and a one-line summary."""
    import numpy as np

    def load(name: str) -> list[np.ndarray]:
        with np.load(folder / f"{name}.npz") as saved:
            return [saved[key] for key in sorted(saved)]

    try:
        alone = load("alone")
        ranks = [load(f"rank{rank}") for rank in range(RANKS)]
    except FileNotFoundError as error:
        name = Path(error.filename).stem
        return False, f"{name} wrote no weights: were there {RANKS} ranks?"

    def apart(first: list[np.ndarray], second: list[np.ndarray]) -> float:
        pairs = zip(first, second, strict=True)
        return float(max(np.abs(a - b).max() for a, b in pairs))

    if apart(ranks[0], ranks[1]) > 0:
        difference = apart(ranks[0], ranks[1])
        return False, f"the processes' weights differ by {difference:.1e}"
    difference = apart(alone, ranks[0])
    text = f"largest difference of a weight to one process {difference:.1e}"
    # Written so that NaN fails.
    return bool(difference <= TOLERANCE), text


def _launcher(strategy: str) -> list[str]:
    command = [sys.executable, "-m", "keras_towers.cli.main", "run"]
    tasks = ["-np", str(RANKS)]
    if "ps" in STRATEGIES[strategy].roles:
        tasks = ["--ps", "1", "--workers", str(RANKS)]
    return [*command, *tasks, "--strategy", strategy]


def _environment() -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OTHER_JOBS)
    }
    return {
        **own,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": "tensorflow",
    }


def _train(folder: Path) -> None:
    """Train the model and save its weights under this process's name."""
    import keras
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, 8)).astype("float32")
    y = random.normal(size=(EXAMPLES, 1)).astype("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0)
    model.compile(optimizer, loss="mse")
    model.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    strategy = tf.distribute.get_strategy()
    name = "alone"
    if tf.distribute.has_strategy():
        # Separate processes would get the same weights.
        if strategy.size != RANKS:
            raise SystemExit(f"{strategy.size} ranks instead of {RANKS}")
        name = f"rank{strategy.rank}"
    np.savez(folder / f"{name}.npz", *model.get_weights())


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
