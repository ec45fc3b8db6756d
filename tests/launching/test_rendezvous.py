"""Who may ask the rendezvous server what."""

import base64
import os
import pickle
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from keras_towers import rendezvous
from keras_towers.launching.rendezvous import (
    RendezvousServer,
    elastic_handler,
    horovod,
)
from keras_towers.launching.slots import slots
from keras_towers.launching.values import ValuesHandler
from keras_towers.rendezvous import SIGNATURE, Rendezvous, sign, token
from keras_towers.transport.stall import Progress, Store

SECRET = rendezvous.new_secret()


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def of_horovod():
    """The handler of an elastic job."""
    driver = SimpleNamespace(register_worker_server=lambda *args: None)
    module = horovod("runner.elastic.rendezvous")
    return elastic_handler(
        module.create_rendezvous_handler(driver),
        SimpleNamespace(hold=lambda *args: None),
        print,
    )


@pytest.fixture(params=[of_horovod, lambda: ValuesHandler])
def server(request):
    started = RendezvousServer("127.0.0.1", SECRET)
    port = started.start(request.param())
    started.init(slots(["h", "h"]))
    yield SimpleNamespace(
        elastic=request.param is of_horovod,
        url=f"http://127.0.0.1:{port}",
        path=f"/{token(SECRET)}:{port}",
        address=f"127.0.0.1:{port}/{token(SECRET)}",
        port=str(port),
    )
    started.stop()


def ask(server, method, path, body=None, headers=None):
    """The status of the answer."""
    request = urllib.request.Request(
        server.url + path, body, headers or {}, method=method
    )
    try:
        return urllib.request.urlopen(request, timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_forged_worker_address_is_not_unpickled(server, tmp_path):
    payload = pickle.dumps(Payload(tmp_path / "ran"))
    body = base64.b64encode(payload)
    wrong = token(rendezvous.new_secret())
    for prefix in ("", "/", f"/{wrong}", f"/{wrong}:{server.port}", "/é"):
        path = urllib.request.quote(f"{prefix}/worker_addresses/h:0")
        assert ask(server, "PUT", path, body) == 403
    assert not (tmp_path / "ran").exists()
    if not server.elastic:
        return
    # It would have run.
    with pytest.raises(OSError):
        ask(server, "PUT", f"{server.path}/worker_addresses/h:0", body)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
def test_nothing_is_answered_without_the_token(server, method):
    body = b"x" * 100_000 if method == "PUT" else None
    for path in ("/", "/global/0", "/rank_and_size/h:0", "/a/b/c"):
        assert ask(server, method, path, body) == 403


def test_only_values_are_served_never_files(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("")
    assert ask(server, "HEAD", f"{server.path}/private/key") == 403
    assert ask(server, "GET", f"{server.path}/private/key") == 404
    assert ask(server, "GET", f"{server.path}/private") == 403


def test_a_scope_that_all_ranks_give_up_is_empty(server):
    """Else who connects again would find the addresses of before."""
    path = f"{server.path}/global"
    for begun in range(2):
        for rank in range(2):
            assert ask(server, "PUT", f"{path}/{rank}", b"here") == 200
        for rank in range(2):
            assert ask(server, "GET", f"{path}/0") == 200, begun
            assert ask(server, "DELETE", f"{path}/{rank}") == 200
        assert ask(server, "GET", f"{path}/0") == 404
    # Others belong to one alone.
    assert ask(server, "PUT", f"{server.path}/own/0", b"mine") == 200
    assert ask(server, "DELETE", f"{server.path}/own/0") == 200
    assert ask(server, "GET", f"{server.path}/own/0") == 404


def test_a_forged_stall_key_is_not_believed(server):
    store = Store(Rendezvous(server.address, server.port, SECRET))
    store.put(1, Progress(7, "step 3"))
    path, body = "/keras_towers/stall-1", b'{"position": 1}'
    right = sign(SECRET, "PUT", path, body)
    forged = [
        {},
        {SIGNATURE: "0" * 64},
        {SIGNATURE: sign("another", "PUT", path, body)},
        {SIGNATURE: sign(SECRET, "GET", path, body)},
        {SIGNATURE: sign(SECRET, "PUT", "/keras_towers/stall-2", body)},
        {SIGNATURE: sign(SECRET, "PUT", path, b"")},
    ]
    for headers in forged:
        assert ask(server, "PUT", server.path + path, body, headers) == 403
    assert ask(server, "PUT", path, body, {SIGNATURE: right}) == 403
    assert store.get(1) == Progress(7, "step 3")
    accepted = {SIGNATURE: right}
    assert ask(server, "PUT", server.path + path, body, accepted) == 200
    assert store.get(1) == Progress(1)


def test_the_secret_cannot_be_read_off_the_token():
    assert SECRET not in token(SECRET)
    assert token(SECRET) != token(rendezvous.new_secret())


def test_no_proxy_is_asked(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    store = Store(Rendezvous(server.address, server.port, SECRET))
    store.put(0, Progress(3))
    assert store.get(0) == Progress(3)


def test_horovods_own_client_sends_the_token(server):
    client = horovod("runner.http.http_client")
    there = server.address, server.port
    client.put_data_into_kvstore(*there, "some", "thing", {"a": 1})
    read = client.read_data_from_kvstore(*there, "some", "thing")
    assert read == {"a": 1}


def test_no_pickle_is_taken_from_a_network():
    taken, said = [], []

    class Base:
        def _put_value(self, scope, key, value):
            taken.append(scope)

    def put(address):
        handler = elastic_handler(Base, SimpleNamespace(), said.append)()
        handler.server = SimpleNamespace(server_address=(address, 1))
        handler._put_value("worker_addresses", "h:0", b"")

    put("192.0.2.1")
    assert not taken
    assert "not told when hosts are added" in said[0]
    put("127.0.0.1")
    assert taken == ["worker_addresses"]


def test_a_secret_of_another_job_is_not_used(monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, SECRET)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    assert not rendezvous.from_environment().signed
    monkeypatch.setenv(
        "HOROVOD_GLOO_RENDEZVOUS_ADDR", f"127.0.0.1:1/{token(SECRET)}"
    )
    assert rendezvous.from_environment().signed
