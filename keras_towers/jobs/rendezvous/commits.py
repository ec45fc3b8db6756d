"""The backups of a job that starts again, as its launcher knows them.

Rank 0 completes each backup. The launcher chooses the folder for those of
``kt.elastic``, and remembers the last one of a job. A rank that does not find
that backup then reports an error, rather than train from the beginning.
"""

from __future__ import annotations

import hmac
import itertools
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import store, tf_config
from keras_towers.jobs.rendezvous.signatures import sign_file

_SHARED = "shared-"
_shared = itertools.count()


def folder() -> Path | None:
    """Return the folder of the job's commits; None if it never starts again."""
    name = os.environ.get(settings.ENV_COMMITS)
    return Path(name) if name else None


def report_resumes(resumes: bool) -> None:
    """Report whether ranks make a backup when a signal tells them to end."""
    store.tell_job(store.RESUMES, resumes)


def report_last(path: str, position: Sequence[int]) -> None:
    """Report the last backup; an empty position if it is no longer needed."""
    last = [path, *position] if position else None
    store.tell_job(store.COMMITTED, last)


def check_last(path: str, position: Sequence[int]) -> None:
    """Refuse to resume from an earlier position than the last backup's.

    Args:
        path: where the backup is.
        position: the position that was found there, or the beginning.
    """
    last = store.ask_job(store.COMMITTED)
    if last and last[0] == path and [*position] < last[1:]:
        raise TowerError(
            "the last backup of this job is not in "
            f"{posixpath.dirname(path)} of host {os.uname().nodename}: "
            "every host that may have rank 0 needs the same folder. Name it "
            "by `keras-towers run --commits` for kt.elastic, or by "
            "kt.Backup(folder)."
        )


def sign(content: bytes) -> bytes:
    """Put the signature of the job in front of the content of a file."""
    return sign_file(_secret(), content) + content


def verify(signed: bytes) -> bytes:
    """Return the content of a file that this job has signed.

    Raises:
        TowerError: another job or somebody else has written it, or it is
            damaged.
    """
    size = len(sign_file("", b""))
    signature, content = signed[:size], signed[size:]
    if not hmac.compare_digest(signature, sign_file(_secret(), content)):
        raise TowerError(
            "the commit was not written by this job, or is damaged: start "
            "the job again, from the beginning."
        )
    return content


def _secret() -> str:
    return os.environ[settings.ENV_SECRET]


def is_rank_0() -> bool:
    """Whether this process is rank 0 of its job, or alone."""
    member = tf_config.this_member()
    return member is None or member.rank == 0


def has_other_ranks() -> bool:
    """Whether this process is one of several."""
    member = tf_config.this_member()
    return member is not None and member.size not in (None, 1)


def share(content: bytes) -> bytes:
    """Give all ranks rank 0's value, before an engine connects them.

    All ranks call it equally often.
    """
    server = store.store_of_job()
    key = f"{_SHARED}{next(_shared)}"
    if server is None or not has_other_ranks():
        return content
    if len(content) > store.MAX_BYTES:
        raise TowerError(
            f"the objects of a state have {len(content):,} bytes, but may have "
            f"{store.MAX_BYTES:,}: keep arrays in variables, or in files."
        )
    if is_rank_0():
        server.write(store.SCOPE, key, content)
        return content
    return server.wait(key)
