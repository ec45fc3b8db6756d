"""A process that a test starts, which has another one do its work.

See ``tests/kit/warm.py``. Nothing here imports more than Python starts with, as
far as possible: what it takes is what a process costs.
"""

import json
import os
import signal
import socket
import sys

# Options of Python that the server can follow.
_OPTIONS = ("-u", "-P")
# What libraries read when they are imported, which the server has done already.
READ_AT_IMPORT = ("KERAS_", "TF_CPP_", "TF_ENABLE_")
NOT_READ = ("KERAS_TOWERS_",)


def read_at_import(environment):
    """Those variables that count only if they are there before imports."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(NOT_READ)
    }


def hand_over(path):
    """Let a child of the server run this process's command, and end as it does.

    Returns where the server cannot run it: Python then goes on as usual.
    """
    arguments = sys.orig_argv[1:]
    while arguments and arguments[0] in _OPTIONS:
        del arguments[0]
    kind = arguments[0] if arguments else "-"
    if kind == "-m" and arguments[1].startswith("keras_towers.cli"):
        # The launcher, which does without TensorFlow; for its ranks.
        os.environ["KERAS_TOWERS_TEST_WARM"] = path
        return
    if kind.startswith("-") and kind not in ("-m", "-c"):
        return
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except OSError:  # It has ended.
        return
    environment = dict(os.environ)
    # The kernel kills the child when the writing end is closed: with us.
    life, held = os.pipe()
    order = {
        "arguments": arguments,
        "unbuffered": "-u" in sys.orig_argv
        or bool(os.environ.get("PYTHONUNBUFFERED")),
        "safe_path": sys.flags.safe_path,
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": environment,
        "read_at_import": read_at_import(environment),
        "ignored": [
            number
            for number in range(1, signal.NSIG)
            if signal.getsignal(number) == signal.SIG_IGN
        ],
    }
    socket.send_fds(server, [b"+"], [0, 1, 2, life])
    os.close(life)
    data = json.dumps(order).encode()
    server.sendall(len(data).to_bytes(8) + data)
    child = int.from_bytes(server.recv(8))
    if not child:  # The variables differ.
        os.close(held)
        server.close()
        return

    def pass_on(number, _):
        try:
            os.kill(child, number)
        except ProcessLookupError:
            return

    for number in set(signal.valid_signals()) - {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD),
        *order["ignored"],
    }:
        signal.signal(number, pass_on)
    status = server.recv(8)
    # The server has gone: so has whoever asked for both.
    code = int.from_bytes(status, signed=True) if status else 1
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
