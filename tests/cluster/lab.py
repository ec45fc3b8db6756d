"""Several hosts on one machine, to test jobs on: a network that can be cut.

A host is a set of Linux namespaces: it has processes, a host name, ``/tmp``,
``/dev/shm``, a home and, where this machine has it, an ``sshd`` of its own. A
bridge joins the hosts. All of it ends with the block, whatever happens in it:

    with Lab(2) as lab:
        one, two = lab.hosts
        job = Process(("ssh", "host2", "hostname"), popen=one.start)
        two.cut()
        assert job.finish(90).code != 0
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from tests.kit.processes import wait_until

REPOSITORY = pathlib.Path(__file__).parents[2]
INIT = pathlib.Path(__file__).with_name("host.sh")
NETWORK = "10.77.0"
BRIDGE = "br0"
READY_S = 20
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")

SSHD = """\
HostKey /etc/ssh/host_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
AuthorizedKeysFile .ssh/authorized_keys
"""


def why_not(ssh: bool = False) -> str | None:
    """The reason that there can be no such lab here; None if there is none.

    Args:
        ssh: hosts shall have an ``sshd``.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts of their own need Linux, and root"
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"hosts of their own need {tool} (iproute2, util-linux)"
    if ssh and _sshd() is None:
        return "hosts with ssh need sshd (openssh-server)"
    alone = ["unshare", *NAMESPACES, "--fork", "sh", "-c"]
    needed = (
        "mount -t tmpfs lab /tmp",
        "ip link add br0 type bridge",
        "ip link add p0 type veth peer name p1",
    )
    if _run([*alone, " && ".join(needed)]).returncode:
        return "this machine does not let root make hosts of their own"
    return None


