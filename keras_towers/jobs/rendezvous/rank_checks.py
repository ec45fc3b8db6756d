"""Gathers and compares plain values of the ranks, such as versions and steps.

``fit`` compares the arguments of a call (``fit/ranks/call_agreement.py``) and
variables (``fit/weights/agreement.py``) in this way.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.import_hooks import minor_version, packages
from keras_towers.foundation.message_lists import describe_each, named
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import Plain
from keras_towers.jobs.rendezvous import activity, store

_T = TypeVar("_T")

OTHER_STEP: str = "the ranks do not have the same step"
"""How the message of a TensorFlow error begins if the ranks' steps differ."""
OTHER_WRITES: str = "the ranks have written different values since"
"""Likewise, if only some ranks have written variables between two calls."""
OPERATIONS: str = "The first operation that differs"
SAME_STEP: str = (
    "Build and compile the model in the same way on every rank, and run the "
    "same code. A step must not print or write summaries on rank 0 only: if it "
    "does so on all ranks, it happens once."
)
CONSTANT: str = "constant"
"""How the description of a constant begins."""
_SAME_CONSTANTS = (
    "Every rank must compute with the same constants. If Python or NumPy draws "
    "them, set the same seed on every rank (keras.utils.set_random_seed). If "
    "they come from a set, sort it. If those of rank 0 are to count, keep them "
    "in a variable."
)
_SAME_MODEL = (
    "Every rank must run the same model, and compute the same loss for the "
    "same variables."
)
# Any other difference only causes a warning.
_MUST_MATCH = {"keras_towers", "Horovod", "BytePS"}
_MINOR_MUST_MATCH = {"TensorFlow", "Keras"}


