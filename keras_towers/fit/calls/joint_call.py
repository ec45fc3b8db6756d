"""A call that all ranks make, and that fails on all of them or on none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_towers.errors import FAILED_ON, TowerError, shorten
from keras_towers.fit import rank_agreement, step_errors
from keras_towers.fit.contract import TowerConfig
from keras_towers.rendezvous import failed_calls, rank_checks, watch
from keras_towers.rendezvous.failed_calls import Failure


@contextlib.contextmanager
def failing_together(config: TowerConfig, kind: str) -> Iterator[None]:
    """Make a call that fails on one rank fail on all.

    Its error says which tower or rank has failed.

    Args:
        config: the towers.
        kind: the method of Keras.

    Raises:
        TowerError: it has failed on another rank.
    """
    transport, calls = config.transport, failed_calls.calls
    joint, first = transport.size > 1, None
    if joint:
        try:
            first = calls.begin(transport)
        except watch.RanksEnded as error:
            raise rank_agreement.not_called(config, kind, str(error)) from None
        if first is not None:
            raise _failed_elsewhere(config, kind, first)
    try:
        yield
        # Steps of a loop over batches, and ranks with data of their own, do not
        # wait for one another here.
        together = config.places(kind).ranks.batch is transport
        if together and not kind.endswith("_on_batch"):
            rank_checks.gather(transport, None, f"is at the end of {kind}")
    except Exception as error:
        if joint:
            first = calls.fail(transport, shorten(error))
        if not isinstance(error, tf.errors.OpError):
            if first is not None:
                error.add_note(
                    f"keras_towers: rank {first.rank} failed first: {first.why}"
                )
            raise
        if first is not None:
            # The error is that of a collective which other ranks have left.
            raise _failed_elsewhere(config, kind, first) from None
        note = step_errors.note_on_towers(error, config)
        if note:
            error.add_note(f"keras_towers: {note}")
        raise
    finally:
        if joint:
            calls.end()


def _failed_elsewhere(
    config: TowerConfig, kind: str, failure: Failure
) -> TowerError:
    return TowerError(
        f"{kind} has ended on rank {config.transport.rank}, {FAILED_ON} rank "
        f"{failure.rank}: {failure.why}"
    )
