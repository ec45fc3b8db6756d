"""The files of backups: as many as you say, whole, and each byte of them."""

import contextlib
import itertools
import os
import re
import resource
import shutil

import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.backups.backup_folder import CallFolder
from keras_towers.backups.saved_training import SavedTraining
from keras_towers.transport import SingleProcess
from tests.backups.backing_up import (
    assert_equal,
    commit,
    failing_at,
    interrupted,
    model,
    opened,
    same_everywhere,
    train,
)
from tests.kit.again import begin_again
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.alternate


class Killed(BaseException):
    """Ends the script."""


@pytest.mark.parametrize("before", sample_of([0, 2]))
def test_a_kill_at_any_moment_leaves_the_last_complete_one(
    tmp_path, monkeypatch, before
):
    """Also while ``fit`` deletes it; the first one may be begun again."""
    last = before + 1
    for number in itertools.count():
        folder, allowed = tmp_path / str(number), (before, last)
        made = same_everywhere(0)
        saved = opened(folder, made)
        for epoch in range(1, last):
            commit(saved, made, epoch)
        try:
            with monkeypatch.context() as patch:
                failing_at(patch, number, Killed)
                commit(saved, made, last)
                allowed = (last, 0)
                saved.end(delete=True)
        except Killed:
            is_killed = True
        else:
            is_killed, allowed = False, (0,)
        again = same_everywhere(0)
        saved = opened(folder, again)
        assert saved.position.epoch in allowed
        for weight in again.get_weights():
            assert (weight == saved.position.epoch).all()
        for epoch in 7, 8:
            commit(saved, again, epoch)
        # Nothing is left of what came before.
        kept = {p.name.partition(".")[0] for p in (folder / "backup").iterdir()}
        assert len(kept) == 3
        if not is_killed:
            break
    assert number > 30


