"""Checks of a worker: a call that fails on rank 1, whose script goes on."""

import contextlib
import functools
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import joint_access
from keras_towers.foundation import settings, system
from keras_towers.jobs.rendezvous import activity
from keras_towers.transport.engine_transport import EngineTransport
from tests.kit.leaving import Boom, Unprintable
from tests.kit.processes import wait_until
from tests.kit.ranks import check
from tests.processes import small as s

FAILED = "has ended on rank 0, because it failed on rank 1: "


def fail(*_):
    if s.RANK == 1:
        raise Boom("my bug")


def interrupt_rank_1(*_):
    """As a Ctrl-C does there."""
    if s.RANK == 1:
        raise KeyboardInterrupt("my bug")


def assert_fails(call, error=Boom):
    """A call fails on both ranks, and each says why."""
    if s.RANK == 1:
        with pytest.raises(error, match="my bug"):
            call()
    else:
        with s.refused(f"{FAILED}{error.__name__}: my bug"):
            call()


def batches():
    """More than one batch; rank 1 fails behind the first."""
    yield s.X[:24], s.Y[:24]
    fail()
    yield s.X[24:], s.Y[24:]


def finite(y, prediction):
    """Fails in a step of the rank that has a wrong label."""
    y = tf.debugging.check_numerics(y, "my bug")
    return keras.losses.mean_squared_error(y, prediction)


def data():
    spec = tuple(tf.TensorSpec((None, n)) for n in (4, 3))
    made = tf.data.Dataset.from_generator(batches, output_signature=spec)
    return made.apply(tf.data.experimental.assert_cardinality(2))


def at(event):
    return {"callbacks": [s.Does(**{event: fail})], "batch_size": 24}


def in_batches(mine):
    """The third batch has a wrong label, in a row of rank 1."""
    for number in range(4):
        labels = s.Y[:8].copy()
        if number == 2:
            labels[7] = np.inf
        mine.train_on_batch(s.X[:8], labels)


@check
def a_call_that_fails_on_one_rank_fails_on_all():
    mine, eager = s.model(), s.eager()
    with s.Strategy():
        # What fails around the steps does not need them traced.
        for event, model in (
            ("on_train_begin", eager),
            ("on_train_end", eager),
            ("on_train_batch_end", mine),
        ):
            assert_fails(functools.partial(s.fit, model, **at(event)))
        evaluate = functools.partial(mine.evaluate, s.X, s.Y, verbose=0)
        assert_fails(functools.partial(evaluate, **at("on_test_begin")))
        predict = functools.partial(mine.predict, s.X, verbose=0)
        assert_fails(functools.partial(predict, **at("on_predict_batch_end")))
        stops = [s.Does(on_train_batch_end=interrupt_rank_1)]
        stopped = functools.partial(s.fit, mine, callbacks=stops)
        assert_fails(stopped, KeyboardInterrupt)
        s.fit(mine)
    s.assert_same_model(mine)


def by_rank_1(error):
    def raises(*_):
        if s.RANK == 1:
            raise error

    return raises


@check
def whatever_a_script_survives_on_one_rank_ends_the_call_on_all():
    mine = s.model()
    evaluate = functools.partial(mine.evaluate, s.X, s.Y, verbose=0)
    predict = functools.partial(mine.predict, s.X, verbose=0)
    fit = functools.partial(s.fit, mine)
    long = BaseExceptionGroup("one", [Boom("x" * 10**7)])
    with s.Strategy():
        for call, event, error, told in (
            (evaluate, "on_test_begin", SystemExit(3), "SystemExit: 3"),
            (predict, "on_predict_end", Unprintable(), "Unprintable: its str"),
            (fit, "on_epoch_end", long, "Boom: xx"),
        ):
            callbacks = [s.Does(**{event: by_rank_1(error)})]
            with pytest.raises(BaseException) as caught:
                call(callbacks=callbacks)
            if s.RANK == 1:
                assert caught.value is error
                continue
            found = str(caught.value)
            assert FAILED in found and told in found and len(found) < 600
            assert isinstance(caught.value, kt.TowerError)
        # A Ctrl-C reaches all of them.
        with pytest.raises(KeyboardInterrupt):
            fit(callbacks=[s.Does(on_train_batch_end=interrupt)])
        fit()
    s.assert_same_model(mine)


def interrupt(*_):
    raise KeyboardInterrupt


