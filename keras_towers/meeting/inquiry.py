"""Whom the ranks wait for: one of those that wait finds out, and tells all.

If each looked at all others, the store would be asked N times N questions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Collection, Mapping
from typing import Any

from keras_towers import settings
from keras_towers.meeting.liveness import Liveness
from keras_towers.meeting.store import Store

_WORD, _TELLER = "stall-", "teller"
# So many beats after the last sign there is one no more, though one be late.
_SILENT_BEATS = 2.5
BEATS = 4
"""The beats from the first look to the answer."""


@dataclasses.dataclass
class Progress:
    """The progress of a rank; ``what`` is empty outside of training."""

    position: int = 0
    what: str = ""
    beat: int = 0


def waited_for(
    mine: Progress,
    others: Mapping[int, Progress | None],
    silent: Collection[int],
) -> dict[int, str]:
    """The ranks that a rank waits for, and for each, what keeps it."""
    found = {}
    for rank, place in others.items():
        if place is None:
            found[rank] = "has given no sign of life"
        elif rank in silent:
            found[rank] = "has stopped giving signs of life"
        elif place.position < mine.position:
            found[rank] = f"is still {_at(place)}"
        elif place.position == mine.position and place.what != mine.what:
            # As many steps, but others: each waits for the other one.
            found[rank] = f"is {_at(place)}"
    return found


def _at(place: Progress) -> str:
    return f"in {place.what}" if place.what else "outside of training"


class Inquiry:
    """What a rank that waits knows of whom it waits for."""

    def __init__(self, rank: int, size: int, store: Store):
        self._rank = rank
        self._others = [r for r in range(size) if r != rank]
        self._store = store
        self._teller: Liveness | None = None
        self._signs: Liveness | None = None
        self._begun = 0.0

    def leave_word(self, progress: Progress) -> None:
        """Leave word of how far this rank has come."""
        with contextlib.suppress(OSError):
            word = dataclasses.asdict(progress)
            self._store.put(f"{_WORD}{self._rank}", word)

    def look(self, mine: Progress, beat_s: float) -> dict[str, str]:
        """The ranks that this one waits for, and why, as far as is known."""
        silent_s = _SILENT_BEATS * beat_s
        self._teller = self._teller or Liveness(
            [0], lambda _: self._store.get(_TELLER)
        )
        try:
            self._teller.look()
            told = self._teller.signs[0]
            if told and told["rank"] == self._rank:
                return self._find(mine, silent_s)
            self._signs = None
            if told and self._teller.silent_s(0) <= silent_s:
                return self._heard(mine, told)
            # Of several that do so now, the last one is found there.
            self._tell(mine, {})
        except OSError:  # The store is gone; so will this process be.
            pass
        return {}

    def over(self) -> None:
        """Wait no longer, and tell others no more."""
        if self._signs is not None:
            with contextlib.suppress(OSError):
                self._store.put(_TELLER, None)
        self._teller = self._signs = None

    def _find(self, mine: Progress, silent_s: float) -> dict[str, str]:
        if self._signs is None:
            self._signs = Liveness(self._others, self._word_of)
            self._begun = time.monotonic()
        signs = self._signs
        signs.look()
        found: dict[int, str] = {}
        if time.monotonic() - self._begun > silent_s:
            silent = [r for r in self._others if signs.silent_s(r) > silent_s]
            found = waited_for(mine, signs.signs, silent)
        named = dict(itertools.islice(found.items(), settings.NAMED))
        told = {f"rank {rank}": why for rank, why in named.items()}
        if len(found) > len(named):
            told[f"{len(found) - len(named)} more"] = "likewise"
        self._tell(mine, told)
        return told

    def _tell(self, mine: Progress, found: Mapping[str, str]) -> None:
        place = {"rank": self._rank, "place": dataclasses.asdict(mine)}
        self._store.put(_TELLER, {**place, "found": found})

    def _heard(self, mine: Progress, told: Mapping[str, Any]) -> dict[str, str]:
        found, teller = dict(told["found"]), int(told["rank"])
        place = Progress(**told["place"])
        if found.pop(f"rank {self._rank}", None):
            found.setdefault(f"rank {teller}", f"is {_at(place)}")
        # Who tells may be behind this rank, and wait for nobody.
        behind = waited_for(mine, {teller: place}, ())
        return {**found, **{f"rank {r}": why for r, why in behind.items()}}

    def _word_of(self, rank: int) -> Progress | None:
        word = self._store.get(f"{_WORD}{rank}")
        return Progress(**word) if word else None
