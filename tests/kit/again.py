"""What a launcher gives to the processes of a job that may start again."""

import itertools

import pytest

from keras_towers import elastic
from keras_towers.backups import saved_training
from keras_towers.foundation import settings


def begin_again():
    """Count calls of ``fit`` with a backup as a process that is new."""
    saved_training._calls.clear()


@pytest.fixture
def starts_again(tmp_path, monkeypatch):
    """Let this process commit; a call lets it begin as one that is new."""
    monkeypatch.setenv(settings.ENV_COMMITS, str(tmp_path / "commits"))
    monkeypatch.setenv(settings.ENV_SECRET, "of this job")

    def start():
        monkeypatch.setattr(elastic, "_numbers", itertools.count())
        begin_again()

    start()
    return start
