"""Runs one process of a job on its host, and ends all of its descendants.

It runs standalone, as ``python -I -S agent.py``, and reads its order, a line of
JSON, from stdin. Further lines are numbers of signals to forward to the
process; 0 is a heartbeat.

The agent ends the command, and all processes that the command started, when
stdin closes, because the launcher stops the job or has died, when heartbeats
stop, or when the command has been stopped for long. It imports little, because
each rank has an agent, and only the standard library, because other packages
may need the environment in the order.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFADDR = 0x8915
# The state of a process that a signal has stopped.
_STOPPED = b"T"
_BEATS_STOPPED = 6
# Loaded before any fork, when the loader's lock must not be held.
_LIBC = ctypes.CDLL(None)
CANNOT_START = 126
FROZEN = 128 + signal.SIGSTOP
"""The exit code if the command was stopped for so long that it is lost."""
ANSWER = b"\0"
"""Written to stdout before the command starts: the login has succeeded."""


def main() -> int:
    """Execute the order read from stdin."""
    order = json.loads(_read_line())
    if order["answers"]:
        os.write(1, ANSWER)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        environment = {**os.environ, **order["environment"]}
        set_up_host(environment, order["rendezvous"], order["local_size"])
        child = subprocess.Popen(
            order["command"],
            cwd=order["folder"],
            env=environment,
            stdin=next(iter(order["read_from"]), subprocess.DEVNULL),
            start_new_session=True,
            # If the agent is killed, the kernel kills the child.
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        # Hosts that join an elastic job were not checked beforehand.
        why = f"cannot start: {error}"
        if not os.path.isdir(order["folder"]):
            why = (
                f"host {socket.gethostname()} has no folder "
                f"{order['folder']}: ranks run in the launcher's working "
                "folder, so all hosts need it"
            )
        print(why, file=sys.stderr, flush=True)
        return CANNOT_START
    grace_s = order["grace_s"]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # Cluster managers send these to all processes of a job.
        signal.signal(number, lambda n, _: child.send_signal(n))
    frozen = threading.Event()
    for task, more in ((_follow, ()), (_end_frozen, (frozen,))):
        thread = threading.Thread(
            target=task, args=(order, child, *more), daemon=True
        )
        thread.start()
    code = child.wait()
    _end_all(grace_s)
    _reap()
    if frozen.is_set():
        return FROZEN
    return code if code >= 0 else 128 - code


def set_up_host(
    environment: dict[str, str], rendezvous: str, local_size: int
) -> None:
    """Set a rank's share of the cores of its host, and its network interface.

    By default TensorFlow uses all cores in every process, which oversubscribes
    them.

    Args:
        environment: the variables of a rank; any that are set are kept.
        rendezvous: the address on the route to the other ranks.
        local_size: how many ranks share the cores.
    """
    if local_size > 1:
        share = str(max(1, len(os.sched_getaffinity(0)) // local_size))
        environment.setdefault("TF_NUM_INTRAOP_THREADS", share)
        environment.setdefault("OMP_NUM_THREADS", share)
    if "HOROVOD_GLOO_IFACE" not in environment:
        name = interface_towards(rendezvous)
        environment["HOROVOD_GLOO_IFACE"] = name
        environment.setdefault("NCCL_SOCKET_IFNAME", name)


def source_address(address: str) -> str:
    """Return the address of this machine on the route to another address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing, it only looks up a route.
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def interface_towards(address: str) -> str:
    """Return the name of the network interface with a route to ``address``."""
    source = source_address(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # An interface without an IPv4 address.
                continue
            if socket.inet_ntoa(answer[20:24]) == source:
                return name
    raise OSError(f"no network interface has a route to {address}")


def _read_line() -> bytes:
    # Unbuffered: a thread blocked in sys.stdin would hang at exit. Byte by
    # byte: a signal's number may follow at once.
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(CANNOT_START)
        line += byte
    return bytes(line)


def _follow(order: dict, child: subprocess.Popen) -> None:
    """Forward signals from stdin; end all processes with the launcher."""
    # Nothing is printed: the launcher, which would show it, is gone.
    line = b""
    while select.select([0], [], [], order["lost_s"])[0]:
        data = os.read(0, 65536)
        if not data:
            break
        *lines, line = (line + data).split(b"\n")
        for number in lines:
            child.send_signal(int(number))
    _end_all(order["grace_s"])


def _end_frozen(
    order: dict, child: subprocess.Popen, frozen: threading.Event
) -> None:
    """End all processes when the command has been stopped for too long."""
    stop, beats = StopDetector(child.pid), 0
    # Counted, not timed: a machine may have suspended this process as well.
    while beats < _BEATS_STOPPED:
        time.sleep(order["frozen_s"] / _BEATS_STOPPED)
        beats = beats + 1 if stop.is_stopped() else 0
    frozen.set()
    _end_all(order["grace_s"])


class StopDetector:
    """Detects that a signal, not a debugger, has stopped a process.

    A process may run between two looks, and be stopped at both; but then it has
    used CPU time.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._cpu_ns: int | None = None

    def is_stopped(self) -> bool:
        """Whether it is stopped, and has been since the last call."""
        before, self._cpu_ns = self._cpu_ns, _cpu_time_ns(self._pid)
        has_run = self._cpu_ns != before
        return not has_run and _state_and_parent(self._pid)[0] == _STOPPED


def _cpu_time_ns(pid: int) -> int | None:
    """Return the CPU time of all threads of a process; None if it has ended."""
    clock = ctypes.c_int()
    if _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        return None
    try:
        return time.clock_gettime_ns(clock.value)
    except OSError:
        return None


def _end_all(grace_s: float) -> None:
    """End all descendants, by SIGTERM and, after a grace period, SIGKILL."""
    if not _descendants():
        return
    _signal_all(signal.SIGTERM)
    until = time.monotonic() + grace_s
    while time.monotonic() < until:
        if not _descendants():
            return
        time.sleep(0.02)
    # Repeat: a process may start another while it is being killed.
    for _ in range(100):
        _signal_all(signal.SIGKILL)
        time.sleep(0.02)
        if not _descendants():
            return


def _reap() -> None:
    """Reap adopted processes, which would otherwise stay zombies."""
    # In a container without an init process, no other process does it.
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _signal_all(number: int) -> None:
    for pid in _descendants():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _state_and_parent(pid: int | str) -> tuple[bytes, int]:
    """Return a process's state and parent; no state if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain spaces and parentheses.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return b"", 0
    return state, int(parent)


def _descendants() -> list[int]:
    """Return the descendants of this process, without zombies.

    Orphans are found, too: Linux reparents them to the nearest subreaper, which
    is this process.
    """
    children: dict[int, list[int]] = {}
    states = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            states[int(name)], parent = _state_and_parent(name)
            children.setdefault(parent, []).append(int(name))
    descendants: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        todo += below
        descendants += below
    ended = (b"", b"Z", b"X")
    return [pid for pid in descendants if states[pid] not in ended]


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    status: int = main()
    sys.stderr.flush()
    os._exit(status)  # The thread blocked on stdin would delay a normal exit.
