"""Two processes train a small model, and must end like one process.

Run as a module this is one of the processes: ``python -m
keras_towers.doctor.self_test FOLDER [--alone]`` trains and writes its weights
into the folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

RANKS = 2
# The last batch is uneven, so that the processes' shares differ.
EXAMPLES, BATCH_SIZE, EPOCHS = 53, 16, 2
# What the order of float32 additions may make of a weight.
TOLERANCE = 1e-5
_GRACE_S = 10
# A job of its own: nothing of a job that this may run in.
_OTHER_JOBS = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


@dataclass(frozen=True)
class Outcome:
    """How the self-test went.

    Attributes:
        passed: whether the job ran and its weights are right.
        text: one line about it.
        output: the end of what the processes said, if it failed.
        seconds: how long it took.
    """

    passed: bool
    text: str
    output: str
    seconds: float


def run(timeout_s: float = 180) -> Outcome:
    """Train alone and as a job, on the CPU, and compare the weights.

    Args:
        timeout_s: for each of the two; what still runs then is killed.
    """
    start = time.monotonic()

    def outcome(passed: bool, text: str, output: str = "") -> Outcome:
        tail = "\n".join(output.strip().splitlines()[-15:])
        return Outcome(passed, text, tail, time.monotonic() - start)

    with tempfile.TemporaryDirectory(prefix="keras-towers-") as name:
        folder = Path(name)
        worker = [sys.executable, "-m", __name__, str(folder)]
        for what, command in (
            ("one process", [*worker, "--alone"]),
            (f"a job of {RANKS} processes", [*_launcher(), *worker]),
        ):
            status, output = _run(command, folder, timeout_s)
            if status is None:
                text = f"{what} did not end in {timeout_s:.0f} s"
                return outcome(False, text, output)
            if status:
                return outcome(False, f"{what} failed", output)
        passed, text = compare(folder)
    return outcome(passed, text)


def compare(folder: Path) -> tuple[bool, str]:
    """Compare what the processes wrote.

    Returns:
        Whether it is right, and a line that says how right.
    """
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
    # So that not a number, too, is no success.
    return bool(difference <= TOLERANCE), text


def _launcher() -> list[str]:
    command = [sys.executable, "-m", "horovod.runner.launch"]
    command += ["-np", str(RANKS), "--gloo", "-H", f"localhost:{RANKS}"]
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in names if name.startswith("lo")), None)
    if loopback:
        command += ["--network-interface", loopback]
    return command


def _run(
    command: list[str], folder: Path, timeout_s: float
) -> tuple[int | None, str]:
    """Run a command; its status, None if it took too long, and its output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OTHER_JOBS)
    }
    environment.update(
        CUDA_VISIBLE_DEVICES="-1",
        TF_CPP_MIN_LOG_LEVEL="3",
        KERAS_BACKEND="tensorflow",
        KERAS_TOWERS_SELF_TEST_TIMEOUT=str(timeout_s),
    )
    with (folder / "output.txt").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        return status, output.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _train(folder: Path, alone: bool) -> None:
    """Train the model and save its weights under this process's name."""
    import keras
    import numpy as np

    import keras_towers as kt

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

    def fit() -> None:
        model.fit(
            x,
            y,
            batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
        )

    if alone:
        name = "alone"
        fit()
    else:
        strategy = kt.HorovodStrategy()
        if strategy.size != RANKS:
            raise SystemExit(f"{strategy.size} ranks instead of {RANKS}")
        with strategy:
            fit()
        name = f"rank{strategy.rank}"
    np.savez(folder / f"{name}.npz", *model.get_weights())


if __name__ == "__main__":
    # Should the launcher be killed, this must not stay for ever.
    _limit_s = float(os.environ.get("KERAS_TOWERS_SELF_TEST_TIMEOUT", "180"))
    faulthandler.dump_traceback_later(_limit_s, exit=True)
    _train(Path(sys.argv[1]), alone="--alone" in sys.argv)
