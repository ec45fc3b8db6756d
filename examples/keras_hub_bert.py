"""Train KerasHub's BERT on towers, with the dropout of one device.

``python examples/keras_hub_bert.py``. Installing KerasHub with its dependencies
puts the package tensorflow over tensorflow-cpu: use ``pip install --no-deps
keras-hub``, and ``pip install '.[cpu,ecosystem]'`` for what importing it needs.
The weights are random, so that nothing is downloaded.
"""

import contextlib

import keras
import keras_hub
import numpy as np

import keras_towers as kt

kt.virtual_towers(2)  # splits the CPU; leave it out with GPUs

EXAMPLES, LENGTH, WORDS = 64, 16, 100
rng = np.random.default_rng(0)
tokens = rng.integers(1, WORDS, (EXAMPLES, LENGTH))
lengths = rng.integers(4, LENGTH + 1, (EXAMPLES, 1))
inputs = {
    "token_ids": tokens,
    "segment_ids": np.zeros_like(tokens),
    "padding_mask": np.arange(LENGTH) < lengths,
}
labels = (tokens[:, 0] < WORDS // 2).astype("int32")


def train(strategy):
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        dropout=0.1,
        max_sequence_length=LENGTH,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    with strategy:
        model.fit(inputs, labels, batch_size=16, epochs=2, verbose=2)
    return model.get_weights()


one = train(contextlib.nullcontext())
many = train(kt.TowerStrategy())
difference = max(np.abs(a - b).max() for a, b in zip(one, many, strict=True))
print(f"largest difference of a weight to one device: {difference:.1e}")
