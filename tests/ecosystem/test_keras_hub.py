"""KerasHub's transformers, of random weights and without its tokenizers."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.kit.compare import assert_exact

hub = pytest.importorskip(
    "keras_hub", reason="KerasHub is not installed: make test-ecosystem"
)

EXAMPLES, BATCH = 21, 8  # the last batch has 5 examples
LENGTH, WORDS = 6, 11
RANDOM = np.random.default_rng(3)
TOKENS = {
    "token_ids": RANDOM.integers(1, WORDS, (EXAMPLES, LENGTH)),
    # The first token is there; of the others, as many as it happens.
    "padding_mask": np.arange(LENGTH)
    <= RANDOM.integers(0, LENGTH, (EXAMPLES, 1)),
}
SEGMENTS = {"segment_ids": RANDOM.integers(0, 2, (EXAMPLES, LENGTH))}
IMAGES = RANDOM.random((EXAMPLES, 8, 8, 3), "float32")
TARGETS = RANDOM.normal(size=(EXAMPLES, 1)).astype("float32")

SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8}
OF_TEXT = {
    "vocabulary_size": WORDS,
    "intermediate_dim": 16,
    "max_sequence_length": LENGTH,
    "dropout": 0.3,
}
OF_IMAGES = {
    "image_shape": IMAGES.shape[1:],
    "patch_size": 4,
    "mlp_dim": 16,
    "dropout_rate": 0.3,
    "attention_dropout": 0.2,
}


@pytest.mark.parametrize(
    ("name", "sizes", "inputs", "features"),
    [
        ("Bert", OF_TEXT, TOKENS | SEGMENTS, lambda out: out["pooled_output"]),
        ("GPT2", OF_TEXT, TOKENS, lambda out: out[:, -1]),
        ("ViT", OF_IMAGES, IMAGES, lambda out: out[:, 0]),
    ],
    ids=["bert", "gpt2", "vit"],
)
def test_random_weights(name, sizes, inputs, features):
    """Dropout's draws are those of one device, as is all else."""

    def make():
        keras.utils.set_random_seed(1)
        backbone = getattr(hub.models, f"{name}Backbone")(**SIZES, **sizes)
        outputs = keras.layers.Dense(1)(features(backbone.output))
        model = keras.Model(backbone.input, outputs)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    def act(model):
        options = {"batch_size": BATCH, "verbose": 0}
        history = model.fit(
            inputs, TARGETS, epochs=2, shuffle=False, **options
        ).history
        return history, model.predict(inputs, **options)

    strategy = kt.TowerStrategy(2)
    assert_exact(make, act, strategy, tolerance=4e-6)


@pytest.mark.parametrize("name", ["Gemma", "Llama"])
def test_the_layout_map_of_a_model(name):
    """Heads, dense layers and the table are divided in both directions."""
    kind = getattr(hub.models, f"{name}Backbone")
    sizes = {"num_query_heads": 4, "num_key_value_heads": 2}
    if name == "Gemma":
        sizes["head_dim"] = 4

    def make():
        keras.utils.set_random_seed(1)
        backbone = kind(
            vocabulary_size=WORDS + 1,
            num_layers=2,
            hidden_dim=16,
            intermediate_dim=32,
            **sizes,
        )
        outputs = keras.layers.Dense(1)(backbone.output[:, -1])
        model = keras.Model(backbone.input, outputs)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    def act(model):
        options = {"batch_size": BATCH, "verbose": 0}
        history = model.fit(TOKENS, TARGETS, shuffle=False, **options)
        return history.history, model.predict(TOKENS, **options)

    devices = [f"cpu:{index}" for index in range(4)]
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices)
    strategy = kt.ModelParallelStrategy(kind.get_layout_map(mesh))
    assert_exact(make, act, strategy, tolerance=2e-5)
    assert "computed once" not in strategy.describe()
