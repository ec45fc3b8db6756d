"""Checks that the ranks of a job have the same versions and the same script."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_towers._imports import packages
from keras_towers.errors import TowerError
from keras_towers.rendezvous import store

logger: logging.Logger = logging.getLogger("keras_towers")

# How many components of a version must match, from the left; None: all. Any
# other difference only causes a warning.
_PARTS_THAT_MUST_MATCH: dict[str, int | None] = {
    "TensorFlow": 2,
    "Keras": 2,
    "keras_towers": None,
    "Horovod": None,
    "BytePS": None,
}


@functools.cache
def process_facts(engine: str = "") -> dict[str, str]:
    """The versions and script of this process, to compare between ranks."""
    import keras_towers

    found = {
        "TensorFlow": _version("tensorflow"),
        "Keras": _version("keras"),
        "keras_towers": keras_towers.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    if engine:
        found[engine] = _version(engine.lower())
    # A notebook or `python -c` has no script.
    with contextlib.suppress(OSError):
        script = Path(*sys.argv[:1])
        digest = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
        found["script"] = f"{script.name} ({digest})"
    return found


def _version(module: str) -> str:
    """The version of a module, imported or not."""
    version = getattr(sys.modules.get(module), "__version__", None)
    return version or ", ".join(packages(module).values())


def compare_facts(
    me: str,
    my_facts: Mapping[str, str],
    other: str,
    their_facts: Mapping[str, str],
    *,
    warns: bool = True,
) -> None:
    """Compare the facts of two ranks, and refuse versions that must match."""
    refused, warned = [], []
    for name in dict.fromkeys((*my_facts, *their_facts)):
        parts = _PARTS_THAT_MUST_MATCH.get(name)
        ours = my_facts.get(name, "").split(".")
        theirs = their_facts.get(name, "").split(".")
        if name in _PARTS_THAT_MUST_MATCH and ours[:parts] != theirs[:parts]:
            refused.append(name)
        elif ours != theirs:
            warned.append(name)

    def differs(names: Sequence[str]) -> str:
        one, two = (
            " and ".join(
                f"{n} {facts[n]}" if n in facts else f"no {n}" for n in names
            )
            for facts in (my_facts, their_facts)
        )
        return f"{me} has {one}, but {other} has {two}"

    if refused:
        raise TowerError(
            f"{differs(refused)}, which cannot train together: install the "
            "same versions everywhere."
        )
    if warned and warns:
        logger.warning("%s: results may differ.", differs(warned))


def compare_with_first_rank(engine: str) -> None:
    """Compare this rank with the first rank of its job that arrived.

    To be called before the engine connects, which may crash if versions differ.
    No rank waits for another, so that a worker that joins an elastic job can
    compare itself while the remaining ranks train.
    """
    server = store.from_environment()
    if server is None:
        return  # The ranks compare over the engine, once connected.
    rank = os.environ.get("HOROVOD_RANK", "?")
    me = f"rank {rank} on {os.environ.get('HOROVOD_HOSTNAME', '?')}"
    my_facts = process_facts(engine)
    other, their_facts = server.setdefault(store.FACTS, (me, my_facts))
    compare_facts(me, my_facts, other, their_facts)
