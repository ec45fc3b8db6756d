"""Whether the ranks of a job are about to do the same thing, and together."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from keras_towers._imports import packages
from keras_towers.errors import TowerError
from keras_towers.rendezvous import store

logger: logging.Logger = logging.getLogger("keras_towers")

# So that facts fit into a message of fixed size.
_NAME = 60


class Peers(Protocol):
    """Connected ranks that tell one another values."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def local_size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather values from all ranks on all ranks, eagerly; no pickles."""
        ...


def gather(peers: Peers, value: Any, where: str) -> list[Any]:
    """Gather values from all ranks, which have to be in one place.

    Ranks that do different things may wait for one another nevertheless, each
    for something else, and would take the other's values for what they wanted.
    """
    told = peers.gather_objects((where, value))
    if any(there != where for there, _ in told):
        places = ", ".join(f"rank {r} {p}" for r, (p, _) in enumerate(told))
        raise TowerError(
            f"the ranks do different things: {places}. Every rank has to call "
            "the same methods in the same order."
        )
    return [value for _, value in told]


def each(values: Sequence[Any], separator: str = ", ") -> str:
    """The values of all ranks in words."""
    return separator.join(f"rank {r}: {v}" for r, v in enumerate(values))


def differing(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings in which ranks differ, each with its value on every rank."""
    found = {
        name: [settings.get(name, "not given") for settings in ranks]
        for name in sorted(set().union(*ranks))
    }
    return {n: v for n, v in found.items() if any(x != v[0] for x in v)}


def unlike_gradients(
    ranks: Sequence[Collection[tuple[Hashable, str]]],
) -> str:
    """Say which gradients not all ranks have."""
    common = set.intersection(*({kind for kind, _ in one} for one in ranks))
    odd = (
        sorted({name for kind, name in r if kind not in common}) for r in ranks
    )
    told = each([", ".join(own) or "no others" for own in odd], "; only on ")
    return (
        f"the ranks do not have the same gradients. Only on {told}. Every rank "
        "has to run the same model, and to compute the same loss for the same "
        "variables."
    )


def unnumbered(path: str) -> str:
    """A path without the numbers that make Keras names unique.

    They count what a process has built, and rank 0 may have built more models
    than the others.
    """
    return re.sub(r"_\d+(?=[/_ ]|$)", "", path)


# How many parts of a version have to be the same; None: all of them. With other
# differences ranks may train alike, and do so with a warning.
_SAME: dict[str, int | None] = {
    **{"TensorFlow": 2, "Keras": 2},
    **{"keras_towers": None, "Horovod": None, "BytePS": None},
}


@functools.cache
def facts(engine: str = "") -> dict[str, str]:
    """What this process runs, which should be the same on all ranks."""
    import keras_towers

    found = {
        "TensorFlow": _version("tensorflow"),
        "Keras": _version("keras"),
        "keras_towers": keras_towers.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    if engine:
        found[engine] = _version(engine.lower())
    # Of a notebook or a command line there is none.
    with contextlib.suppress(OSError):
        script = Path(*sys.argv[:1])
        digest = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
        found["script"] = f"{script.name[:_NAME]} ({digest})"
    return found


def _version(module: str) -> str:
    """The version of a module that may not have been imported."""
    told = getattr(sys.modules.get(module), "__version__", None)
    return told or ", ".join(packages(module).values())


def compare(
    me: str,
    mine: Mapping[str, str],
    other: str,
    its: Mapping[str, str],
    *,
    warns: bool = True,
) -> None:
    """Compare the facts of two ranks, and refuse what may not train alike."""
    refused, warned = [], []
    for name in dict.fromkeys((*mine, *its)):
        parts = _SAME.get(name)
        one, two = (of.get(name, "").split(".") for of in (mine, its))
        if name in _SAME and one[:parts] != two[:parts]:
            refused.append(name)
        elif one != two:
            warned.append(name)

    def differs(names: Sequence[str]) -> str:
        one, two = (
            " and ".join(
                f"{n} {of[n]}" if n in of else f"no {n}" for n in names
            )
            for of in (mine, its)
        )
        return f"{me} has {one}, but {other} has {two}"

    if refused:
        raise TowerError(
            f"{differs(refused)}, and they may not train alike: install the "
            "same versions everywhere."
        )
    if warned and warns:
        logger.warning("%s: results may differ.", differs(warned))


def introduce(engine: str) -> None:
    """Compare this rank with the one of its job that has come first.

    Before the engine connects, which other versions of it may not survive.
    Nobody waits: so does a worker that joins an elastic job, and the others
    need not know of it.
    """
    server = store.from_environment()
    if server is None or not server.signed:
        return  # Once connected, the ranks compare by the engine.
    me = "rank {RANK} on {HOSTNAME}".format_map(
        {
            name: os.environ.get(f"HOROVOD_{name}", "?")
            for name in ("RANK", "HOSTNAME")
        }
    )
    mine = facts(engine)
    other, its = server.first(store.FACTS, (me, mine))
    compare(me, mine, other, its)


# Against training in this process until it has met others; None: it may.
_advice: str | None = None


def refuse_alone(advice: str) -> None:
    """Refuse training in this process until it has met others."""
    global _advice
    _advice = advice


def permit_alone() -> None:
    """Permit it: the script has a strategy that connects its processes."""
    global _advice
    _advice = None


def check_alone(kind: str, model: str) -> None:
    """Raise where a method would train a model without any strategy."""
    if _advice is None or _engine_runs():
        return
    raise TowerError(
        f"{kind} of model {model!r}: `keras-towers run` started this script in "
        "several processes, and each would train a model of its own, since "
        "neither its options nor the script have a strategy that connects "
        f"them. {_advice}"
    )


def _engine_runs() -> bool:
    """Whether the script has connected this process by an engine itself."""
    # They stand above this package.
    from keras_towers import engines

    for name in (engine.module for engine in engines.ENGINES.values()):
        engine = sys.modules.get(name)
        # It raises where it has not been started.
        with contextlib.suppress(AttributeError, ValueError):
            if engine is not None and engine.size() > 1:
                return True
    return False
