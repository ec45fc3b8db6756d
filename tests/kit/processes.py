"""Processes that a test starts, and ends whatever happens."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from keras_towers.jobs.rendezvous import tf_config
from keras_towers.jobs.rendezvous.tf_config import Cluster
from tests.kit.clusters import local_cluster
from tests.kit.scripts import inherited

# For what imports TensorFlow on a machine that does much else.
LIMIT_S = 120


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


class Process:
    """A process that writes its output to files, which a test can read.

    Args:
        command: its words.
        folder: where it runs; None: where this process does.
        stdin: what it can read.
        popen: starts it, with the arguments of ``subprocess.Popen``.
        **variables: of its environment.
    """

    def __init__(
        self,
        command: tuple[Any, ...],
        folder: Path | None = None,
        stdin: str = "",
        popen: Callable[..., Any] = subprocess.Popen,
        **variables: str,
    ):
        self._written = tempfile.TemporaryDirectory()
        with contextlib.ExitStack() as files:
            out, err = (
                files.enter_context(self._file(name).open("wb"))
                for name in ("out", "err")
            )
            self._file("in").write_text(stdin)
            self.process = popen(
                [str(word) for word in command],
                cwd=folder,
                env={**inherited(), **variables},
                stdin=files.enter_context(self._file("in").open("rb")),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _file(self, name: str) -> Path:
        return Path(self._written.name) / name

    @property
    def code(self) -> int | None:
        """The exit code; None where it runs."""
        return self.process.poll()

    @property
    def out(self) -> str:
        return self._file("out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._file("err").read_text(errors="replace")

    @property
    def output(self) -> str:
        """All that it has written so far, the errors at the end."""
        return self.out + self.err

    @property
    def last(self) -> str:
        """The last line of its errors."""
        return self.err.strip().splitlines()[-1]

    def wait_for(
        self,
        text: str,
        path: Path | None = None,
        times: int = 1,
        limit_s: float = LIMIT_S,
    ) -> str:
        """Wait until a text is there so often; return all that is there.

        Args:
            text: the text.
            path: the file that is to have it; None: the output.
            times: how often.
            limit_s: seconds to wait.
        """

        def written() -> str:
            if path is None:
                return self.output
            return path.read_text() if path.exists() else ""

        wait_until(
            lambda: written().count(text) >= times or self.code is not None,
            limit_s,
        )
        # It may have written it before it ended.
        found = written()
        if found.count(text) < times:
            self.kill_all()
            raise AssertionError(f"no {text!r}: {self.code}\n{self.output}")
        return found

    def family(self) -> list[psutil.Process]:
        """All processes below it."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, limit_s: float = LIMIT_S) -> "Process":
        """Wait for its end; end it and all below it if that does not come."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            with self._file("err").open("a") as err:
                err.write("\nTHE TEST HAS ENDED IT\n")
        return self

    def kill(self) -> None:
        """Kill the process itself, if it runs."""
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        """Kill it and all below it."""
        family = self.family() if self.code is None else []
        self.kill()
        all_gone(family, limit_s=0)


RUN = (sys.executable, "-m", "keras_towers.cli.main", "run")


class Launched(Process):
    """``keras-towers run``.

    Args:
        folder: where it runs.
        *arguments: of the command.
        **options: as of a ``Process``.
    """

    def __init__(self, folder: Path, *arguments: Any, **options: Any):
        # Horovod looks for work each millisecond, all the time.
        options = {"HOROVOD_CYCLE_TIME": "5", **options}
        super().__init__((*RUN, *arguments), folder, **options)


class Tasks(contextlib.ExitStack):
    """Processes that no launcher of this package starts; they end with it.

    Args:
        folder: for their scripts.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self._started: list[Process] = []

    def cluster(self, **sizes: int) -> list[Cluster]:
        """A cluster as each of its tasks sees it; its ports are held."""
        return self.enter_context(local_cluster(sizes))

    def start(self, cluster: Cluster, script: str) -> Process:
        """Start a script as a task of a cluster, as the task sees it."""
        path = self._folder / f"script-{len(self._started)}.py"
        path.write_text(script)
        variables = {tf_config.VARIABLE: cluster.to_json()}
        return self.run(sys.executable, "-u", path, **variables)

    def run(self, *command: Any, **options: Any) -> Process:
        """Start a command; the options are those of ``Process``."""
        task = Process(command, **options)
        self.callback(task.kill_all)
        self._started.append(task)
        return task

    def finish(self, limit_s: float = LIMIT_S) -> None:
        """Wait until all have ended well, for so many seconds each."""
        for task in self._started:
            assert task.finish(limit_s).code == 0, task.output