@check
def a_call_with_wrong_arguments_on_one_rank_fails_on_all():
    mine = s.eager()
    backups = [kt.Backup("backup"), kt.Backup("backup")]
    with s.Strategy():
        for wrong, told in (
            ({"epoch": 3}, "TypeError: got an unexpected keyword"),
            ({"callbacks": backups}, "cannot run Backup and Backup together"),
        ):
            with pytest.raises((TypeError, kt.TowerError)) as caught:
                s.fit(mine, **(wrong if s.RANK == 1 else {}))
            found = str(caught.value)
            assert (FAILED in found) == (s.RANK == 0)
            assert s.RANK == 1 or told in found
        # All ranks make the same call again.
        s.fit(mine)
    s.assert_same_model(mine)


@check
def a_rank_without_memory_for_an_exchange_is_named():
    mine = s.eager()
    began = time.monotonic()
    with s.Strategy() as strategy:
        over = strategy._config.transport
        told, error = FAILED, kt.TowerError
        if s.RANK == 1:
            told, error = "OOM when|no mem", tf.errors.ResourceExhaustedError
        # All that BytePS does is one operation.
        more = [] if over.name == "BytePS" else ["all_to_all"]
        for collective in ("all_gather", *more):
            does = functools.partial(
                s.exchange_without_memory, over, collective
            )
            callbacks = [s.Does(on_train_batch_end=does)]
            with pytest.raises(error, match=told):
                s.fit(mine, callbacks=callbacks)
        s.fit(mine)
    # Not after the limit for ranks that wait.
    assert time.monotonic() - began < 120
    s.assert_same_model(mine)


class Ends(keras.Sequential):
    """A step on rank 1 ends as the data do."""

    steps = 0

    def train_step(self, data):
        self.steps += 1
        if s.RANK == 1 and self.steps == 2:
            raise StopIteration
        return super().train_step(data)


@check
def what_keras_takes_for_the_end_of_the_data_is_an_error():
    mine, ends = s.eager(), Ends([keras.layers.Dense(3)])
    ends.compile("sgd", "mse", run_eagerly=True)
    validates = {"validation_data": (s.X, s.Y), "batch_size": 24}
    over = tf.errors.OutOfRangeError(None, None, "over")
    with s.Strategy():
        for event, error, told in (
            ("on_train_batch_end", StopIteration(), "StopIteration"),
            ("on_test_batch_begin", over, "OutOfRangeError: over"),
        ):
            told = f"Does.{event} has raised {told}, which Keras takes for"
            callbacks = [s.Does(**{event: by_rank_1(error)})]
            with s.refused(told, FAILED if s.RANK == 0 else ""):
                s.fit(mine, callbacks=callbacks, **validates)
        told = "a step of fit has raised StopIteration, which Keras takes"
        with s.refused(told, FAILED if s.RANK == 0 else ""):
            s.fit(ends, batch_size=20)
        s.fit(mine)
    s.assert_same_model(mine)


@check
def data_that_fail_on_one_rank_fail_on_all():
    mine = s.eager()
    with s.Strategy(), pytest.raises(Exception, match="my bug") as error:
        mine.fit(data(), verbose=0)
    assert (FAILED in str(error.value)) == (s.RANK == 0)
    s.assert_as_one_process(mine, alone=as_trained(mine))


def as_trained(mine):
    """On rank 0, what one process goes on with."""
    alone = s.eager()
    alone.set_weights(mine.get_weights())
    return alone


@contextlib.contextmanager
def hearing_soon():
    """Ranks report how far they are more often."""
    known = activity.this_rank.watch
    before, known._beat_s = known._beat_s, 0.2
    try:
        yield known
    finally:
        known._beat_s = before


@check
def a_model_that_one_rank_compiles_again_fails_on_all():
    """The others may be in a step by then, which compares nothing with it."""
    mine, batch = s.model(), (s.X[:8], s.Y[:8])
    said = (
        "rank 1 is at the beginning of train_on_batch, since model "
        "'sequential' was compiled again"
    )
    with s.Strategy():
        for _ in range(2):
            mine.train_on_batch(*batch)
        if s.RANK == 1:
            mine.compile("adam", "mse")
        with hearing_soon(), s.refused(said):
            mine.train_on_batch(*batch)
        mine.compile("adam", "mse")
        mine.train_on_batch(*batch)
    s.assert_same_model(mine)