class Ranked(Protocol):
    """The place of this process among the ranks of a job."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def local_size(self) -> int: ...


class Peers(Ranked, Protocol):
    """Connected ranks that exchange values."""

    def gather_objects(self, value: Plain) -> list[Plain]:
        """Gather values from all ranks on all ranks. Eager; no pickles."""
        ...


def gather(
    peers: Peers, value: Plain, where: str, kind: str = ""
) -> list[Plain]:
    """Gather values from all ranks, which must be at the same point.

    Without the check, ranks at different points could meet in the same gather,
    and each would take the other's values for the ones that it expects. A
    ``Transport`` ends the wait for ranks that are elsewhere, or gone.

    Args:
        peers: the connected ranks.
        value: this rank's value, plain data.
        where: what this rank does, to follow "rank 0" in a message.
        kind: what all ranks have to do; empty: the same as this one.
    """
    with activity.doing(where):
        gathered = peers.gather_objects((kind or where, where, value))
    if any(point != (kind or where) for point, _, _ in gathered):
        points = {f"rank {r}": at for r, (_, at, _) in enumerate(gathered)}
        raise TowerError(different_things(points))
    return [value for _, _, value in gathered]


def different_things(points: Mapping[str, str]) -> str:
    """Return the message that ranks do different things, by name."""
    return (
        f"the ranks do different things: {describe_each(points)}. Every rank "
        "must call the same methods in the same order, and compile its model "
        "at the same place."
    )


def gather_result(
    ranks: Peers, function: Callable[[], _T], where: str
) -> list[_T]:
    """Call a function on each rank, and gather the results. Collective.

    Args:
        ranks: all ranks.
        function: what this rank calls.
        where: what this rank does, to follow "rank 0" in a message.

    Raises:
        TowerError: the function has raised one on a rank.
    """
    answer: tuple[str, Any]
    try:
        answer = "", function()
    except TowerError as error:
        answer = str(error), None
    answers: list[Any] = gather(ranks, answer, where)
    failures = [of_rank for of_rank, _ in answers if of_rank]
    if failures:
        raise TowerError(failures[0])
    return [of_rank for _, of_rank in answers]


def describe_ranks(values: Sequence[object], separator: str = ", ") -> str:
    """Describe the values of all ranks."""
    of_ranks = named({f"rank {rank}": v for rank, v in enumerate(values)})
    return separator.join(
        f"{rank}: {value}" for rank, value in of_ranks.items()
    )


def differing_settings(
    ranks: Sequence[Mapping[str, object]],
) -> dict[str, list[object]]:
    """Return the settings that differ between ranks, with all their values."""
    values = {
        name: [settings.get(name, "not given") for settings in ranks]
        for name in sorted(set().union(*ranks))
    }
    return {n: v for n, v in values.items() if any(x != v[0] for x in v)}


def describe_gradients(
    ranks: Sequence[Collection[tuple[Hashable, str]]],
) -> str:
    """Describe the gradients that some ranks lack."""
    return (
        "the ranks do not have the same gradients. "
        f"{_only_on(ranks)}. {_SAME_MODEL}"
    )


def describe_lines(
    ranks: Sequence[tuple[str, Mapping[str, str], str] | None],
) -> str:
    """Describe the first line in which the texts of the ranks' steps differ.

    Args:
        ranks: for each rank, what an operation returns, its attributes, and
            its line of code, if any; None: the rank has fewer operations.
    """
    known = [own for own in ranks if own is not None]
    attributes = differing_settings([given for _, given, _ in known])
    alike = len({result for result, _, _ in known}) == 1
    texts = []
    for own in ranks:
        if own is None:
            texts.append("none")
            continue
        result, given, line = own
        values = [f"{name}={given.get(name)}" for name in attributes]
        shown = f" ({', '.join(values)})" if alike and values else ""
        texts.append(f"{result}{shown}{line and f' of {line}'}")
    is_constant = all(result.startswith(CONSTANT) for result, _, _ in known)
    return (
        f"the ranks have different steps. {OPERATIONS}: "
        f"{describe_ranks(texts, '; ')}. "
        f"{_SAME_CONSTANTS if known and is_constant else SAME_STEP}"
    )


def describe_shapes(ranks: Sequence[str]) -> str:
    """Describe the shapes of batches that make the steps of ranks differ."""
    return (
        " It may be that the step depends on the shapes of a batch, which "
        f"differ: {describe_ranks(ranks, '; ')}. Give the data of all ranks "
        "the same shapes, with None where sizes differ."
    )


def _only_on(ranks: Sequence[Collection[tuple[Hashable, str]]]) -> str:
    """Describe names that some ranks lack.

    Args:
        ranks: for each rank, what it has: a key to compare, and its name.
    """
    common = set.intersection(*({key for key, _ in own} for own in ranks))
    extra = [
        sorted({name for key, name in own if key not in common})
        for own in ranks
    ]
    named = [", ".join(names) or "none" for names in extra]
    return f"Only on {describe_ranks(named, '; only on ')}"


def without_numbers(path: str) -> str:
    """Strip the numbers that make Keras names unique from a path.

    The numbers count what a process has built, and rank 0 may have built more
    models than the other ranks.
    """
    return re.sub(r"_\d+(?=[/_ ]|$)", "", path)


def name_in_parent(path: str) -> str:
    """Return the part of a variable's path that is equal on all ranks.

    Around the scope of its layer, or of its optimizer, are others if a call of
    a model or of another optimizer has built it, rather than Keras as it loads.
    """
    return without_numbers("/".join(path.split("/")[-2:]))


@functools.cache
def process_facts(engine: str = "") -> dict[str, str]:
    """Return the versions and the script of this process, to compare."""
    import keras_towers

    facts = {
        "TensorFlow": _version("tensorflow"),
        "Keras": _version("keras"),
        "keras_towers": keras_towers.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    if engine:
        facts[engine] = _version(engine.lower())
    # A notebook or `python -c` has no script.
    with contextlib.suppress(OSError):
        script = Path(*sys.argv[:1])
        digest = hashlib.sha256(script.read_bytes()).hexdigest()[:8]
        facts["script"] = f"{script.name} ({digest})"
    return facts


def _version(module: str) -> str:
    """Return the version of a module, without importing it."""
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
    refused: list[str] = []
    warned: list[str] = []
    for name in dict.fromkeys((*my_facts, *their_facts)):
        ours, theirs = my_facts.get(name, ""), their_facts.get(name, "")
        if name in _MINOR_MUST_MATCH:
            must_match = minor_version(ours) != minor_version(theirs)
        else:
            must_match = name in _MUST_MATCH
        if ours != theirs:
            (refused if must_match else warned).append(name)

    def differs(names: Sequence[str]) -> str:
        mine, theirs = (
            " and ".join(
                f"{n} {facts[n]}" if n in facts else f"no {n}" for n in names
            )
            for facts in (my_facts, their_facts)
        )
        return f"{me} has {mine}, but {other} has {theirs}"

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
    server = store.store_of_job()
    if server is None:
        return  # The ranks compare over the engine, once connected.
    rank = os.environ.get("HOROVOD_RANK", "?")
    me = f"rank {rank} on {os.environ.get('HOROVOD_HOSTNAME', '?')}"
    my_facts = process_facts(engine)
    other, their_facts = server.setdefault(store.FACTS, (me, my_facts))
    compare_facts(me, my_facts, other, their_facts)
