"""Reads and writes of variables in shards over ranks, between steps.

A read needs the rows of all ranks, and a write changes the rows of all. So all
ranks take part in each, and compare in the same round what they do. A variable
is known by its place in the model, not by the order in which a rank used it. If
only some ranks read or write, the others serve them where they wait: at the
beginning of a call, at the end of an event of callbacks (``SyncedCallbacks``),
at a save, at the end of the strategy's block, and of the script.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_towers.fit.context import thread_state
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.weights import model_state
from keras_towers.fit.weights.agreement import digest_of_value
from keras_towers.fit.weights.shards import (
    NoValueError,
    ShardedVariable,
    spans_ranks,
)
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.message_lists import describe_each
from keras_towers.jobs.rendezvous import failed_calls, rank_checks, watch
from keras_towers.transport import Transport, next_key
from keras_towers.transport.engine_transport import refusing_ended


class Action(NamedTuple):
    """An action that a rank is about to take on a variable.

    Attributes:
        kind: ``"writes"``; ``"reads"``; or ``"saves"``, which reads a variable
            that stays in parts after the block, too.
        place: the place of the variable.
        path: its name, for messages.
        digest: that of the value that it writes.
    """

    kind: str
    place: str
    path: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.kind} variable {self.path!r}"


# Takes an action together with the other ranks, given what this one writes;
# returns what it reads.
TakeAction = Callable[[Action, Any], tf.Tensor | None]
# What a rank is about to do, as for `JointAccess.meet`, and its action on a
# variable, if any.
Intent = tuple[Any, Sequence[str] | None]
ExchangeIntents = Callable[[Intent], list[Intent]]


class KnownVariables:
    """The variables of this process in shards over the ranks, by place.

    Attributes:
        agreements: how often ranks have agreed on what they divide; places of
            one agreement begin with its number.
        by_place: all of them.
        take_action: takes actions on them in a block; None: as between two
            calls.
    """

    def __init__(self) -> None:
        self.agreements = 0
        self.take_action: ThreadLocal[TakeAction] = ThreadLocal()
        self.by_place: weakref.WeakValueDictionary[str, ShardedVariable] = (
            weakref.WeakValueDictionary()
        )
        # Variables in shards after their block, and the Keras variables they
        # belong to. Another rank may read one that nothing here refers to.
        self._kept: dict[str, tuple[ShardedVariable, Callable[[], Any]]] = {}

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
        """Return the places of variables that only other ranks may use."""
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
        self._is_at_exit = False

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._transport.size

    @property
    def may_need_all(self) -> bool:
        """Whether a rank may do something with a variable that needs all.

        It may be another strategy's, whose block has left it in parts.
        """
        return self.size > 1 and self.known.agreements > 0

    def register(self, variable: ShardedVariable) -> None:
        """Let ranks find a variable by its place."""
        self.known.by_place[variable.place] = variable

    def serve_at_exit(self) -> None:
        """Serve the others at the end of the script, too, if it ends well.

        It happens once, for the variables of all strategies, and before the
        engine, which may have connected again, is shut down.
        """
        atexit.unregister(_serve_at_exit)
        atexit.register(_serve_at_exit, self)

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """Return the whole of a variable, on the host. Collective."""
        kind = "saves" if thread_state.keeping_shards.get() else "reads"
        action = Action(kind, variable.place, _name_of(variable))
        whole = self._take(action, None)
        assert whole is not None
        return whole

    def write(self, variable: ShardedVariable, whole: tf.Tensor) -> None:
        """Divide a new value of a variable. Collective.

        If ranks write different values, all get that of the first one.
        """
        digest = digest_of_value(whole)
        action = Action("writes", variable.place, _name_of(variable), digest)
        self._take(action, whole)

    def _take(self, action: Action, value: object) -> tf.Tensor | None:
        take = self.known.take_action.get() or self.take_together
        return take(action, value)

    def serve(
        self, where: str, exchange: ExchangeIntents | None = None
    ) -> None:
        """Serve other ranks until all come here. Collective.

        Args:
            where: where this rank is, equally on all ranks.
            exchange: as for ``meet``.
        """
        exchange = exchange or functools.partial(self._exchange, doing=where)
        while any(self.meet("", exchange)):
            pass

    def meet(
        self, does: object, exchange: ExchangeIntents | None = None
    ) -> list[object]:
        """Meet ranks that may be about to do something else. Collective.

        Until no rank is about to do something with a variable, this one takes
        part in that.

        Args:
            does: what this rank is about to do, the same on all ranks that do
                the same: words, or a tuple whose ``str`` they are; empty:
                nothing, it serves others.
            exchange: exchanges intents with the other ranks; None: as between
                two calls.

        Returns:
            What each rank is about to do.
        """
        exchange = exchange or self._exchange
        while True:
            ranks = exchange((does, None))
            actions = _actions(ranks)
            if not any(actions):
                return [does for does, _ in ranks]
            self.take_part(actions)

    def take_together(
        self,
        action: Action,
        value: object,
        exchange: ExchangeIntents | None = None,
    ) -> tf.Tensor | None:
        """Take an action, in which all ranks take part. Collective.

        Args:
            action: what this rank is about to do with a variable.
            value: what it writes.
            exchange: as for ``meet``.

        Returns:
            What this rank has read.
        """
        exchange = exchange or self._exchange
        return self.take_part(_actions(exchange((str(action), action))), value)

    def _exchange(self, mine: Intent, doing: str = "") -> list[Intent]:
        """Exchange intents with the other ranks, between two calls.

        Args:
            mine: what this rank is about to do.
            doing: the words for it, to follow "rank 0"; empty: ``str`` of it.

        Raises:
            NoValueError: they are not there.
        """
        doing = doing or str(mine[0])
        if self._is_at_exit:
            # The others may be waiting for the end of this rank.
            return self.compare(mine, doing)

        def refuse(why: str, advice: str = "") -> NoValueError:
            return NoValueError(
                f"{why}, and rank {self.rank} {doing}, but each rank has its "
                f"part of it.{advice}"
            )

        calls = failed_calls.calls
        if calls.runs_in_another_thread():
            later = " Do that when the call has ended."
            raise refuse("a call runs in another thread", later)
        try:
            with refusing_ended(self._transport, refuse):
                missed = calls.connect_if_broken(self._transport)
                if missed is None:
                    return self.compare(mine, doing)
                raise refuse(
                    f"a call has failed on rank {missed.rank} ({missed.why})"
                )
        except tf.errors.OpError:
            if not calls.has_failed():
                raise
        return self._exchange(mine, doing)

    def compare(self, mine: Intent, doing: str) -> list[Intent]:
        """Exchange intents with the other ranks, and compare them.

        Args:
            mine: what this rank is about to do.
            doing: the same, or where it serves, to follow "rank 0".

        Raises:
            TowerError: they do different things.
        """
        ranks = rank_checks.gather(
            self._transport, (*mine, doing), doing, "reads or writes variables"
        )
        acting = {does for does, action, _ in ranks if action}
        waiting = {at for does, _, at in ranks if not does}
        if len(acting) > 1 or len(waiting) > 1:
            points = {f"rank {r}": at for r, (_, _, at) in enumerate(ranks)}
            if not acting:
                raise TowerError(rank_checks.different_things(points))
            raise TowerError(
                f"the ranks do different things: {describe_each(points)}. "
                "Every rank must read and write the same variables in the same "
                "order, since each has only a part of them."
            )
        if len({action[1] for _, action, _ in ranks if action}) > 1:
            raise TowerError(
                f"the ranks do different things, though each {doing}: build "
                "and compile the same models, in the same order, on every rank."
            )
        return [(does, action) for does, action, _ in ranks]

    def take_part(
        self, actions: Sequence[Action | None], value: Any = None
    ) -> tf.Tensor | None:
        """Do what ranks are about to do with variables. Collective.

        Args:
            actions: what each rank does with a variable; None: nothing.
            value: what this rank writes.

        Returns:
            What this rank reads.
        """
        result, mine = None, actions[self.rank]
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, action in enumerate(actions):
            if action is not None:
                ranks_of.setdefault(action[:2], []).append(rank)
        for (kind, place), ranks in ranks_of.items():
            action = actions[ranks[0]]
            assert action is not None
            variable = self.known.by_place.get(place)
            if variable is None:
                raise TowerError(
                    f"rank {ranks[0]} {action}, which rank {self.rank} does "
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
            digests = {actions[rank].digest for rank in ranks}  # type: ignore[union-attr]
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
def holding_weights(model: keras.Model) -> Iterator[None]:
    """Hold a model's whole weights on this rank in this block."""
    with contextlib.ExitStack() as stack:
        for variable in model_state.collect(model).weights:
            if spans_ranks(variable):
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
                access.serve("is at the end of the script")


