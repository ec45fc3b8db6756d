"""A store in a folder."""

import stat

from keras_towers.jobs.rendezvous.file_store import FileStore


def test_a_folder_that_holds_a_store_is_private(tmp_path):
    kept = FileStore(tmp_path / "job")
    kept.put("where", 1)
    assert kept.get("where") == 1
    assert stat.filemode((tmp_path / "job").stat().st_mode) == "drwx------"
