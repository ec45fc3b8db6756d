"""Reads and writes of variables of which each rank has rows, between steps.

A read needs the rows of all ranks, and a write changes those of all. So all
ranks take part in each, and compare in the same round what they do: a variable
goes by its place in the model, never by the order in which a rank met it. If
only some ranks read or write, the others serve them where they wait: at the
beginning of a call, at the end of an event of callbacks (``SyncedCallbacks``),
at a save, at the end of the strategy's block, and of the script.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.context import thread_state
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.weights import model_state
from keras_towers.fit.weights.shards import (
    NoValueError,
    ShardedVariable,
    is_over_ranks,
)
from keras_towers.rendezvous import failed_calls, rank_checks, watch
from keras_towers.rendezvous.liveness import describe_each
from keras_towers.transport import Transport, next_key


class Action(NamedTuple):
    """An action that a rank is about to take on a variable.

    Attributes:
        kind: ``"writes"``; ``"reads"``; ``"saves"``, which reads a variable
            that stays in parts after the block, too; or something else that a
            rank does, and that needs no variable.
        place: the place of the variable; empty: there is none.
        path: its name, for messages.
        digest: that of the value that it writes.
    """

    kind: str
    place: str
    path: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.kind} variable {self.path!r}"


Meeting = Callable[[Action, Any], tf.Tensor | None]


class KnownVariables:
    """The variables of this process of which each rank has rows, by place.

    Attributes:
        agreements: how often ranks have agreed on what they divide; places of
            one agreement begin with its number.
    """

    def __init__(self) -> None:
        self.agreements = 0
        self._by_place: weakref.WeakValueDictionary[str, ShardedVariable] = (
            weakref.WeakValueDictionary()
        )
        # Those in shards after their block, and Keras's variables that had
        # them: another rank may read what nothing here refers to any more.
        self._kept: dict[str, tuple[ShardedVariable, Callable[[], Any]]] = {}

    def register(self, variable: ShardedVariable) -> None:
        """Let ranks find a variable by its place."""
        self._by_place[variable.place] = variable

    def find(self, place: str) -> ShardedVariable | None:
        """Return the variable at a place."""
        return self._by_place.get(place)

    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._by_place)

    def keep(self, variable: ShardedVariable, owner: Callable[[], Any]) -> None:
        """Keep a variable for other ranks, until it becomes ordinary.

        Args:
            variable: the variable.
            owner: returns the variable of Keras that has it; None: it is gone.
        """
        self._kept[variable.place] = variable, owner

    def forget(self, places: Iterable[str]) -> None:
        """Forget variables that no rank will read."""
        for place in places:
            self._kept.pop(place, None)

    def unused(self) -> list[str]:
        """The places of what is kept only for other ranks."""
        kept = self._kept.items()
        return [place for place, (_, owner) in kept if owner() is None]


known: KnownVariables = KnownVariables()
"""The only one in this process, whatever the number of its strategies."""


class JointAccess:
    """Reads and writes variables in shards together with the other ranks.

    Args:
        transport: connects the ranks.
        known: the variables of this process.

    Attributes:
        known: the variables of this process.
    """

    def __init__(self, transport: Transport, known: KnownVariables = known):
        self._transport = transport
        self.known: KnownVariables = known
        # How ranks meet that do not all do the same: None: all do.
        self._meeting: ThreadLocal[Meeting] = ThreadLocal()
        self._is_at_exit = False

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._transport.size

    def register(self, variable: ShardedVariable) -> None:
        """Let ranks find a variable by its place."""
        self.known.register(variable)

    def serve_at_exit(self) -> None:
        """Serve the others at the end of the script, too, if it ends well.

        It happens once, for the variables of all strategies, and before the
        engine, which may have connected again, is shut down.
        """
        atexit.unregister(_serve_at_exit)
        atexit.register(_serve_at_exit, self)

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """Return the whole of a variable, on the host. Collective."""
        kind = "saves" if thread_state.keeping_parts.get() else "reads"
        access = Action(kind, variable.place, _name_of(variable))
        whole = self._meet(access, None)
        assert whole is not None
        return whole

    def write(self, variable: ShardedVariable, whole: tf.Tensor) -> None:
        """Divide a new value of a variable. Collective.

        If ranks write different values, all get that of the first one.
        """
        value = np.ravel(whole.numpy()).view(np.uint8)
        digest = hashlib.sha256(value.data).hexdigest()[:16]
        access = Action("writes", variable.place, _name_of(variable), digest)
        self._meet(access, whole)

    def _meet(self, access: Action, value: object) -> tf.Tensor | None:
        meeting = self._meeting.get()
        if meeting is None and failed_calls.calls.runs_in_another_thread():
            meeting = refusing("in a thread of your own while a call runs")
        if meeting is not None:
            return meeting(access, value)
        accesses = self._gather(str(access), access)
        places = {each.place for each in accesses if each and each.place}
        if len(places) > 1:
            raise TowerError(
                f"the ranks have different variables {access.path!r}: build "
                "and compile the same models, in the same order, on every rank."
            )
        return self.take_part(accesses, value)

    def serve(self, where: str, gather: Any = None) -> None:
        """Serve other ranks until all come here. Collective.

        Args:
            where: where this rank is, equally on all ranks.
            gather: exchanges what ranks do; None: also notices ranks that end.
        """
        while any(accesses := self._gather(where, None, gather)):
            self.take_part(accesses)

    def meet(self, does: str) -> list[str]:
        """Return what each rank does that saves a file. Collective.

        The others serve it wherever they are, and do nothing, as an empty text
        says. This rank serves those that read or write.

        Args:
            does: what this rank does.
        """
        if failed_calls.calls.runs_in_another_thread():
            raise NoValueError(
                f"rank {self.rank} {does} in a thread of your own while a call "
                "runs, but each rank has a part of the weights. Save at the "
                "end of the call."
            )
        while True:
            accesses = self._gather(does, Action(does, "", ""))
            if not any(access and access.place for access in accesses):
                return [access.kind if access else "" for access in accesses]
            self.take_part(accesses)

    def _gather(
        self,
        doing: str,
        access: Action | None,
        gather: Any = None,
    ) -> list[Action | None]:
        """Exchange what ranks are about to do.

        Raises:
            TowerError: they do different things.
        """
        told = doing, access and tuple(access)
        try:
            missed = None
            if not self._is_at_exit:
                missed = failed_calls.calls.connect_if_broken(self._transport)
            if missed is not None:
                raise NoValueError(
                    f"a call has failed on rank {missed.rank}, and rank "
                    f"{self.rank} has not made this call: it {doing}. The "
                    f"error of rank {missed.rank}: {missed.why}"
                )
            ranks = (gather or _gather_watched)(
                self._transport, told, doing, "reads or writes variables"
            )
        except watch.RanksEnded as error:
            ended = str(error)
        except tf.errors.OpError:
            if self._is_at_exit:
                # The others may be waiting for the end of this rank.
                raise
            ended = self._transport.ended_ranks() or "another rank has ended"
        else:
            different = {
                action
                for action, accessed in ranks
                if accessed is not None and Action(*accessed).place
            }
            waiting = {action for action, accessed in ranks if accessed is None}
            if len(different) > 1 or len(waiting) > 1:
                points = {
                    f"rank {rank}": action
                    for rank, (action, _) in enumerate(ranks)
                }
                if not different:
                    raise TowerError(rank_checks.different_things(points))
                raise TowerError(
                    f"the ranks do different things: {describe_each(points)}. "
                    "Every rank must read and write the same variables in "
                    "the same order, since each has only a part of them."
                )
            return [each and Action(*each) for _, each in ranks]
        raise NoValueError(
            f"{ended}, and rank {self.rank} {doing}, but each rank has its "
            "part of it."
        )

    def take_part(
        self, accesses: Sequence[Action | None], value: Any = None
    ) -> tf.Tensor | None:
        """Do what ranks are about to do with variables. Collective.

        Args:
            accesses: what each rank does; None: nothing.
            value: what this rank writes.

        Returns:
            What this rank reads.
        """
        result, mine = None, accesses[self.rank]
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, access in enumerate(accesses):
            if access is not None and access.place:
                ranks_of.setdefault(access[:2], []).append(rank)
        for (kind, place), ranks in ranks_of.items():
            access = accesses[ranks[0]]
            assert access is not None
            variable = self.known.find(place)
            if variable is None:
                raise TowerError(
                    f"rank {ranks[0]} {access}, which rank {self.rank} does "
                    "not have. Build and compile the same models, in the same "
                    "order, on every rank."
                )
            is_mine = mine is not None and mine[:2] == (kind, place)
            if kind != "writes":
                whole = variable.gather(self._transport)
                if kind == "reads" and not self._is_at_exit:
                    # On all ranks, or some would wait for others to read it.
                    variable.settle(whole)
                result = whole if is_mine else result
                continue
            digests = {accesses[rank].digest for rank in ranks}  # type: ignore[union-attr]
            if len(ranks) == self.size and len(digests) == 1:
                variable.divide(value)
                continue
            shape, dtype = variable.shape, variable.dtype
            sent = value if is_mine else tf.zeros(shape, dtype)
            (whole,) = self._transport.broadcast(
                [sent], next_key("shards"), ranks[0]
            )
            variable.divide(whole)
        return result

    @contextlib.contextmanager
    def meeting_by(self, meeting: Meeting) -> Iterator[None]:
        """Let ranks meet in another way in this block.

        Args:
            meeting: does what this rank is about to do together with the other
                ranks, given what it writes; returns what it reads.
        """
        with self._meeting.holding(meeting):
            yield


@contextlib.contextmanager
def holding_weights(model: keras.Model) -> Iterator[None]:
    """Hold the wholes of a model's weights in this block, on this rank."""
    with contextlib.ExitStack() as stack:
        for variable in model_state.collect(model).weights:
            if is_over_ranks(variable):
                stack.enter_context(variable._value.holding_whole())
        yield


