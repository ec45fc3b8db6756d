"""Checks of a worker: a mesh in each process, and shards within each."""

import pathlib
import sys
from unittest import mock

import keras
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.fit.weights import shards
from keras_towers.inspection.conformance.cases import Case
from keras_towers.reduction.stateful_hooks import HookState, StatefulHook
from tests.kit import meshes
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.ranks import check
from tests.processes import exact, small as s

FOLDER = pathlib.Path(sys.argv[1])
# The models are small.
shards.SMALLEST_BYTES = 1
LAYOUTS = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
# Towers divide these axes, too.
WITH_BATCH = {
    ".*up/kernel": ("batch", "model"),
    ".*down/kernel": ("model", "batch"),
    ".*scale/gamma": ("batch",),
}


def layout_map(layouts=LAYOUTS, rows=2, columns=2, names=None):
    mesh = meshes.mesh_of(rows, columns, devices=names)
    return meshes.layout_map(mesh, layouts)


def build(regularizer="l2"):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            # A bias before a normalization has no gradient but rounding.
            layers.Dense(16, use_bias=False, name="up"),
            layers.BatchNormalization(name="scale"),
            layers.Activation("relu"),
            layers.Dropout(0.2, seed=7),
            layers.Dense(8, kernel_regularizer=regularizer, name="down"),
            layers.Dense(3),
        ]
    )
    adam = keras.optimizers.Adam(0.01, global_clipnorm=0.5, use_ema=True)
    model.compile(adam, "mse", metrics=["mae"])
    return model


def fit(model, **options):
    """Of the last batch, three of four towers have nothing, and a rank."""
    few = {"batch_size": 10, "epochs": 2, **options}
    data = s.X[: s.SHORT], s.Y[: s.SHORT]
    return s.fit(model, *data, validation_data=(s.X, s.Y), **few)


def assert_one_device(act=fit, **options):
    return exact.assert_one_device(Case(build, act, in_graph=True), **options)


@check
def a_mesh_in_each_process():
    assert s.Strategy(layouts=layout_map()).num_replicas == 4
    assert_one_device(layouts=layout_map())


@check
def shards_within_each_process():
    assert_one_device(towers=2, weights="sharded", shard_over="process")


@check
def a_table_in_shards_within_each_process():
    """Its towers look up the examples of all ranks, and take their own."""

    def build_table():
        keras.utils.set_random_seed(1)
        table = layers.Embedding(64, 4)
        model = keras.Sequential(
            [keras.Input((2,)), table, layers.Flatten(), layers.Dense(3)]
        )
        model.compile("adam", "mse")
        return model

    def look_up(model):
        x = tf.random.stateless_uniform((s.SHORT, 2), (1, 2), 0, 64, tf.int32)
        return s.fit(model, x.numpy(), s.Y[: s.SHORT], batch_size=10)

    case = Case(build_table, look_up, in_graph=True)
    options = {"towers": 2, "weights": "sharded", "shard_over": "process"}
    exact.assert_one_device(case, **options)
    exact.assert_one_device(case, micro_batches=2, **options)


@check
def slots_in_shards_within_each_process():
    assert_one_device(towers=2, updates="sharded", shard_over="process")


@check
def what_callbacks_leave_alone_is_not_put_together():
    """What is in shards within each process, and that one of them writes."""
    shapes, seen, kernels = [], [], []
    whole = shards.ShardedVariable._whole

    def counted(variable):
        shapes.append(tuple(variable.shape))
        return whole(variable)

    def write(model):
        shapes.clear()
        if s.RANK == 1:
            model.layers[0].kernel.assign(tf.ones([4, 16]))

    def look(batch, model):
        if batch:
            seen.extend(shapes)
            kernels.append(model.layers[0].kernel.numpy())

    acts = s.Does(on_train_batch_end=write)
    acts.on_train_batch_begin = lambda batch, logs: look(batch, acts.model)
    options = {"weights": "sharded", "shard_over": "process"}
    mine = build()
    with (
        mock.patch.object(shards.ShardedVariable, "_whole", counted),
        s.Strategy(towers=2, **options),
    ):
        few = {"batch_size": 8, "callbacks": [kt.EveryRank(acts)]}
        s.fit(mine, s.X[:16], s.Y[:16], **few)
    assert {*seen} <= {(4, 16)}, seen
    assert (kernels[0] == 1).all()


@check
def a_mesh_whose_towers_share_weights_within_each_process():
    assert_one_device(layouts=layout_map(WITH_BATCH), shard_over="process")