@check
def ranks_that_wait_in_different_blocks_are_told_so():
    """However many actions and exchanges each of them has begun."""
    batch = s.X[:8], s.Y[:8]
    more = (keras.layers.Dense(3, name=name) for name in "ab")
    mine = s.model(*more)
    said = "rank 0 is at the beginning of fit; rank 1 is in train_on_batch"
    with pytest.MonkeyPatch.context() as patch:
        # As if no check before had weights in shards, for which blocks meet.
        patch.setattr(joint_access.known, "agreements", 0)
        with hearing_soon(), s.refused(said):
            with s.Strategy():
                for _ in range(3 if s.RANK == 1 else 2):
                    mine.train_on_batch(*batch)
            with s.Strategy():
                s.fit(mine)
    with s.Strategy():
        mine.train_on_batch(*batch)
    s.assert_same_model(mine)


@check
def ranks_that_all_wait_hear_so_and_those_that_compute_do_not():
    transport = s.Strategy()._config.transport
    exact = transport.engine_sum

    def computes(value):
        assert wait_until(lambda: not known._progress.waits)
        time.sleep(1)
        assert not known._progress.waits
        return value

    def waits(value):
        assert wait_until(lambda: known._progress.waits and known._awaited)
        return value

    def never_ends(tensors, key):
        return [
            tf.py_function(waits, [t], t.dtype) for t in exact(tensors, key)
        ]

    @tf.function
    def step(value):
        (value,) = transport.all_reduce([value], "computed.first")
        value = tf.py_function(computes, [value], value.dtype)
        return transport.all_reduce([tf.ensure_shape(value, [])], "all.wait")

    with hearing_soon() as known, pytest.MonkeyPatch.context() as patch:
        transport.note_wait("step 1 of a test")
        transport.gather_objects(None)
        patch.setattr(transport, "engine_sum", never_ends)
        step(tf.constant(1.0))
        transport.note_wait("")


@check
def a_step_that_fails_on_one_rank_fails_on_all():
    """Of a fit, and of a loop over batches, which goes on."""
    mine, wrong = s.model(optimizer="adam", loss=finite), s.Y.copy()
    # Of the rows of rank 1.
    wrong[30] = np.inf
    with s.Strategy():
        for act in (lambda it: s.fit(it, y=wrong), in_batches):
            with pytest.raises(Exception, match="my bug") as error:
                act(mine)
            assert (FAILED in str(error.value)) == (s.RANK == 0)
        mine.train_on_batch(s.X[:8], s.Y[:8])
        s.fit(mine)
    s.assert_same_model(mine)


@check
def what_ranks_divide_is_whole_behind_a_failed_call():
    """What they do not share goes on, too."""
    for options in (
        {"updates": "sharded"},
        {"weights": "sharded"},
        {"sync_every": 3},
        {"batches": "each"},
    ):
        mine = s.model(optimizer="adam")
        with s.Strategy(**options):
            assert_fails(
                functools.partial(s.fit, mine, **at("on_train_batch_end"))
            )
            s.fit(mine)
        s.assert_same_model(mine)


def no_link(tensors, key):
    raise tf.errors.InternalError(None, None, "NCCL: no link")


def takes_no_part(tensors, key):
    time.sleep(4)
    return tensors


def assert_sums_on_host(transport, patches, sum_of_rank_1, why):
    """A first sum over NCCL goes wrong on rank 1, and then nothing else."""
    with patches() as patch:
        patch.setenv(settings.ENV_NCCL_TIMEOUT, "2")
        patch.setattr(EngineTransport, "_nccl_failure", None)
        patch.setattr(system, "limit_teardown", lambda: None)
        if s.RANK == 1 and sum_of_rank_1 is not None:
            patch.setattr(transport, "engine_sum", sum_of_rank_1)
        # Not that of an engine which was built without it.
        EngineTransport.try_nccl(transport, "/device:CPU:0")
        assert re.search(why, transport.describe_nccl())
    transport.sum_on(None)
    (total,) = transport.all_reduce([tf.ones([2])], "behind")
    assert total.numpy().tolist() == [2.0, 2.0]


@check
def ranks_that_cannot_sum_over_nccl_sum_on_the_host():
    transport = s.Strategy()._config.transport
    exact = transport.engine_sum

    def adds_wrongly(tensors, key):
        return [total + 1 for total in exact(tensors, key)]

    for sum_of_rank_1, why in (
        (no_link, "in CPU memory, .*InternalError: NCCL: no link"),
        (takes_no_part, "in CPU memory, .*has not ended after 2 s"),
        (
            adds_wrongly,
            r"in CPU memory, .*\[4.0, 6.0\]\] instead of \[3.0, 5.0\]",
        ),
        (None, "^ranks sum over NCCL"),
    ):
        assert_sums_on_host(
            transport, pytest.MonkeyPatch.context, sum_of_rank_1, why
        )
