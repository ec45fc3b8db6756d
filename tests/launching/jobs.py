"""Starts the launcher as a user does, and ends it whatever happens."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.kit.scripts import inherited

# For what imports TensorFlow on a machine that does much else.
LIMIT_S = 120


def variables(text: str) -> dict[str, str]:
    """Variables of the environment, as a shell would set them."""
    return dict(word.split("=", 1) for word in text.split())


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.strip().splitlines()[-1]


class Launched:
    """A launcher that runs.

    Args:
        folder: where it runs.
        arguments: of ``keras-towers run``.
        stdin: of the launcher.
        **variables: of the environment.
    """

    def __init__(
        self,
        folder: Path,
        arguments: tuple[str, ...],
        stdin: int | None = None,
        **variables,
    ):
        # Horovod looks for work each millisecond, all the time.
        outer = {"HOROVOD_CYCLE_TIME": "5"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keras_towers.cli.main", "run", *arguments],
            cwd=folder,
            env={**inherited(), **outer, **variables},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def wait_for(self, path: Path, text: str = "\n", times: int = 1) -> str:
        """Wait until a file has some text in it so often; return all of it."""

        def written() -> bool:
            return path.exists() and path.read_text().count(text) >= times

        wait_until(lambda: written() or self.process.poll() is not None)
        # It may have written it before it ended.
        if not written():
            done = self.finish(1)
            raise AssertionError(f"never happened: {done.out}\n{done.err}")
        return path.read_text()

    def family(self) -> list[psutil.Process]:
        """All processes below the launcher."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, limit_s: float = LIMIT_S) -> Done:
        """Wait for the end; end everything if it does not come."""
        family = self.family() if self.process.poll() is None else []
        try:
            out, err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            family += self.family()
            self.process.kill()
            for process in family:
                if process.is_running():
                    process.kill()
            out, err = self.process.communicate(timeout=20)
            err += b"\nTHE LAUNCHER DID NOT END\n"
        return Done(self.process.returncode, out.decode(), err.decode())

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def wait_until(happened: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    """Wait until something has happened; whether it has."""
    until = time.monotonic() + limit_s
    while not (found := happened()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def all_gone(processes: list[psutil.Process], limit_s: float = 60) -> bool:
    """Whether processes have ended; those that have not are ended."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    for process in alive:
        process.kill()
    return not alive
