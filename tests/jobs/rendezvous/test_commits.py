"""What the launcher knows of a job's backups."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import commits, store
from keras_towers.jobs.rendezvous.hosts import place_ranks

pytestmark = pytest.mark.core


@pytest.fixture
def server(job_store, monkeypatch):
    """The store of a job, of which this process is rank 0."""
    for name, value in place_ranks(["a", "b"])[0].environment.items():
        monkeypatch.setenv(name, value)
    return job_store


def test_a_rank_that_does_not_find_the_last_backup_says_so(server, tmp_path):
    path = str(tmp_path / "backup")
    commits.check_last(path, [0, 0])
    commits.report_last(path, [1, 12])
    # In the next round, too.
    server.begin_round(())
    for found in ([1, 12], [2, 0]):
        commits.check_last(path, found)
    for found in ([1, 11], [0, 0]):
        with pytest.raises(TowerError, match="every host that may have rank 0"):
            commits.check_last(path, found)
    # Another call of `fit` has another file.
    commits.check_last(str(tmp_path / "backup-1"), [0, 0])
    # It has ended, and its backup was deleted.
    commits.report_last(path, [])
    commits.check_last(path, [0, 0])


def test_ranks_are_told_to_make_a_backup_where_they_can(server):
    assert server.get(store.RESUMES) is None
    for resumes in (True, False):
        commits.report_resumes(resumes)
        assert server.get(store.RESUMES) is resumes
    commits.report_resumes(True)
    # The processes of the next round have yet to say so.
    server.begin_round(())
    assert server.get(store.RESUMES) is None


def test_all_ranks_get_what_rank_0_has(server, monkeypatch):
    assert commits.is_rank_0() and commits.has_other_ranks()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv("HOROVOD_RANK", "1")
        key = f"shared-{next(commits._shared) + 1}"
        other = pool.submit(commits.share, b"of rank 1")
        server.write(store.SCOPE, key, b"of rank 0")
        assert other.result(20) == b"of rank 0"
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert commits.share(b"mine") == b"mine"
    monkeypatch.setattr(store, "MAX_BYTES", 10)
    with pytest.raises(TowerError, match="have 11 bytes, but may have 10"):
        commits.share(b"a" * 11)


def test_files_are_signed(monkeypatch):
    monkeypatch.setenv(settings.ENV_SECRET, "one")
    signed = commits.sign(b"content")
    assert commits.verify(signed) == b"content"
    for other in (signed[:-1] + b"T", b"", b"content"):
        with pytest.raises(TowerError, match="was not written by this job"):
            commits.verify(other)