class Host:
    """One host of a lab.

    Attributes:
        name: ``host1``, ``host2``, ...; every host finds the others by it.
        address: its address in the lab's network.
    """

    def __init__(self, lab: "Lab", number: int):
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number}"
        self._lab = lab
        self._port = f"p{number}"
        self._state = lab.folder / self.name
        self._started: list[subprocess.Popen[Any]] = []
        self._init: subprocess.Popen[Any] | None = None

    def start(
        self, command: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a command there; it ends with the lab.

        Args:
            command: its words.
            env: the environment, in which the host's own values are put.
            **options: of ``subprocess.Popen``.
        """
        process = subprocess.Popen(
            [*self._enter("--mount", "--uts", "--ipc", "--pid"), *command],
            env={**env, **_environment()},
            **options,
        )
        self._started.append(process)
        return process

    def cut(self) -> None:
        """Let all that is sent to and from it vanish, with no sign of it."""
        self._lab.switch("ip", "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Undo ``cut``."""
        self._lab.switch("ip", "link", "set", self._port, "master", BRIDGE)

    def cut_from(self, other: "Host") -> None:
        """Let what the two hosts send each other vanish, and nothing else."""
        nowhere = "02:00:00:00:00:99"
        for one, two in ((self, other), (other, self)):
            entry = f"{two.address} lladdr {nowhere} dev eth0 nud permanent"
            _check([*one._enter(), "ip", "neigh", "replace", *entry.split()])

    def hang(self) -> None:
        """Stop all its processes; they stay, as does its network."""
        for process in self._processes():
            with contextlib.suppress(OSError):
                os.kill(int(process.name), signal.SIGSTOP)

    def commands(self) -> Iterator[str]:
        """The programs that run there."""
        for process in self._processes():
            with contextlib.suppress(OSError):
                program, *_ = (process / "cmdline").read_text().split("\0")
                yield pathlib.Path(program).name

    def _processes(self) -> Iterator[pathlib.Path]:
        own = os.readlink(f"/proc/{self.first_process()}/ns/pid")
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns/pid") == own:
                    yield process

    def _begin(self) -> None:
        assert self._init is None
        self._init = subprocess.Popen(
            [
                "unshare",
                *(*NAMESPACES, "--fork", "--kill-child"),
                "bash",
                str(INIT),
                self.name,
                f"{self.address}/24",
                str(self._state),
                str(self._lab.shared),
                *_kept(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._lab.log,
            stderr=self._lab.log,
            start_new_session=True,
        )
        pid = str(self.first_process())
        pair = f"{self._port} type veth peer name eth0 netns {pid}"
        self._lab.switch("ip", "link", "add", *pair.split())
        self._lab.switch("ip", "link", "set", self._port, "up")
        self.heal()

    def first_process(self) -> int:
        """The process that has the host's namespaces, by our numbers."""
        assert self._init is not None
        return _child(self._init)

    def _enter(self, *namespaces: str) -> list[str]:
        pid = str(self.first_process())
        return ["nsenter", "--target", pid, "--net", *namespaces, "--"]

    def _end(self) -> None:
        for process in (self._init, *self._started):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


class Lab:
    """Hosts that are there within a block.

    Args:
        hosts: how many.
        ssh: let every host's user log in to every other.

    Attributes:
        hosts: of class ``Host``.
        shared: a folder that all hosts have, and this machine.
    """

    def __init__(self, hosts: int, ssh: bool = False):
        self._ssh = ssh
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="lab-"))
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        self.log = (self.folder / "log").open("w+")
        self.hosts = [Host(self, number + 1) for number in range(hosts)]
        self._bridge: subprocess.Popen[Any] | None = None

    def __enter__(self) -> "Lab":
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for host in self.hosts:
            host._end()
        if self._bridge is not None:
            self._bridge.kill()
            self._bridge.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def switch(self, *command: str) -> None:
        """Run a command in the network of the bridge."""
        assert self._bridge is not None
        pid = str(_child(self._bridge))
        _check(["nsenter", "--target", pid, "--net", "--", *command])

    def _begin(self) -> None:
        self._write()
        self._bridge = subprocess.Popen(
            ["unshare", "--net", "--fork", "--kill-child", "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.switch("ip", "link", "add", BRIDGE, "type", "bridge")
        self.switch("ip", "link", "set", BRIDGE, "up")
        for host in self.hosts:
            host._begin()
        ready = [self.folder / host.name / "ready" for host in self.hosts]
        if not wait_until(lambda: all(p.exists() for p in ready), READY_S):
            self.log.seek(0)
            raise TimeoutError(f"a host did not begin: {self.log.read()}")

    def _write(self) -> None:
        """Write the files of /etc of every host, and its keys."""
        keys = self.folder / "keys"
        keys.mkdir()
        if self._ssh:
            for name in ("id_ed25519", *(host.name for host in self.hosts)):
                _check(
                    ["ssh-keygen", "-q", "-t", "ed25519", "-N", ""]
                    + ["-C", "lab", "-f", str(keys / name)]
                )
        names = [f"{host.address} {host.name}" for host in self.hosts]
        known = []
        for host in self.hosts if self._ssh else ():
            key = (keys / f"{host.name}.pub").read_text()
            known.append(f"{host.name},{host.address} {key}")
        for host in self.hosts:
            state = self.folder / host.name
            state.mkdir()
            lines = ["127.0.0.1 localhost", *names, ""]
            (state / "hosts").write_text("\n".join(lines))
            (state / "passwd").write_text(
                "root:x:0:0::/home/lab:/bin/bash\n"
                "sshd:x:990:65534::/run/sshd:/usr/sbin/nologin\n"
            )
            (state / "group").write_text("root:x:0:\n")
            if self._ssh:
                etc = state / "ssh"
                etc.mkdir()
                shutil.copy(keys / host.name, etc / "host_key")
                shutil.copy(keys / "id_ed25519", etc)
                shutil.copy(keys / "id_ed25519.pub", etc / "authorized_keys")
                (etc / "known_hosts").write_text("".join(known))
                (etc / "sshd_config").write_text(SSHD)


def _kept() -> list[str]:
    """The folders that hold the package and its interpreter."""
    folders = {str(REPOSITORY), sys.prefix, sys.base_prefix}
    hidden = ("/tmp/", "/run/", "/var/tmp/", "/home/")
    return sorted(name for name in folders if name.startswith(hidden))


def _environment() -> dict[str, str]:
    """What a user who has just logged in has, and the package."""
    path = [str(pathlib.Path(sys.executable).parent), "/usr/local/bin"]
    return {
        "PATH": os.pathsep.join([*path, "/usr/bin:/bin:/usr/sbin:/sbin"]),
        "HOME": "/home/lab",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(REPOSITORY),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


def _child(parent: "subprocess.Popen[Any]") -> int:
    """The one child of ``unshare``."""
    process = psutil.Process(parent.pid)
    wait_until(lambda: bool(process.children()), READY_S)
    (child,) = process.children()
    return child.pid


def _check(command: Sequence[str]) -> None:
    _run(command).check_returncode()


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, capture_output=True, text=True, timeout=READY_S
    )
