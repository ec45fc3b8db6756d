"""Which training a backup is of, and what may differ where it goes on."""

import json
import re
import shutil

import keras
import pytest

import keras_towers as kt
from keras_towers.backups.backup_folder import CallFolder
from tests.backups.backing_up import X, Y, interrupted, model, train
from tests.kit.again import begin_again
from tests.kit.compare import assert_all_close

pytestmark = pytest.mark.alternate
ADAM = keras.optimizers.Adam


def compiled_with(*arguments, **options):
    made = model()
    made.compile(*arguments, **options)
    return made


def usual():
    return compiled_with(ADAM(0.1), "mse")


# Others are in fit/ranks/test_plain_settings.py.
OF_ANOTHER = {
    "units of layer 3 (Dense)": (model, lambda: model(units=2)),
    "clipnorm of the optimizer (None in the backup, 1.0 now)": (
        usual,
        lambda: compiled_with(ADAM(0.1, clipnorm=1.0), "mse"),
    ),
    "differently: optimizer (Adam in the backup, SGD now). Make": (
        usual,
        lambda: compiled_with(keras.optimizers.SGD(0.1), "mse"),
    ),
    "loss ('mse' in the backup, 'mae' now)": (
        usual,
        lambda: compiled_with(ADAM(0.1), "mae"),
    ),
}


@pytest.mark.parametrize("said", OF_ANOTHER)
def test_the_backup_of_another_model_is_refused(said, tmp_path):
    """In the middle of an epoch; the model is left as it was."""
    make, other = OF_ANOTHER[said]
    last = kt.Backup(tmp_path)
    interrupted(last, 0, 1, made=make())
    made = other()
    untrained = made.get_weights()
    words = f"is the backup of another model.*{re.escape(said)}.*kt.load_back"
    with pytest.raises(kt.TowerError, match=words):
        train(last, made=made)
    assert_all_close(made.get_weights(), untrained, 0)
    begin_again()
    train(last, made=make())


def test_other_data_are_said(tmp_path, caplog):
    last = kt.Backup(tmp_path, delete=False)
    interrupted(last, 1, 2)
    train(last)
    assert "other data" not in caplog.text
    shutil.rmtree(tmp_path)
    begin_again()
    interrupted(last, 1, 2)
    train(last, data=(X[:20], Y[:20], 4), shuffle=False)
    words = "data: batch_size (5 in the backup, 4 now); examples of the last "
    assert f"{words}batch (4 in the backup, None now); shuffle" in caplog.text
    assert "are done (3 of epoch 2)" in caplog.text


def test_what_changes_no_result_may_differ(tmp_path):
    """Names, seeds, first values; epochs, and the metrics behind one."""

    def make(count, **options):
        first = ["ones", "zeros"]
        for _ in range(count):
            keras.layers.Dense(1)
        made = keras.Sequential(
            [
                keras.layers.Dropout(0.3, seed=count),
                keras.layers.Dense(1, kernel_initializer=first[count]),
            ],
            name=f"mine_{count}",
        )
        made.compile(ADAM(0.1, name=f"adam_{count}"), "mse", **options)
        return made

    last = kt.Backup(tmp_path)
    interrupted(last, 0, 4, made=make(0))
    # A Sequential is built, too, which the first one was not.
    other = make(1, metrics=["mae"])
    other.build((None, 3))
    with kt.TowerStrategy(1):
        history = other.fit(X, Y, 5, epochs=4, verbose=2, callbacks=[last])
    assert history.epoch == [0, 1, 2, 3]


def rewrite(folder, change):
    """Change the notes of a backup, and their checksum."""
    (path,) = folder.glob("backup/*.json")
    facts = json.loads(path.read_text())
    del facts["crc32"]
    change(facts)
    folder_of_call = CallFolder(str(path.parent))
    facts["crc32"] = folder_of_call._checksum(path.stem, facts)
    path.write_text(json.dumps(facts))


def test_a_rate_that_depends_on_the_number_of_ranks(tmp_path, caplog):
    """That of the backup holds, and it is said."""
    last = kt.Backup(tmp_path)
    interrupted(last, 0, 1)
    rewrite(tmp_path, lambda it: it["settings"].update(ranks=2))
    made = compiled_with(ADAM(0.02), "mse", metrics=["mae"])
    train(last, made=made)
    assert float(made.optimizer.learning_rate) == pytest.approx(0.01)
    assert "the number of ranks has changed, and so has learning" in caplog.text


def test_settings_that_another_version_of_keras_does_not_have(tmp_path):
    last = kt.Backup(tmp_path)
    interrupted(last, 0, 1)

    def change(facts):
        facts["settings"]["keras"] = "3.0"
        settings = facts["settings"]["model"]
        settings["another of the optimizer"] = "1"
        del settings["beta_1 of the optimizer"]

    rewrite(tmp_path, change)
    train(last)