def _serve_at_exit(access: JointAccess) -> None:
    # Python sets it before it ends with an error.
    if getattr(sys, "last_value", None) is None:
        access._is_at_exit = True
        # Another rank may have ended with one, or the engine be shut down.
        with contextlib.suppress(Exception):
            # BytePS would wait for them for ever.
            if not watch.gone_ranks():
                access.serve(
                    "is at the end of the script", gather=rank_checks.gather
                )


def access_of(*saved: object) -> JointAccess | None:
    """Return what reads and writes what each rank has rows of.

    Args:
        *saved: models, variables, and what has none.

    Returns:
        None: each rank has the whole of all.
    """
    for part in saved if known.any() else ():
        variables: list[Any] = [part]
        if isinstance(part, keras.Model):
            state = model_state.collect(part)
            variables = [*state.weights, *state.optimizer_variables]
        for variable in variables:
            value = getattr(variable, "_value", variable)
            if is_over_ranks(value) and value.is_in_parts:
                return value.access
    return None


def refusing(where: str) -> Meeting:
    """Return a meeting where ranks cannot meet.

    Args:
        where: where this rank is: "in Mine.on_predict_batch_end".
    """

    def meet(access: Action, value: object) -> tf.Tensor | None:
        raise NoValueError(
            f"variable {access.path!r} cannot be read or written {where}: "
            "each rank has a part of it, and ranks get there at different "
            "times. Read or write it at the end of the call."
        )

    return meet


def _gather_watched(*args: Any) -> list[Any]:
    return watch.wait_for_ranks(lambda: rank_checks.gather(*args))


def _name_of(variable: ShardedVariable) -> str:
    return rank_checks.without_numbers(variable.path or variable.name)
