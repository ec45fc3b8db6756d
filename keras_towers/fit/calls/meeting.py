"""Meetings of ranks while code of the user runs within a call."""

from __future__ import annotations

import contextlib

from keras_towers.fit.components import KerasCall
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers


class Meeting:
    """Ranks meet whenever one of them is about to do what may need all.

    Args:
        ranks: those that meet.
    """

    def __init__(self, ranks: Peers):
        self._ranks = ranks

    def meet(self, what: object, call: KerasCall | None = None) -> list[object]:
        """Meet before an action, with the same effects until then. Collective.

        Args:
            what: the action, the same on all ranks that do the same: words, or
                a tuple whose ``str`` they are.
            call: the call of Keras's method that it is; None: it is none.

        Returns:
            The action of each rank; empty: its code is done.

        Raises:
            TowerError: only some ranks make the call, and cannot do so alone.
        """
        return rank_checks.gather(self._ranks, what, f"is at {what}", "meets")

    def within_data(
        self, where: str
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which code of the data runs.

        Args:
            where: what runs: ``"Mine.on_epoch_end"``.
        """
        return contextlib.nullcontext()


class NoMeeting(Meeting):
    """A rank is alone, so it goes on at once."""

    def meet(self, what: object, call: KerasCall | None = None) -> list[object]:
        own = self._ranks.rank
        return [what if rank == own else "" for rank in range(self._ranks.size)]