@contextlib.contextmanager
def files_of_at_most(size):
    """Let the system refuse to write larger files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_complete_one(tmp_path, monkeypatch):
    made = same_everywhere(0)
    saved = opened(tmp_path, made)
    for written, sizes in (
        ("There is no backup yet", (4, 40, 400)),
        (
            "The backup before it is complete",
            (4, 400),
        ),
    ):
        for size in sizes:
            with pytest.raises(kt.TowerError) as error, files_of_at_most(size):
                commit(saved, made, 2)
            text = str(error.value)
            assert text.startswith("cannot write to "), text
            assert "File too large" in text and f". {written}: make" in text
            assert not re.search(r"rank 0|function_node|\[Op|\n", text), text
        commit(saved, made, 1)
        kt.load_backup(made, tmp_path)
        assert all((weight == 1).all() for weight in made.get_weights())
    full = tf.errors.ResourceExhaustedError(None, None, "No space left")
    for number in (0, 3, 6):
        with monkeypatch.context() as patch:
            failing_at(patch, number, full)
            words = r"cannot write .*No space.*complete: make room"
            with pytest.raises(kt.TowerError, match=words):
                commit(saved, made, 2)
        kt.load_backup(made, tmp_path)
        assert all((weight == 1).all() for weight in made.get_weights())
    commit(saved, made, 3)
    kt.load_backup(made, tmp_path)
    assert all((weight == 3).all() for weight in made.get_weights())


def flip(path, at=40):
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:9])


DAMAGES = [
    *itertools.product((flip, cut, os.remove), ("index", "data-*", "json")),
    (lambda path: path.write_text("{}"), "json"),
]


def take_older(path):
    """Put the file of the backup before in the place of a file."""
    older = path.name.replace("ckpt-5", "ckpt-4")
    shutil.copy(path.with_name(older), path)


def make_folder(path):
    os.remove(path)
    path.mkdir()
    (path / "of a tool").touch()


OF_THE_LAST = [
    *itertools.product((take_older,), ("json", "index", "data-*", "[id]*")),
    *itertools.product((make_folder,), ("json", "index", "data-*")),
    (os.remove, "*"),
]


def content_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def two_backups(tmp_path_factory):
    """A folder, and the training that it goes on with."""
    folder = tmp_path_factory.mktemp("two")
    undisturbed = train(kt.Backup(folder / "undisturbed"))
    last = kt.Backup(folder / "last", every=2)
    interrupted(last, 1, 3)
    return folder / "last", undisturbed


@pytest.mark.parametrize(
    ("damage", "of"), sample_of([*DAMAGES, *OF_THE_LAST], 5)
)
def test_of_two_backups_one_may_be_damaged(
    damage, of, two_backups, tmp_path, caplog
):
    shutil.copytree(two_backups[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "backup"
    assert len([*folder.glob("*.json")]) == 2
    for path in [*folder.glob(f"ckpt-5.{of}")]:
        damage(path)
    found = SavedTraining(tmp_path)
    found.read(SingleProcess(), model(), 0)
    assert (found.position.epoch, found.position.batch) == (1, 2)
    begin_again()
    kt.load_backup(model(), tmp_path)
    assert caplog.text.count("is damaged (ckpt-5: ") == 2
    assert caplog.text.count("ckpt-4, the backup before it, is used") == 2
    assert_equal(train(kt.Backup(tmp_path)), two_backups[1])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_backup_is_none_of_those_that_are_kept(tmp_path):
    saved = opened(tmp_path, same_everywhere(0))
    for epoch in 1, 2:
        commit(saved, saved._model, epoch)
    cut(tmp_path / "backup" / "ckpt-2.index")
    saved = opened(tmp_path, same_everywhere(0))
    assert saved.position.epoch == 1
    for epoch, wanted in (3, [1, 2, 3]), (4, [3, 4]):
        commit(saved, saved._model, epoch)
        names = CallFolder(str(tmp_path / "backup")).names()
        assert names == [f"ckpt-{number}" for number in wanted]


@pytest.mark.parametrize(("damage", "of"), sample_of(DAMAGES, 3))
def test_damaged_backups_are_refused_and_left(
    damage, of, two_backups, tmp_path
):
    shutil.copytree(two_backups[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "backup"
    for path in folder.glob(f"*.{of}"):
        damage(path)
    left = content_of(folder)
    for goes_on in (
        lambda: train(kt.Backup(tmp_path)),
        lambda: kt.load_backup(model(), tmp_path),
    ):
        begin_again()
        with pytest.raises(kt.TowerError, match=r"damaged.*delete it") as found:
            goes_on()
        assert "\n" not in str(found.value)
    assert content_of(folder) == left


def test_the_file_that_names_backups_may_be_lost(two_backups, tmp_path):
    """But not what it names."""
    shutil.copytree(two_backups[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "backup"
    make_folder(folder / "checkpoint")
    assert_equal(train(kt.Backup(tmp_path)), two_backups[1])
    folder.mkdir()
    (folder / "checkpoint").write_text('model_checkpoint_path: "ckpt-5"')
    begin_again()
    with pytest.raises(kt.TowerError, match="are lost: give them back"):
        train(kt.Backup(tmp_path))


def test_every_byte_counts(tmp_path):
    """One that is flipped is found, or changes nothing that is read."""
    saved = opened(tmp_path, same_everywhere(1))
    saved.commit()
    folder = CallFolder(str(tmp_path / "backup"))

    def values():
        facts = folder.read_notes("ckpt-1")
        reader = tf.train.load_checkpoint(folder.prefix("ckpt-1"))
        names = reader.get_variable_to_shape_map()
        return facts, {n: reader.get_tensor(n).tolist() for n in names}

    before, harmless = values(), 0
    for path in (tmp_path / "backup").glob("ckpt-1.*"):
        for at in range(0, path.stat().st_size, 17):
            flip(path, at)
            if not folder.damage("ckpt-1"):
                harmless += 1
                assert values() == before
            flip(path, at)
    assert folder.damage("ckpt-1") == ""
    assert harmless < 10


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_you_say(tmp_path, keep):
    last = kt.Backup(tmp_path, every=1, keep=keep, delete=False)
    train(last, towers=1)
    kept = [*(tmp_path / "backup").glob("*.json")]
    assert len(kept) == keep
    state = tf.train.get_checkpoint_state(str(tmp_path / "backup"))
    assert len(state.all_model_checkpoint_paths) == keep
    assert tf.train.latest_checkpoint(str(tmp_path / "backup"))
