"""Chooses the backup to resume from: the last one that all ranks can read."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import posixpath
from collections.abc import Sequence
from typing import Any

from keras_towers.backups import backup_folder
from keras_towers.backups.backup_folder import CallFolder, gfile
from keras_towers.backups.saved_state import divides_over_ranks
from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import commits, rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.jobs.rendezvous.store import wait_for


@dataclasses.dataclass(frozen=True)
class ChosenBackup:
    """The backup to resume from.

    Attributes:
        name: its name; empty: there is none.
        last_number: the number of the last backup, which may be damaged; 0:
            there is none.
    """

    name: str
    last_number: int


def choose(
    call: CallFolder, folder: str, peers: Peers, failed: Sequence[CallFolder]
) -> ChosenBackup:
    """Choose the last backup of a call that ranks can read. Collective.

    If each rank has to write a part, all must see the folder, and each checks
    a share of a backup. Otherwise rank 0 checks all of it.

    Args:
        call: the folder of the call.
        folder: the folder of all calls.
        peers: the ranks.
        failed: the folders of failed calls, from which nothing resumes.

    Raises:
        TowerError: all backups are damaged; or a rank that has to write a part
            does not see the folder.
    """
    is_first = peers.rank == 0

    def found_names() -> list[str]:
        if not is_first:
            return []
        backup_folder.make_writable(folder)
        for other in failed:
            _set_aside(other)
        return call.names()

    names, *_ = rank_checks.gather_result(
        peers, found_names, "looks for backups"
    )
    shares = peers.size > 1 and divides_over_ranks()
    if shares:
        _check_that_all_see(folder, peers)
    own = slice(peers.rank, None, peers.size) if shares else slice(None)

    def damage(name: str) -> str:
        problem = ""
        if shares or is_first:
            problem = call.damage(name, operator.itemgetter(own))
        of_all = rank_checks.gather(peers, problem, "checks a backup")
        return next(filter(None, of_all), "")

    name = call.last_intact(names, damage, is_first)
    if is_first:
        call.go_on_from(name)
    last = backup_folder.number_of(names[-1]) if names else 0
    return ChosenBackup(name, last)


def _check_that_all_see(folder: str, peers: Peers) -> None:
    """Refuse ranks that do not see a file of rank 0 in a folder. Collective."""

    def exchange(value: object) -> list[Any]:
        point = "looks for the folder of the backup"
        return rank_checks.gather(peers, value, point)

    if peers.rank == 0:
        with backup_folder.token_in(folder) as name:
            exchange(name)
            seen = exchange(True)
    else:
        token = posixpath.join(folder, exchange("")[0])
        sees = False
        # A file that another host has just made may take a moment.
        with contextlib.suppress(TimeoutError):
            sees = wait_for(
                lambda _: gfile.exists(token) or None, settings.SEES_FILE_S
            )
        seen = exchange(sees)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise TowerError(
            f"rank {', '.join(map(str, blind))} does not see the folder "
            f"{folder} of rank 0. Each rank must write its shards of "
            "variables there: give Backup (for kt.elastic: "
            "--commits) a folder that all ranks share."
        )


def _set_aside(call: CallFolder) -> None:
    """Keep a backup of a failed call, so that no call resumes from it.

    When the script starts again, it repeats the call from its beginning, and
    ends as it would have without a backup.
    """
    logger.warning(
        "an earlier call of fit has failed; its backup is kept as %s",
        call.set_aside(),
    )
    commits.report_last(call.path, [])
