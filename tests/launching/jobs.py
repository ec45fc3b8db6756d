"""Starts the launcher as a user does, and ends it whatever happens."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def last(self) -> str:
        return self.err.strip().splitlines()[-1]


class Launched:
    """A launcher that runs."""

    def __init__(
        self,
        folder: Path,
        arguments: tuple[str, ...],
        stdin: int | None = None,
        **variables,
    ):
        self._begun = time.monotonic()
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        outer = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # No test is to be told what the one that runs the tests was told.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HOROVOD_", "DMLC_", "TF_NUM_", "OMP_"))
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "keras_towers.cli.main", "run", *arguments],
            cwd=folder,
            env={**inherited, **outer, **variables},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def wait_for(self, path: Path, lines: int = 1, limit_s: float = 60) -> str:
        """Wait until a file has so many lines."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if path.exists() and path.read_text().count("\n") >= lines:
                return path.read_text()
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        done = self.finish(1)
        raise AssertionError(f"never happened: {done.out}\n{done.err}")

    def wait_for_text(self, path: Path, text: str, limit_s: float) -> None:
        """Wait until a file has some text in it."""
        until = time.monotonic() + limit_s
        while not (path.exists() and text in path.read_text()):
            gone = self.process.poll() is not None
            if gone or time.monotonic() > until:
                done = self.finish(1)
                raise AssertionError(f"never said: {done.out}\n{done.err}")
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        """All processes below the launcher."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, limit_s: float) -> Done:
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
        return Done(
            self.process.returncode,
            out.decode(),
            err.decode(),
            time.monotonic() - self._begun,
        )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def all_gone(processes: list[psutil.Process], limit_s: float = 10) -> bool:
    """Whether processes have ended; those that have not are ended."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    for process in alive:
        process.kill()
    return not alive
