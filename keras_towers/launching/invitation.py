"""The private file by which rank 0 tells the others where and how they meet."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

import platformdirs

from keras_towers.errors import TowerError
from keras_towers.meeting.environments import ClusterEnvironment
from keras_towers.meeting.environments.base import RENDEZVOUS as POINT
from keras_towers.rendezvous import SECRET

FOLDER = "KERAS_TOWERS_MEETING_FOLDER"

_LEAST_SECRET = 16


@dataclasses.dataclass(frozen=True)
class Invitation:
    """What a rank has to know to meet the others.

    Attributes:
        address: where rank 0 listens.
        port: on which port; 0 if it is still to be chosen.
        secret: the job's.
    """

    address: str
    port: int
    secret: str


def given() -> Invitation | None:
    """The invitation that the user gives, None if there is none.

    Raises:
        TowerError: it is incomplete.
    """
    point = os.environ.get(POINT)
    if not point:
        return None
    address, _, port = point.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise TowerError(f"{POINT} is {point!r}: give host:port of rank 0.")
    secret = os.environ.get(SECRET, "")
    if len(secret) < _LEAST_SECRET:
        raise TowerError(
            f"{POINT} needs {SECRET} too, the same on all ranks and known to "
            f"nobody else: at least {_LEAST_SECRET} characters, such as those "
            "that `openssl rand -hex 32` prints."
        )
    return Invitation(address, int(port), secret)


class Letter:
    """An invitation in a file that only this user can read.

    Args:
        member: this process; all of its job see the same file.

    Raises:
        TowerError: there is no private folder for it, or the launcher does
            not tell this job from others.
    """

    def __init__(self, member: ClusterEnvironment):
        base = Path(
            os.environ.get(FOLDER)
            or (
                tempfile.gettempdir()
                if member.one_machine
                else platformdirs.user_cache_path(
                    "keras-towers", appauthor=False
                )
            )
        )
        folder = base / f"keras_towers-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder, folder.lstat())
        except OSError as error:
            raise TowerError(
                f"ranks meet by a file in {folder}, which cannot be used "
                f"({error.strerror}): set {FOLDER} to a folder that all "
                "machines of the job share."
            ) from None
        name = re.sub(r"\W+", "-", member.name)
        digest = hashlib.sha256(member.identity().encode()).hexdigest()
        self.path: Path = folder / f"{name}-{digest[:32]}"
        self._text = ""

    def write(self, invitation: Invitation) -> None:
        """Write it, instead of what an earlier job has left."""
        self._text = json.dumps(dataclasses.asdict(invitation))
        draft = self.path.with_name(f".{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with open(os.open(draft, flags, 0o600), "w") as file:
                file.write(self._text)
            draft.replace(self.path)
        except OSError as error:
            raise TowerError(
                f"cannot write {self.path}, by which ranks meet "
                f"({error.strerror}): set {FOLDER} to another folder."
            ) from None

    def read(self) -> Invitation | None:
        """Read it, None as long as there is none.

        Raises:
            TowerError: others may have read or written it.
        """
        try:
            # A shared file system then looks again for what was not there.
            os.listdir(self.path.parent)
            opened = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TowerError(
                f"cannot read {self.path}, by which ranks meet: "
                f"{error.strerror}."
            ) from None
        with open(opened) as file:
            _check_private(self.path, os.fstat(file.fileno()))
            with contextlib.suppress(ValueError, TypeError):
                return Invitation(**json.loads(file.read()))
        return None

    def remove(self) -> None:
        """Remove it, unless another job has written its own."""
        with contextlib.suppress(OSError):
            if self.path.read_text() == self._text:
                self.path.unlink()


def _check_private(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid():
        raise TowerError(
            f"{path} belongs to somebody else: set {FOLDER} to another folder."
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise TowerError(
            f"{path} holds secrets of jobs and can be read or written by "
            f"others: run `chmod go= {path}`."
        )