def access_of(*saved: object) -> JointAccess | None:
    """Return the access to variables in shards over the ranks, or None.

    Args:
        *saved: models, variables, and what has none.

    Returns:
        None: each rank has the whole of all.
    """
    for part in saved if known.by_place else ():
        variables: list[Any] = [part]
        if isinstance(part, keras.Model):
            state = model_state.collect(part)
            variables = [*state.weights, *state.optimizer_variables]
        for variable in variables:
            value = getattr(variable, "_value", variable)
            if spans_ranks(value) and value.is_in_shards:
                return value.access
    return None


def _actions(ranks: Sequence[Intent]) -> list[Action | None]:
    return [None if action is None else Action(*action) for _, action in ranks]


def refusing(where: str) -> TakeAction:
    """Refuse each action, for places where ranks cannot meet.

    Args:
        where: where this rank is: "in Mine.on_predict_batch_end".
    """

    def refuse(action: Action, value: object) -> tf.Tensor | None:
        raise NoValueError(
            f"variable {action.path!r} cannot be read or written {where}: "
            "each rank has a part of it, and ranks get there at different "
            "times. Read or write it at the end of the call."
        )

    return refuse


def _name_of(variable: ShardedVariable) -> str:
    return rank_checks.name_in_parent(variable.path or variable.name)
