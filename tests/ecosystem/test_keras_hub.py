"""KerasHub's transformers, of random weights and without its tokenizers."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.weights import shards
from tests.docs.pages import ROOT, blocks
from tests.kit.compare import (
    assert_all_close,
    assert_exact,
    assert_same_history,
)
from tests.kit.meshes import mesh_of
from tests.kit.training import fit

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


def last(outputs):
    return outputs[:, -1]


def regressor(backbone, features=last):
    """A compiled model with one output of some features."""
    outputs = keras.layers.Dense(1)(features(backbone.output))
    model = keras.Model(backbone.input, outputs)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def trained(model, inputs=TOKENS):
    """The history."""
    return fit(model, 2, inputs, TARGETS, BATCH)


@pytest.mark.parametrize(
    ("name", "sizes", "inputs", "features"),
    [
        ("Bert", OF_TEXT, TOKENS | SEGMENTS, lambda out: out["pooled_output"]),
        ("GPT2", OF_TEXT, TOKENS, last),
        ("ViT", OF_IMAGES, IMAGES, lambda out: out[:, 0]),
    ],
    ids=["bert", "gpt2", "vit"],
)
def test_random_weights(name, sizes, inputs, features):
    """Dropout's draws are those of one device, as is all else."""

    def make():
        keras.utils.set_random_seed(1)
        backbone = getattr(hub.models, f"{name}Backbone")(**SIZES, **sizes)
        return regressor(backbone, features)

    def act(model):
        return trained(model, inputs), model.predict(inputs, BATCH, verbose=0)

    assert_exact(make, act, kt.TowerStrategy(2), tolerance=4e-6)


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
        return regressor(backbone)

    def act(model):
        return trained(model), model.predict(TOKENS, BATCH, verbose=0)

    layouts = kind.get_layout_map(mesh_of(2, 2))
    strategy = kt.ModelParallelStrategy(layouts)
    assert_exact(make, act, strategy, tolerance=2e-5)
    assert "computed once" not in strategy.describe()


def _from_a_preset(folder):
    return hub.models.Backbone.from_preset(str(folder))


def _from_a_model(folder):
    return keras.saving.load_model(folder / "model.keras")


def _from_a_folder(folder):
    return keras.saving.load_model(folder / "model")


def _from_a_file_of_weights(folder):
    gemma = hub.models.GemmaBackbone(**GEMMA)
    gemma.load_weights(folder / "one.weights.h5")
    return gemma


LOADERS = [
    _from_a_preset,
    _from_a_model,
    _from_a_folder,
    _from_a_file_of_weights,
]
GEMMA = {
    "vocabulary_size": 16,
    "num_layers": 1,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder of the same weights in all kinds of files."""
    folder = tmp_path_factory.mktemp("pretrained")
    keras.utils.set_random_seed(2)
    gemma = hub.models.GemmaBackbone(**GEMMA)
    gemma.save_to_preset(str(folder), max_shard_size=4e-6)
    assert len([*folder.glob("model_*.weights.h5")]) > 1
    gemma.save(folder / "model.keras")
    keras.saving.save_model(gemma, folder / "model", zipped=False)
    gemma.save_weights(folder / "one.weights.h5")
    return folder


def _sharded():
    return kt.TowerStrategy(2, weights="sharded")


def _layouts():
    return hub.models.GemmaBackbone.get_layout_map(mesh_of(2, 2))


def _on_a_mesh():
    return kt.ModelParallelStrategy(_layouts())


def _under_a_distribution():
    return keras.distribution.ModelParallel(
        layout_map=_layouts(), batch_dim_name="batch"
    ).scope()


def _tuned(gemma):
    """Train it by LoRA; return the history."""
    keras.utils.set_random_seed(3)
    gemma.enable_lora(2)
    return trained(regressor(gemma))


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    "divided", [_sharded, _on_a_mesh, _under_a_distribution]
)
def test_pretrained(divided, load, pretrained, tmp_path, monkeypatch):
    """In shards as soon as it is loaded; saved for plain Keras."""
    monkeypatch.setattr(shards, "SMALLEST_BYTES", 256)
    gemma = load(pretrained)
    weights = gemma.get_weights()
    wanted = _tuned(gemma)
    with divided():
        gemma = load(pretrained)
        in_shards = [
            isinstance(w._value, shards.ShardedVariable) for w in gemma.weights
        ]
        assert in_shards.count(True) >= 7
        assert_all_close(gemma.get_weights(), weights, 0)
        history = _tuned(gemma)
        gemma.save_to_preset(str(tmp_path))
        gemma.save_weights(tmp_path / "own.weights.json", max_shard_size=4e-6)
        inside = gemma.predict(TOKENS, verbose=0)
    assert_same_history(history, wanted, 2e-5)
    plain = hub.models.Backbone.from_preset(str(tmp_path))
    assert_all_close([plain.predict(TOKENS, verbose=0)], [inside], 2e-5)
    again = hub.models.GemmaBackbone(**GEMMA)
    again.load_weights(tmp_path / "own.weights.json")
    assert_all_close(again.get_weights(), plain.get_weights(), 0)


def test_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "guides.md"
    namespace = {"np": np, "keras": keras, "kt": kt}
    for block in blocks(page, "python"):
        if block.needs == "keras_hub":
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, page, "exec"), namespace)
    tuned = namespace["gemma"].predict(namespace["inputs"], verbose=0)
    assert tuned.shape == (64, 16, 128)
