"""Checks of a worker: what several ranks save is written once."""

import pathlib
import sys
import tarfile
import threading
import time

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights.joint_access import access_of
from keras_towers.foundation import settings
from tests.kit.compare import assert_all_close
from tests.kit.ranks import check
from tests.processes import small as s

FOLDER = pathlib.Path(sys.argv[1])


class Noted(keras.layers.Dense):
    """Notes that this rank writes its weights."""

    written = 0

    def save_own_variables(self, store):
        Noted.written += 1
        super().save_own_variables(store)


def written_here(act):
    """How often this rank writes a model in ``act``."""
    before = Noted.written
    act()
    return Noted.written - before


def compiled(make=s.eager):
    keras.utils.set_random_seed(1)
    # Large enough for its weights to be in shards.
    return make(Noted(8192), Noted(3), optimizer="adam")


def shards():
    return s.Strategy(weights="sharded")


def whole():
    return s.Strategy()


def load(path):
    return keras.models.load_model(path, custom_objects={"Noted": Noted})


def assert_saved(path, weights):
    """All ranks see a file with these weights."""
    s.gather("saved")
    assert_all_close(load(path).get_weights(), weights, 0)


@check
def what_ranks_save_is_written_by_rank_0():
    for block, make in ((whole, s.eager), (shards, s.model)):
        name = f"{block.__name__}-{{}}.keras"
        paths = [str(FOLDER / name.format(i)) for i in range(6)]
        mine, weights, counts = compiled(make), [], []

        def save(path, ranks, counts=counts):
            def act(it):
                if s.RANK in ranks:
                    counts.append(written_here(lambda: it.save(path)))

            return act

        def look(it, weights=weights):
            weights.append(it.get_weights())

        callbacks = [
            s.Does(on_train_batch_end=save(paths[0], [0])),
            s.Does(on_epoch_end=save(paths[1], [0, 1])),
            s.Does(on_epoch_end=look),
        ]

        with block():
            s.fit(mine, batch_size=25, epochs=2, callbacks=callbacks)
            save(paths[2], [0])(mine)
            save(paths[3], [0, 1])(mine)
        save(paths[4], [0, 1])(mine)
        with block():  # At its end the others serve rank 0.
            save(paths[5], [0])(mine)
        # Two layers in each of so many files; the other rank has written none.
        wanted = [2] * 10 if s.RANK == 0 else [0] * 4
        assert counts == wanted, (block, counts)
        is_in_shards = access_of(mine) is not None
        assert is_in_shards == (block is shards)
        assert_all_close(mine.get_weights(), weights[-1], 0)
        for path in paths[1:]:
            assert_saved(path, weights[-1])
        load(paths[0])


@check
def a_path_of_one_rank_is_that_ranks():
    for block, make in ((whole, s.eager), (shards, s.model)):
        path = FOLDER / f"of-1-{block.__name__}.keras"
        own = FOLDER / f"own-{block.__name__}-{s.RANK}.keras"

        def of_rank_1(it, path=path):
            if s.RANK:
                it.save(path)

        def of_each_rank(it, own=own):
            it.save(own)

        mine, alone = compiled(make), compiled()
        acts = [s.Does(on_epoch_end=act) for act in (of_rank_1, of_each_rank)]
        with block():
            s.fit(mine, callbacks=acts)
        s.fit(alone)
        s.assert_same_model(mine, alone)
        for saved in (path, own):
            assert_saved(saved, mine.get_weights())
        mine = compiled(make)
        with kt.save_on_every_rank(), block():
            mine.evaluate(
                s.X, s.Y, callbacks=[s.Does(on_test_end=of_each_rank)]
            )


@check
def ranks_that_save_other_paths_do_not_wait_for_ever():
    """With weights in shards, rank 0 helps before its next call."""
    early, mine = FOLDER / "shards-early.keras", compiled(s.model)
    own, only = FOLDER / f"shards-of-{s.RANK}.keras", FOLDER / "only-1.keras"
    acts = s.fit, lambda it: it.train_on_batch(s.X, s.Y)
    with shards():
        for act in acts * 2:
            if s.RANK:
                mine.save(early)
                before = mine.get_weights()
            act(mine)
        began = time.monotonic()
        mine.save(own)
        # As long as it takes, not until somebody notices.
        assert time.monotonic() - began < settings.LOST_S
        if s.RANK:
            assert_all_close(load(early).get_weights(), before, 0)
            mine.save(only)
        with s.refused("different things", "beginning of fit", "of evaluate"):
            (mine.evaluate if s.RANK else mine.fit)(s.X, s.Y, verbose=0)
    alone = compiled(s.model)
    for act in acts * 2:
        act(alone)
    s.assert_same_model(mine, alone)
    for path in own, only:
        assert_saved(path, mine.get_weights())


