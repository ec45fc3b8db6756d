"""What tests of ranks that meet have in common."""

import pytest

from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import store
from keras_towers.jobs.rendezvous.store_server import StoreServer


@pytest.fixture
def job_store(monkeypatch):
    """The store of a job to which this process belongs."""
    server = StoreServer("127.0.0.1")
    at = f"{server.endpoint.address}:{server.endpoint.port}"
    monkeypatch.setenv(settings.ENV_STORE, at)
    monkeypatch.setenv(settings.ENV_SECRET, server.endpoint.secret)
    monkeypatch.delenv(store.HOROVODS_ADDRESS, raising=False)
    yield server
    server.stop()
