"""Checks of a worker: backups of what is in shards, and what errors leave."""

import contextlib
import pathlib
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import checkpoint, shards
from keras_towers.foundation.errors import EndOfJob
from tests.kit.again import begin_again
from tests.kit.compare import assert_all_close
from tests.kit.ranks import check
from tests.processes import small as s
from tests.processes.shares import (
    adam,
    alone,
    assert_same_state,
    compiled,
    sharded,
    train,
    values,
)

FOLDER = pathlib.Path(sys.argv[1])


@check
def an_error_between_steps_of_shares():
    folder = FOLDER / "backup-in-shares"
    mine, again = compiled(), compiled()
    with s.Messages() as messages, contextlib.suppress(s.Boom), sharded():
        train(mine, callbacks=[kt.Backup(folder, every=2), s.breaks_behind(3)])
    assert messages.have("variables. They have no value now")
    if s.RANK == 0:
        reference = alone({"epochs": 1, "steps_per_epoch": 3})
        assert_all_close(mine.get_weights(), reference.get_weights(), 1e-5)
    with s.refused("has no value", "when training ended with an error"):
        values(mine)
    with pytest.raises(ValueError, match="has no value"):
        train(mine)  # As without a strategy, so TensorFlow finds it.
    for variable in mine.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(np.full(variable.shape, 0.5))
            assert (variable.numpy() == 0.5).all()
    mine.compile(adam(), "mse")
    with sharded():
        train(mine, epochs=1)
        # What was committed within the epoch has all shares.
        begin_again()
        train(again, callbacks=[kt.Backup(folder, every=2)])
    values(mine)
    assert_same_state(again, alone())

    def end(_):
        raise EndOfJob

    # Whoever starts the script again loses nothing.
    with s.Messages() as messages, contextlib.suppress(EndOfJob), sharded():
        train(mine, epochs=1, callbacks=[s.Does(on_epoch_end=end)])
    assert not messages.have("no value now")


@contextlib.contextmanager
def never_whole(patch):
    """What is in shards over ranks is not put together in this block."""

    def gather(variable, *_):
        raise AssertionError(f"{variable.path} is whole")

    with patch.context() as within:
        within.setattr(shards.ShardedVariable, "gather", gather)
        yield


@contextlib.contextmanager
def full_on(rank, patch):
    """The disk of a rank is full in this block, behind one backup."""
    written = []
    write = checkpoint.write

    def write_or_fail(*arguments):
        written.append(0)
        if rank == s.RANK and len(written) > 1:
            raise tf.errors.ResourceExhaustedError(None, None, "No space left")
        write(*arguments)

    with patch.context() as within:
        within.setattr(checkpoint, "write", write_or_fail)
        yield


@check
def a_backup_of_shares_is_in_shards():
    """Within an epoch; read by two ranks, by one device, and by a model."""
    patch = pytest.MonkeyPatch()
    options = {"updates": None, "weights": "sharded"}
    after_two = alone({"epochs": 1, "steps_per_epoch": 2})
    undisturbed = alone()

    def broken(name, *callbacks, every=2):
        folder = FOLDER / name
        callbacks = [kt.Backup(folder, every=every), *callbacks]
        with sharded(**options), never_whole(patch):
            train(compiled(), callbacks=callbacks)

    def assert_has_two_batches(folder):
        if s.RANK == 0:
            plain = compiled()
            kt.load_backup(plain, folder)
            wanted = after_two.get_weights()
            assert_all_close(plain.get_weights(), wanted, 1e-5)

    words = "rank 1 cannot write to", "No space left", "is complete"
    with s.refused(*words), full_on(1, patch):
        broken("full-disk")
    assert_has_two_batches(FOLDER / "full-disk")
    # Each rank has another folder.
    with s.refused(
        "rank 1 does not see the folder", "a folder that all ranks share"
    ):
        broken(f"of rank {s.RANK}")
    with pytest.raises(s.Boom):
        broken("in-parts", s.breaks_behind(3))
    folder = FOLDER / "in-parts" / "backup"
    assert len([*folder.glob("*.data-*")]) == len(s.gather(0))
    assert_has_two_batches(folder)
    s.gather("read")
    if s.RANK == 0:
        shutil.copytree(FOLDER / "in-parts", FOLDER / "in-one-process")
    begin_again()
    again = compiled()
    with sharded(**options), never_whole(patch):
        last = kt.Backup(FOLDER / "in-parts", every=2, asynchronous=True)
        train(again, callbacks=[last])
    assert_same_state(again, undisturbed)
    with pytest.raises(s.Boom):
        broken("damaged", s.breaks_behind(3), every=1)
    if s.RANK == 0:
        *_, part = sorted((FOLDER / "damaged" / "backup").glob("*.data-*"))
        part.write_bytes(part.read_bytes()[:-4] + b"damn")
    s.gather("damaged")
    begin_again()
    again = compiled()
    with s.Messages() as messages, sharded(**options), never_whole(patch):
        train(again, callbacks=[kt.Backup(FOLDER / "damaged")])
    assert messages.have("the backup before it, is used") == (s.RANK == 0)
    assert_same_state(again, undisturbed)
    begin_again()
    if s.RANK == 0:
        mine = compiled()
        with kt.TowerStrategy(["/cpu:0"]):
            train(mine, callbacks=[kt.Backup(FOLDER / "in-one-process")])
        assert_all_close(values(mine), values(undisturbed), 1e-5)