def restored(prefix):
    """The weights of a model in a checkpoint of TensorFlow."""
    blank = compiled()
    tf.train.Checkpoint(model=blank).read(str(prefix)).expect_partial()
    return blank.get_weights()


@check
def files_of_tensorflow_are_written_once():
    later = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True
    )
    for block, make in ((whole, s.eager), (shards, s.model)):
        folder, mine = FOLDER / f"tensorflow-{block.__name__}", compiled(make)
        epoch, seen = tf.Variable(0), []
        checkpoint = tf.train.Checkpoint(
            model=mine, optimizer=mine.optimizer, epoch=epoch
        )
        manager = tf.train.CheckpointManager(checkpoint, str(folder / "m"), 2)
        of_optimizer = tf.train.Checkpoint(optimizer=mine.optimizer)

        def save(it, parts=(epoch, manager, of_optimizer, folder), seen=seen):
            number, kept, other, where = parts
            number.assign_add(1)
            # Whatever a thread of its own would write, ranks agree on.
            kept.save(options=later if int(number) == 2 else None)
            other.write(where / "optimizer")
            seen.append(tf.train.latest_checkpoint(where / "m"))

        def write_each(it, checkpoint=checkpoint, folder=folder):
            checkpoint.write(folder / f"each-{s.RANK}")

        callbacks = [
            s.Does(on_epoch_end=save),
            s.Does(on_epoch_end=write_each),
            kt.EveryRank(s.Does(on_train_end=write_each)),
        ]
        with block():
            s.fit(mine, epochs=3, callbacks=callbacks)
        # All ranks know what one of them has written.
        kept = [str(folder / "m" / f"ckpt-{number}") for number in (1, 2, 3)]
        assert seen == kept
        assert manager.latest_checkpoint == kept[-1]
        assert [*map(str, manager.checkpoints)] == kept[1:]
        weights = mine.get_weights()
        paths = [
            kept[-1],
            folder / f"each-{s.RANK}",
            checkpoint.save(folder / "saved"),
            checkpoint.save(folder / "saved", options=later),
            checkpoint.write(folder / "written"),
            checkpoint.write(folder / f"of-{s.RANK}"),
        ]
        with block():
            s.fit(mine)
        s.gather("written")
        for path in paths:
            assert_all_close(restored(path), weights, 0)
        assert len([*(folder / "m").glob("ckpt-*.index")]) == 2
        assert manager.restore_or_initialize() == kept[-1]
        assert int(epoch) == 3
        s.assert_equal_on_ranks([w.tobytes() for w in mine.get_weights()])
        assert_all_close(mine.get_weights(), weights, 0)


@check
def models_of_tensorflow_are_written_once():
    for block, make in ((whole, s.eager), (shards, s.model)):
        folder, mine = FOLDER / f"models-{block.__name__}", compiled(make)
        with block():
            s.fit(mine)
        names = "", f"-{s.RANK}"
        modules = [folder / f"module{name}" for name in names]
        exports = [folder / f"exported{name}" for name in names]
        for path in modules:
            module = tf.Module()
            module.of, spec = mine, tf.TensorSpec((None, 4))
            module.serve = tf.function(mine, input_signature=[spec])
            tf.saved_model.save(module, str(path))
        for path in exports:
            mine.export(path, verbose=False)
        wanted = [mine(s.X)]
        for path in (*modules, *exports):
            loaded = tf.saved_model.load(str(path))
            assert_all_close([loaded.serve(s.X)], wanted, 1e-6)


@check
def a_script_whose_other_ranks_save_to_temporary_paths_runs_unchanged():
    """As TensorFlow's pages on training over several workers save."""
    strategy, folder = s.Strategy(), FOLDER / "temporary"
    resolver = getattr(strategy, "cluster_resolver", None)
    index = s.RANK if resolver is None else resolver.task_id

    def writable(path):
        tf.io.gfile.makedirs(str(path.parent))
        if index == 0:
            return path
        temporary = path.parent / f"of-{index}"
        tf.io.gfile.makedirs(str(temporary))
        return temporary / path.name

    def remove_temporary(path):
        if index:
            tf.io.gfile.rmtree(str(path.parent))

    with strategy.scope():
        mine = compiled()
    alone = compiled()
    s.fit(mine)
    path = writable(folder / "model.keras")
    mine.save(path)
    remove_temporary(path)
    loaded = load(folder / "model.keras")
    assert_all_close(loaded.get_weights(), mine.get_weights(), 0)
    with strategy:
        s.fit(loaded)
    checkpoint = tf.train.Checkpoint(model=loaded)
    kept = writable(folder / "kept")
    manager = tf.train.CheckpointManager(checkpoint, str(kept), max_to_keep=1)
    manager.save()
    if index:
        tf.io.gfile.rmtree(str(kept))
    latest = tf.train.latest_checkpoint(str(folder / "kept"))
    assert latest == str(folder / "kept" / "ckpt-1")
    checkpoint.restore(latest)
    with strategy:
        s.fit(loaded)
    for _ in range(3):
        s.fit(alone)
    s.assert_same_model(loaded, alone)


