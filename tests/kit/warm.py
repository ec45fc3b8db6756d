"""Processes that begin with TensorFlow, Keras and all strategies imported.

Importing them takes most of what a test's process costs. A server imports them
once, turns off what costs more than it shows in a test, and forks for each
process that asks: the real one, as its launcher knows it, waits
(``tests/kit/lean/warm_client.py``), passes signals on, and ends as the child
does; the child ends when the real one is killed.

What differs from a process of one's own: the tree of processes, a hash seed and
addresses that are the same in all of them, and that SIGSTOP stops only the real
one. Tests of these things, and one case of each engine and launcher, start
processes without.
"""

import atexit
import fcntl
import json
import os
import pathlib
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings

VARIABLE = "KERAS_TOWERS_TEST_WARM"
# Set to 0 by who wants every process to import for itself.
SWITCH = "KERAS_TOWERS_TEST_FORKS"
# As no test has changed it.
_ENVIRONMENT = dict(os.environ)
_LEAN = pathlib.Path(__file__).with_name("lean")
_ROOT = pathlib.Path(__file__).parents[2]


def environment(warm: bool = True) -> dict[str, str]:
    """The variables with which processes begin with TensorFlow imported."""
    global server
    if not warm or os.environ.get(SWITCH) == "0":
        return {}
    from tests.kit.lean.warm_client import read_at_import

    left, known = map(read_at_import, (dict(os.environ), _ENVIRONMENT))
    assert left == known, f"a test has left {left} in place of {known}"
    if server is not None and server.process.poll() is not None:
        # An error in the test that met it; the next ones have a new server.
        warnings.warn(
            f"The server of tests/kit/warm.py has ended: {server.said()}",
            stacklevel=2,
        )
        server = None
    server = server or Server()
    return {VARIABLE: server.path}


class Server:
    """A process that runs ``main`` until this one ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="keras-towers-warm-")
        self.path = os.path.join(self._folder.name, "socket")
        self._output = os.path.join(self._folder.name, "output")
        with (
            socket.socket(socket.AF_UNIX) as listener,
            open(self._output, "wb") as output,
        ):
            listener.bind(self.path)
            listener.listen(64)
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={
                    **_ENVIRONMENT,
                    "PYTHONPATH": f"{_LEAN}{os.pathsep}{_ROOT}",
                    "PYTEST_CURRENT_TEST": "a server for many",
                },
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        atexit.register(self._end)

    def said(self) -> str:
        """What it has printed: why it did not fork, or why it ended."""
        with open(self._output) as file:
            return file.read()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()


server: Server | None = None


def main() -> None:
    """Serve until stdin closes; in a child, run what it is to run."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    # Not as tests.kit.lean: it is a module of every process that tests start.
    from warm_client import read_at_import

    known = read_at_import(dict(os.environ))
    from keras_towers import strategies
    from tests.kit import untuned

    for name in strategies.STRATEGIES:
        strategies.find(name).load()
    untuned.search_no_more()
    untuned.leave_untuned()
    ready = selectors.DefaultSelector()
    ready.register(0, selectors.EVENT_READ)
    ready.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj == 0:
                os._exit(0)
            elif key.fileobj is listener:
                asking, _ = listener.accept()
                order, descriptors = _order(asking)
                if order is None or not _can_become(order, known):
                    _answer(asking, 0)
                elif child := os.fork():
                    _answer(asking, child)
                    ended = os.pidfd_open(child)
                    ready.register(ended, selectors.EVENT_READ, (child, asking))
                    asking = None
                else:
                    asking.detach()
                    listener.detach()
                    ready.close()
                    _become(order, descriptors)
                    return
                for descriptor in descriptors:
                    os.close(descriptor)
                if asking is not None:
                    asking.close()
            else:
                ready.unregister(key.fd)
                os.close(key.fd)
                child, asking = key.data
                status = os.waitpid(child, 0)[1]
                _answer(asking, os.waitstatus_to_exitcode(status))
                asking.close()


def _can_become(order: dict, known: dict[str, str]) -> bool:
    asked = order["read_at_import"]
    if asked != known:
        # Into the file that is read where forks were expected.
        print(f"not forked: {asked}, imported with {known}", flush=True)
    return asked == known


def _order(asking: socket.socket) -> tuple[dict | None, list[int]]:
    try:
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 4)
        file = asking.makefile("rb")
        size = int.from_bytes(file.read(8))
        return json.loads(file.read(size)), descriptors
    except (OSError, ValueError):  # It was killed meanwhile.
        return None, []


def _answer(asking: socket.socket, number: int) -> None:
    try:
        asking.sendall(number.to_bytes(8, signed=True))
    except OSError:  # It was killed meanwhile; its child is, too.
        return


def _become(order: dict, descriptors: list[int]) -> None:
    """Make this process what one with this command would be; run it."""
    os.setsid()
    *streams, life = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(life, fcntl.F_GETFL)
    fcntl.fcntl(life, fcntl.F_SETFL, flags | os.O_ASYNC)
    os.set_blocking(life, False)
    try:
        os.read(life, 1)
        os.kill(os.getpid(), signal.SIGKILL)  # It was closed before.
    except BlockingIOError:
        pass
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in order["ignored"]
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if signal.SIGINT not in order["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.stdout.reconfigure(write_through=order["unbuffered"])
    sys.path[:] = order["path"]
    import numpy as np

    np.random.seed()
    sys.excepthook = _without_these_frames
    kind, *rest = order["arguments"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    first = "" if kind == "-c" else os.getcwd()
    if kind in ("-m", "-c"):
        sys.argv = [kind, *rest[1:]]
    else:
        sys.argv = [kind, *rest]
        first = os.path.dirname(os.path.realpath(kind))
    if not order["safe_path"]:
        sys.path.insert(0, first)
    if kind == "-m":
        runpy._run_module_as_main(rest[0])
    elif kind == "-c":
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        main.__file__ = kind
        source = pathlib.Path(kind).read_bytes()
        exec(compile(source, kind, "exec"), vars(main))


def _without_these_frames(kind, error, trace) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
