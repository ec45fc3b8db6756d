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
from pathlib import Path

from keras_towers import subprocesses
from keras_towers.doctor.checks import Finding, Status
from keras_towers.meeting.environments import LAUNCHERS
from keras_towers.strategies.registry import STRATEGIES

# The strategies that connect the two processes, by what carries their tensors.
OVER = {
    "TensorFlow": "multi-worker",
    "parameter servers": "sync-replicas",
    "Horovod": "horovod",
}
RANKS = 2
# The last batch is uneven, so that the processes' shares differ.
EXAMPLES, BATCH_SIZE, EPOCHS = 53, 16, 2
# Room for the effect of summation order on float32 weights.
TOLERANCE = 1e-5
# Prefixes of variables of a job that this may run in, hidden from its own.
_OTHER_JOBS = (
    *("DMLC_", "HOROVOD_", "OMPI_", "PMI", "SLURM_", "TF_CONFIG"),
    *filter(None, (launcher.rank_in for launcher in LAUNCHERS)),
)


def run(over: str, timeout_s: float = 180) -> tuple[Finding, str]:
    """Train alone and as a job, on the CPU; also return output of a failure."""
    start = time.monotonic()
    passed, text, output = False, "", ""
    with tempfile.TemporaryDirectory(prefix="keras-towers-") as name:
        script = ["-m", __name__, name]
        for what, command in (
            ("one process", [sys.executable, *script]),
            (f"a job of {RANKS} processes", [*_launcher(OVER[over]), *script]),
        ):
            ended = subprocesses.run(command, timeout_s, environment())
            if ended.code != 0:
                late = f"did not end in {timeout_s:.0f} s"
                text = f"{what} {late if ended.code is None else 'failed'}"
                lines = (ended.stdout + ended.stderr).strip().splitlines()
                output = "\n".join(lines[-15:])
                break
        else:
            passed, text = compare(Path(name))
    seconds = time.monotonic() - start
    advice = "The self-test failed; the output of its processes is above."
    return Finding(
        "Self-test",
        f"over {over}",
        f"{text} ({seconds:.0f} s, on the CPU)",
        Status.OK if passed else Status.BAD,
        "" if passed else advice,
    ), output


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
    # On this machine, also in an allocation of others.
    tasks = ["-np", str(RANKS), "-H", f"localhost:{RANKS}"]
    if "ps" in STRATEGIES[strategy].roles:
        tasks = ["--ps", "1", "--workers", str(RANKS)]
    return [*command, *tasks, "--strategy", strategy]


def environment() -> dict[str, str]:
    """Return this process's variables, without those of a job around it."""
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
    hidden = keras.layers.Dense(16, activation="tanh")
    layers = [keras.layers.Input((8,)), hidden, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0)
    model.compile(optimizer, loss="mse")
    model.fit(x, y, BATCH_SIZE, EPOCHS, shuffle=False, verbose=0)
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