@check
def a_save_that_fails_fails_on_all_ranks_and_training_goes_on():
    path = FOLDER / "full.keras"
    if s.RANK == 0:
        path.symlink_to("/dev/full")
    s.gather("made")
    for block, make in ((whole, s.eager), (shards, s.model)):
        seen = []

        def save(it, seen=seen):
            with pytest.raises((OSError, kt.TowerError)) as error:
                it.save(path)
            seen.append(str(error.value))
            # Of TensorFlow: what is no folder has no files.
            kinds = tf.errors.OpError, kt.TowerError
            with pytest.raises(kinds, match="ot a directory|could not save"):
                tf.train.Checkpoint(model=it).write(path / "checkpoint")

        mine, alone = compiled(make), compiled(s.eager)
        with block():
            s.fit(mine, callbacks=[s.Does(on_train_batch_end=save)])
            save(mine)
            s.fit(mine)
        for _ in range(2):
            s.fit(alone)
        if s.RANK:
            why = f"rank 0 could not save {path}: OSError: [Errno 28] No space"
            assert all(why in text for text in seen), seen
        assert len(seen) == 3
        s.assert_same_model(mine, alone)
        # What nobody catches ends the call of all.
        error = OSError if s.RANK == 0 else kt.TowerError
        with pytest.raises(error, match="No space left"), block():
            checkpoint = keras.callbacks.ModelCheckpoint(path)
            s.fit(compiled(make), callbacks=[checkpoint])


@check
def between_averages_of_the_ranks_nothing_is_saved():
    path = FOLDER / "averaged.keras"
    for callback in (
        s.Does(on_train_batch_end=lambda it: s.RANK or it.save(path)),
        keras.callbacks.ModelCheckpoint(path, save_freq=1),
    ):
        words = "ranks have the same weights only", "kt.Backup(every="
        words = *words, 'save_freq="epoch"'
        with s.refused(*words), s.Strategy(sync_every=8):
            s.fit(s.model(), batch_size=10, callbacks=[callback])
    mine = s.model()
    with s.Strategy(sync_every=8):
        checkpoint = keras.callbacks.ModelCheckpoint(path)
        s.fit(mine, batch_size=10, callbacks=[checkpoint])
    assert_saved(path, mine.get_weights())
    mine.save(path)
    assert_saved(path, mine.get_weights())


@check
def threads_of_a_script_save_once():
    path, errors = FOLDER / "in-thread.keras", []
    mine = compiled()

    def save():
        try:
            mine.save(path)
        except BaseException as error:
            errors.append(error)

    def in_thread(_):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()

    with whole():
        s.fit(mine, callbacks=[s.Does(on_epoch_end=in_thread)])
    assert not errors
    in_thread(None)
    assert_saved(path, mine.get_weights())


@check
def each_rank_caches_data_and_one_saves_them():
    numbers = tf.data.Dataset.range(4)
    (FOLDER / "data").mkdir(exist_ok=True)
    s.gather("made")
    with s.Strategy():
        for _ in range(2):
            cached = numbers.cache(str(FOLDER / "data" / "cached"))
            assert [*cached.as_numpy_iterator()] == [*range(4)]
        numbers.save(str(FOLDER / "data" / "saved"))
    loaded = tf.data.Dataset.load(str(FOLDER / "data" / "saved"))
    assert [*loaded.as_numpy_iterator()] == [*range(4)]
    s.gather("read")
    files = {path.name for path in (FOLDER / "data").glob("*.index")}
    assert files == {f"cached-{rank}-of-2.index" for rank in range(2)}
    assert len([*(FOLDER / "data" / "saved").glob("*/*.shard")]) == 1


@check
def one_rank_of_a_machine_gets_a_file():
    """Modules that have the function by its name get it so, too."""
    archive, text = FOLDER / "words.tar", FOLDER / "words.txt"
    if s.RANK == 0:
        text.write_text("some words")
        with tarfile.open(archive, "w") as tar:
            tar.add(text, "words.txt")
    s.gather("made")
    written = []
    get_file = keras.datasets.mnist.load_data.__globals__["get_file"]
    for force in (False, True):
        folder = get_file(
            "words",
            f"file://{archive}",
            extract=True,
            cache_dir=FOLDER,
            force_download=force,
        )
        found = pathlib.Path(folder) / "words.txt"
        assert found.read_text() == "some words"
        # Another rank that extracts it would write it anew.
        written.append(found.stat().st_ino)
        s.gather("read")
        assert found.stat().st_ino == written[-1]
    s.assert_equal_on_ranks(written)
