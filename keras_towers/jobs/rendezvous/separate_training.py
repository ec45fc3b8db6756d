"""Refuses processes of a job that would each train a model of their own.

And those that a rank has started, which are no ranks: they import the script
again if Python spawns them, such as those that read data.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.message_lists import listed
from keras_towers.jobs.rendezvous import launchers, tf_config
from keras_towers.jobs.rendezvous.tf_config import Member

# The message of the error; None: this process may train.
_reason: str | None = None


_PLACE = ("rank", "size", "local_rank", "local_size")


class NoRankError(TowerError):
    """A rank has started this process, which is none; ``place`` is its own."""

    place: dict[str, int]


def take_place(rank: Any) -> None:
    """Record that this process is a rank: those that it starts are none.

    Args:
        rank: it has the attributes of ``_PLACE``.
    """
    place = {name: getattr(rank, name) for name in _PLACE}
    os.environ[settings.ENV_PLACE] = json.dumps({"pid": os.getpid(), **place})


def refuse_child() -> None:
    """Raise a ``NoRankError`` if a rank of this job has started this process.

    One with another rank or size is in a job that a rank has started.
    """
    place = json.loads(os.environ.get(settings.ENV_PLACE) or "null")
    if place is None or place.pop("pid") == os.getpid():
        return
    member = member_of_job(certainly=True)
    here = member and (member.rank, member.size)
    if here != (place["rank"], place["size"]):
        return
    error = NoRankError(
        f"this process is no rank: rank {place['rank']} has started it. Begin "
        "what trains with `if __name__ == '__main__':`, so that processes that "
        "import the script again, such as those that read data, leave it out."
    )
    error.place = place
    raise error


def member_of_job(*, certainly: bool = False) -> Member | None:
    """Return this process as one of several, by its launcher or ``TF_CONFIG``.

    Args:
        certainly: only if there is another process without doubt. In a job of
            unknown size separate training may be intended, and a process that
            needs no cluster does not mind a malformed ``TF_CONFIG``.
    """
    member: Member | None = launchers.detect()
    if member is None:
        try:
            member = tf_config.from_environment()
        except TowerError:
            if not certainly:
                raise
    if member is None or member.is_single_process:
        return None
    return None if certainly and member.size is None else member


def describe(member: Member, cause: str, advice: str = "") -> str:
    """Return the message that each process would train its own model.

    Args:
        member: this process.
        cause: why, as a clause.
        advice: how to train one model in all of them, as sentences; empty: by
            the strategy for such jobs.
    """
    advice = f"{advice or member.how_to_connect} {member.how_to_train_alone}"
    return _text(f"this process is {member}", cause, advice)


def _text(fact: str, cause: str, advice: str) -> str:
    return (
        f"{fact}, and each would train its own model, since {cause}. {advice}"
    )


def refuse(engine: str, cause: str, advice: str) -> None:
    """Raise an error if this process, alone to an engine, is one of several.

    Args:
        engine: the engine, which does not read ``TF_CONFIG``.
        cause: why it is alone, though a launcher has started others.
        advice: how to start them.
    """
    member = member_of_job()
    if isinstance(member, tf_config.Cluster):
        jobs = member.jobs.items()
        tasks = [f"{role} {i}" for role, a in jobs for i in range(len(a))]
        cause = (
            f"{engine} does not read {tf_config.VARIABLE}, which names the "
            f"tasks {listed(tasks)}"
        )
        advice = ""
    if member is not None:
        raise TowerError(describe(member, cause, advice))


def forbid_training(fact: str, advice: str) -> None:
    """Forbid training in this process until a strategy connects it.

    Args:
        fact: who started the processes, in an error.
        advice: how to connect them.
    """
    global _reason
    _reason = _text(fact, "no strategy connects them", advice)


def permit_training() -> None:
    """Permit training: the script has a strategy that connects processes."""
    global _reason
    _reason = None


def check_permitted(kind: str, model: str, engines: Iterable[str]) -> None:
    """Raise an error if a method would train without any strategy.

    Args:
        kind: the name of the method.
        model: the name of its model.
        engines: modules with which a script may connect its processes itself.
    """
    if _reason is None or any(map(_connects, engines)):
        return
    raise TowerError(f"{kind} of model {model!r}: {_reason}")


def _connects(engine: str) -> bool:
    """Whether the script itself has connected this process by an engine."""
    module = sys.modules.get(engine)
    # size() raises unless the engine has been initialized.
    with contextlib.suppress(AttributeError, ValueError):
        return module is not None and bool(module.size() > 1)
    return False
