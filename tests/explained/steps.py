"""Small steps of training, to be explained."""

import pathlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_towers as kt
from tests.kit.meshes import layout_map, mesh_of

FOLDER = pathlib.Path(__file__).parent
VERSIONS = f"Keras {keras.__version__}, TensorFlow {tf.__version__}"
X = np.ones((12, 5), "float32")
WORDS = np.ones((12, 4), "int32")
SENTENCES = np.ones((12, 7, 6), "float32")


class Decayed(layers.Layer):
    """A mean of words, of which the last ones count most."""

    def build(self, shape):
        self.decay = self.add_weight(shape=shape[2:], name="decay")

    def call(self, sentences):
        words = tf.transpose(sentences, [1, 0, 2])
        return tf.foldl(self.next_mean, words)

    def next_mean(self, mean, word):
        return mean * self.decay + word * (1 - self.decay)


def plain(*inner, name, optimizer="sgd", x=X, strategy=None, outputs=3):
    """A sequential model with little to explain but its layers."""
    shape, dtype = x.shape[1:], x.dtype.name
    body = [*inner, layers.Dense(outputs, name="out")]
    model = keras.Sequential(
        [keras.Input(shape, dtype=dtype), *body], name=name
    )
    model.compile(optimizer, "mse", jit_compile=False)
    y = np.ones((len(x), *model.output_shape[1:]), "float32")
    return model, x, y, strategy or kt.TowerStrategy(2)


def dense():
    return plain(name="dense")


def batch_norm():
    inner = [
        layers.Dense(4, use_bias=False, name="first"),
        layers.BatchNormalization(name="norm"),
    ]
    return plain(*inner, name="batch_norm")


def dropout():
    return plain(layers.Dropout(0.5, seed=1, name="drop"), name="dropout")


def embedding():
    """Only the rows of the table that a batch has are exchanged."""
    inner = [layers.Embedding(50, 4, name="table"), layers.Flatten()]
    return plain(*inner, name="embedding", x=WORDS, outputs=1)


def weights_sharded():
    """A large table is not gathered."""
    inner = [layers.Embedding(5000, 8, name="table"), layers.Flatten()]
    strategy = kt.TowerStrategy(2, weights="sharded")
    return plain(
        *inner, name="weights_sharded", x=WORDS, outputs=1, strategy=strategy
    )


def updates_sharded():
    strategy = kt.TowerStrategy(2, updates="sharded")
    inner = layers.Dense(4000, use_bias=False, name="large")
    return plain(
        inner, name="updates_sharded", optimizer="adam", strategy=strategy
    )


def clipping():
    """The norm of all gradients takes one number of each tower."""
    optimizer = keras.optimizers.SGD(global_clipnorm=1.0, name="sgd")
    strategy = kt.TowerStrategy(2, weights="sharded")
    inner = layers.Dense(4000, use_bias=False, name="large")
    return plain(inner, name="clipping", optimizer=optimizer, strategy=strategy)


def on_mesh(rows, columns, layouts):
    return kt.ModelParallelStrategy(layout_map(mesh_of(rows, columns), layouts))


def mesh():
    """Columns have hidden units: there is a sum forward, and one backward."""
    strategy = on_mesh(
        2, 2, {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
    )
    inner = [
        layers.Dense(4, use_bias=False, name="first"),
        layers.Dense(8, "relu", use_bias=False, name="up"),
        layers.Dense(4, use_bias=False, name="down"),
    ]
    return plain(*inner, name="mesh", strategy=strategy)


def attention():
    """Columns have heads: there is a sum forward, and one backward."""
    layouts = {
        r".*own/(query|key|value)/kernel": (None, "model", None),
        ".*own/attention_output/kernel": ("model", None, None),
    }
    sentences = keras.Input(SENTENCES.shape[1:])
    x = layers.Dense(6, use_bias=False, name="first")(sentences)
    own = layers.MultiHeadAttention(4, 2, use_bias=False, name="own")
    outputs = layers.Add(name="sum")([x, own(x, x)])
    model = keras.Model(sentences, outputs, name="attention")
    model.compile("sgd", "mse", jit_compile=False)
    return model, SENTENCES, SENTENCES, on_mesh(1, 2, layouts)


def loop():
    return plain(Decayed(name="decayed"), name="loop", x=SENTENCES)


STEPS = [
    dense,
    batch_norm,
    dropout,
    embedding,
    weights_sharded,
    updates_sharded,
    clipping,
    mesh,
    attention,
    loop,
]


def explained(step):
    """What is said of a step; its operations have the same names each time."""
    keras.utils.clear_session()
    model, x, y, strategy = step()
    return f"{kt.explain(model, x, y, strategy=strategy)}\n"


def file_of(step):
    return FOLDER / f"{step.__name__}.txt"