@check
def a_mesh_whose_towers_share_weights_over_all_processes():
    assert_one_device(layouts=layout_map(WITH_BATCH))


@check
def what_only_one_rank_does_on_a_mesh():
    """It predicts alone within an epoch, saves, and trains on after loading."""
    path, found = FOLDER / "mesh.keras", []

    def alone(model):
        found.append(model.predict(s.X, verbose=0))
        if s.RANK == 1:
            found.append(model.predict(s.X, verbose=0))

    mine, reference = build(), build()
    look = s.Does(on_epoch_end=alone)
    with s.Strategy(layouts=layout_map()):
        fit(mine, callbacks=[look])
        if s.RANK == 0:
            mine.save(path)
        s.gather("written")
        again = keras.models.load_model(path)
        fit(again)
    if s.RANK == 1:
        for together, own in zip(found[::2], found[1::2], strict=True):
            assert_close(own, together)
    wanted = keras.models.load_model(path)
    if s.RANK == 0:
        fit(reference)
        fit(wanted)
    s.assert_same_model(mine, reference)
    s.assert_same_model(again, wanted)


class Bounded(StatefulHook):
    """Sends less of a large entry, and the rest in the next step.

    Attributes:
        seen: the entries that it has been given in a step.
    """

    def __init__(self):
        self.seen = 0

    def init(self, specs):
        self.seen += sum(spec.shape.num_elements() for spec in specs)
        return HookState(own=[tf.zeros(s.shape, s.dtype) for s in specs])

    def sum(self, transport, tensors, state, key):
        wanted = [t + rest for t, rest in zip(tensors, state.own, strict=True)]
        sent = [tf.tanh(w / 0.01) * 0.01 for w in wanted]
        rest = [w - s for w, s in zip(wanted, sent, strict=True)]
        return transport.all_reduce(sent, key), HookState(own=rest)


def assert_hooked(**options):
    """A hook gets what it gets of towers with whole weights.

    But for regularizers, which are added to a shard's gradient once it is
    summed.
    """
    hooks = [Bounded(), Bounded()]
    whole, divided = build(None), build(None)
    with s.Strategy(towers=2, compression=hooks[0]):
        fit(whole)
    with s.Strategy(shard_over="process", compression=hooks[1], **options):
        fit(divided)
    assert hooks[0].seen == hooks[1].seen
    s.assert_equal_on_ranks([w.tobytes() for w in divided.get_weights()])
    assert_all_close(divided.get_weights(), whole.get_weights(), 2e-6)


@check
def a_hook_sums_gradients_of_shards_within_each_process():
    assert_hooked(towers=2, weights="sharded")


@check
def a_hook_sums_gradients_on_a_mesh():
    assert_hooked(layouts=layout_map(WITH_BATCH))


@check
def own_data_of_each_rank_on_a_mesh():
    """Each tower draws a batch; in the second step only one of them does."""
    own = tf.data.Dataset.from_tensor_slices((s.X, s.Y))
    own = own.skip(10).take(13) if s.RANK else own.take(10)
    mine, reference = build(), build()
    options = {"layouts": layout_map(WITH_BATCH), "shard_over": "process"}
    with s.Strategy(batches="each", **options):
        mine.fit(own.batch(5), epochs=2, verbose=0)
    if s.RANK == 0:
        s.fit(reference, s.X[:23], s.Y[:23], batch_size=20, epochs=2)
    s.assert_same_model(mine, reference)


class Constant(keras.losses.Loss):
    """A loss with a term of no example, which is a constant."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.square(y_true - y_pred)
        return keras.ops.mean(errors) + 2.0


@check
def a_term_that_other_ranks_know_to_be_zero():
    """What no example has counts on the first rank, with micro-batches too."""

    def train(model):
        adam = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
        model.compile(adam, Constant())
        return fit(model)

    options = {"towers": 2, "shard_over": "process", "micro_batches": 2}
    assert_one_device(train, weights="sharded", **options)


@check
def xla_compiles_accumulated_micro_batches_on_a_mesh():
    def train(model):
        adam = keras.optimizers.Adam(
            0.01, global_clipnorm=0.5, gradient_accumulation_steps=2
        )
        model.compile(adam, "mse", jit_compile=True)
        return fit(model)

    options = {"shard_over": "process", "micro_batches": 2}
    assert_one_device(train, layouts=layout_map(), **options)
