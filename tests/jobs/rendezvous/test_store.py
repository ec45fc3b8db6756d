"""Which requests the store's server answers."""

import contextlib
import functools
import gc
import socket
import sys
import time
import urllib.error
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import store
from keras_towers.jobs.rendezvous.hosts import place_ranks
from keras_towers.jobs.rendezvous.signatures import (
    SIGNATURE,
    Endpoint,
    path_token,
)
from keras_towers.jobs.rendezvous.store import Progress
from keras_towers.jobs.rendezvous.store_server import StoreServer
from tests.kit.processes import wait_until
from tests.kit.scripts import run_python

SECRET = "ab" * 32


@pytest.fixture
def patient(monkeypatch):
    """The kernel keeps silent connections for longer than a test takes."""
    monkeypatch.setattr(settings, "SILENT_S", 60)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(settings, "HOLD_S", 0.5)
    started = StoreServer("127.0.0.1", secret=SECRET)
    port = started.endpoint.port
    started.begin_round(place_ranks(["h", "h"]))
    made = SimpleNamespace(
        url=f"http://127.0.0.1:{port}",
        path=f"/{path_token(SECRET)}:{port}",
        port=port,
        client=store.StoreClient(started.endpoint),
        values=started.values,
        here=started,
    )
    yield made
    if made.here is not None:
        started.stop()


def ask(server, method, path, body=None, headers=None):
    """The status of the answer."""
    request = urllib.request.Request(
        server.url + path, body, headers or {}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_requests_without_the_token_are_refused(server):
    wrong = path_token("cd" * 32)
    for prefix in ("", "/", f"/{wrong}", f"/{wrong}:{server.port}", "/é"):
        for method in ("GET", "PUT", "DELETE", "HEAD"):
            path = urllib.request.quote(f"{prefix}/worker_addresses/h:0")
            body = b"x" * 100_000 if method == "PUT" else None
            assert ask(server, method, path, body) == 403
    assert not server.values["worker_addresses"]
    path = f"{server.path}/worker_addresses/h:0"
    assert ask(server, "PUT", path, b"here") == 200
    assert server.values["worker_addresses"] == {"h:0": b"here"}
    # Only values are served.
    assert ask(server, "HEAD", path) == 403
    assert ask(server, "GET", f"{server.path}/worker_addresses") == 403


def test_values_that_are_too_large_are_refused(server, monkeypatch):
    """They are read before it is known who sends them."""
    monkeypatch.setattr(store, "MAX_BYTES", 10)
    path = f"{server.path}/worker_addresses/h:0"
    assert ask(server, "PUT", path, b"x" * 11) == 403
    assert ask(server, "PUT", path, b"x" * 10) == 200


def raw(server, *parts, pause_s=0.0):
    """What the server says on one connection until it closes that."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as link:
        for part in parts:
            # It may have closed it already.
            with contextlib.suppress(ConnectionError):
                link.sendall(part)
            time.sleep(pause_s)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while part := link.recv(1 << 16):
                said += part
        return said


def signed(server, method, path, body=b""):
    lines = (
        f"{method} {server.path}{path} HTTP/1.1",
        f"{SIGNATURE}: {server.here.endpoint.sign_request(method, path, body)}",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def test_requests_that_are_slow_cut_or_senseless_end_their_connection(
    server, monkeypatch
):
    monkeypatch.setattr(settings, "REQUEST_S", 0.5)
    monkeypatch.setattr(settings, "LOST_S", 1)
    put = signed(server, "PUT", "/keras_towers/mine", b"1234")
    begun = time.monotonic()
    # Nothing, a part of the head, of the body; byte by byte.
    for parts in ([], [put[:40]], [put[:-1]], [bytes([b]) for b in put[:90]]):
        assert raw(server, *parts, pause_s=0.02) == b""
    # No head, and one that does not end; what is sent after that is not read.
    for sent in (b"\r\n\r\n", b"\0\xff\r\n\r\n", b"x" * 50_000, put[:40] * 900):
        assert b" 200 " not in raw(server, sent)
    # Of a rank, but nothing that a rank sends.
    for path, body in (
        ("report", b"[0, {}]"),
        ("report", b"{}"),
        ("give", b"[0]"),
        ("setdefault", b"7"),
    ):
        sent = signed(server, "POST", f"/keras_towers/{path}", body)
        assert raw(server, sent) == b""
    assert time.monotonic() - begun < 30
    assert not server.values["keras_towers"]
    # The server serves all the same; and what is slow, but goes on.
    said = raw(server, put[:-2], put[-2:-1], put[-1:], pause_s=0.3)
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert server.client.get("mine") == 1234
    assert wait_until(lambda: len(server.here.connections) <= 1)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone waits so")
def test_a_client_that_has_sent_nothing_takes_no_file(patient, server):
    address = "127.0.0.1", server.port
    links = [socket.create_connection(address, 60) for _ in range(9)]
    time.sleep(0.3)
    assert not server.here.connections
    links[4].sendall(signed(server, "PUT", "/keras_towers/mine", b"1"))
    assert links[4].recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
    for link in links:
        link.close()


def test_a_server_that_is_stopped_at_once_leaves_nothing_open():
    """Nor connections that it is just accepting."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            started = StoreServer("127.0.0.1", secret=SECRET)
            address = "127.0.0.1", started.endpoint.port
            for link in [socket.create_connection(address) for _ in range(9)]:
                link.close()
            started.stop()
            del started
            gc.collect()
    assert not said


def test_a_connection_has_one_request(server):
    """What follows it is not read, though it be signed."""
    put = signed(server, "PUT", "/keras_towers/a", b"1")
    late = signed(server, "PUT", "/keras_towers/late", b"1")
    forged = put.replace(b"\r\n\r\n1", b"\r\n\r\n2")
    assert raw(server, put[:50], put[50:] + late).count(b" 200 OK") == 1
    assert b" 403 " in raw(server, forged)
    held = signed(server, "GET", "/keras_towers/b?hold=0.2")
    assert b" 404 " in raw(server, held, late)
    assert server.client.get("a") == 1 and server.client.get("late") is None


def test_threads_and_children_of_a_fork_ask_and_wait(server):
    client, number = server.client, 20
    with ThreadPoolExecutor(2 * number) as pool:
        waits = [pool.submit(client.get, f"k{n}", 60) for n in range(number)]
        asks = [pool.submit(client.setdefault, "x", n) for n in range(number)]
        assert len({ask.result(60) for ask in asks}) == 1
        for n in range(number):
            client.put(f"k{n}", n)
        assert [wait.result(60) for wait in waits] == [*range(number)]
    assert wait_until(lambda: not server.here.connections)
    child = run_python("-c", _FORKED, repr(astuple(server.here.endpoint)))
    assert (child.stdout, child.returncode) == ("1\n2\n", 0), child.stderr
    # Those that wait when the server ends hear of it.
    waits = ThreadPoolExecutor().submit(client.get, "never", 60)
    assert wait_until(lambda: server.here.connections)
    server.here.stop()
    with pytest.raises(ConnectionError):
        waits.result(60)
    server.here = None


_FORKED = """
import os, sys, threading
from keras_towers.jobs.rendezvous.store import StoreClient
from keras_towers.jobs.rendezvous.signatures import Endpoint
client = StoreClient(Endpoint(*eval(sys.argv[1])))
threading.Thread(target=client.get, args=("z", 9)).start()
client.put("y", 1)
print(client.get("y"), flush=True)
if os.fork() == 0:
    client.put("z", 2)
    print(client.get("z"), flush=True)
    os._exit(0)
os.wait()
"""


def test_the_list_of_what_all_ranks_give_is_there_when_all_have(server):
    client, size = server.client, 12
    for rank in reversed(range(1, size)):
        missing, found = client.give("list", rank, size, {"rank": rank})
        assert missing.number == rank and missing.some == [*range(min(8, rank))]
        assert found is None and client.get("list") is None
    assert missing.named(missing.some) == "0"
    # It may be given again, as by a rank that has been restarted; and awaited.
    again = "list", 1, size, "again"
    assert client.give(*again, 0.1) == (([0], 1), None)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.give, *again, 60)
        others = [{"rank": rank} for rank in range(2, size)]
        whole = ["again", *others]
        assert client.give("list", 0, size, None) == (([], 0), whole)
        assert waits.result(60) == (([], 0), whole)
    assert client.give(*again) == (([], 0), whole)
    # Nothing is as short for many ranks.
    client.give("all", 0, 2, None)
    assert client.give("all", 1, 2, None, 0.1, "other") == (([], 0), None)
    assert client.get("all") == []


def test_what_ranks_add_says_whether_another_one_has_added_it(server):
    client = server.client
    for rank in (3, 1, 3, 2):
        client.add("waiting", rank, ["a", f"b {rank}"])
    of_one = {f"b {rank}": [rank] for rank in (3, 1, 2)}
    assert client.get("waiting") == {"a": [3, 1], **of_one}


def test_a_scope_that_all_ranks_delete_is_empty(server):
    """Otherwise ranks that reconnect would find outdated addresses."""
    path = f"{server.path}/global"
    for begun in range(2):
        for rank in range(2):
            assert ask(server, "PUT", f"{path}/{rank}", b"here") == 200
        for rank in range(2):
            assert ask(server, "GET", f"{path}/0") == 200, begun
            assert ask(server, "DELETE", f"{path}/{rank}") == 200
        assert ask(server, "GET", f"{path}/0") == 404
    # Others belong to one alone.
    own = f"{server.path}/own/0"
    asked = [ask(server, method, own) for method in ("PUT", "DELETE", "GET")]
    assert asked == [200, 200, 404]


def test_a_request_that_waits_is_answered_when_the_value_is_written(
    server, monkeypatch
):
    monkeypatch.setattr(settings, "HOLD_S", 60)
    with ThreadPoolExecutor(3) as pool:
        client, path = server.client, f"{server.path}/global/1"
        waits = [
            pool.submit(client.get, "mine", 60),
            # As Horovod's own clients ask, which do not say that they wait.
            pool.submit(ask, server, "GET", path),
        ]
        # Whoever does not wait is answered at once.
        assert client.get("mine") is None
        assert client.get("another", 0.1) is None
        assert not any(wait.done() for wait in waits)
        client.put("another", 1)
        client.put("mine", 3)
        assert waits[0].result(60) == 3
        assert ask(server, "PUT", path, b"here") == 200
        assert waits[1].result(60) == 200


def test_a_forged_stall_key_is_not_believed(server):
    server.client.put("stall-1", "right")
    path, body = "/keras_towers/stall-1", b'"forged"'
    sign, another = (
        Endpoint("127.0.0.1", server.port, secret).sign_request
        for secret in (SECRET, "another")
    )
    right = sign("PUT", path, body)
    for signed in (
        *(None, "0" * 64, another("PUT", path, body)),
        *(sign("GET", path, body), sign("PUT", path, b"")),
        sign("PUT", "/keras_towers/stall-2", body),
    ):
        headers = {SIGNATURE: signed} if signed else {}
        assert ask(server, "PUT", server.path + path, body, headers) == 403
    assert ask(server, "PUT", path, body, {SIGNATURE: right}) == 403
    assert server.client.get("stall-1") == "right"
    # Nor is a value left where there is none yet.
    other = server.path + "/keras_towers/setdefault"
    assert ask(server, "POST", other, body, {SIGNATURE: right}) == 403
    assert [server.client.setdefault("facts", n) for n in (1, 2)] == [1, 1]
    accepted = {SIGNATURE: right}
    assert ask(server, "PUT", server.path + path, body, accepted) == 200
    assert server.client.get("stall-1") == "forged"


def test_the_store_of_another_job_is_not_used(monkeypatch):
    assert SECRET not in path_token(SECRET)
    monkeypatch.setenv(settings.ENV_SECRET, SECRET)
    monkeypatch.setenv(settings.ENV_STORE, "127.0.0.1:1")
    monkeypatch.delenv(store.HOROVODS_ADDRESS, raising=False)
    assert store.store_of_job()
    # Under Horovod's own launcher, in a rank of ours, and there.
    monkeypatch.setenv(store.HOROVODS_ADDRESS, "127.0.0.1")
    assert store.store_of_job() is None
    ours = f"127.0.0.1:1/{path_token(SECRET)}"
    monkeypatch.setenv(store.HOROVODS_ADDRESS, ours)
    assert store.store_of_job()


def test_what_a_rank_says_again_is_unchanged(server):
    for changes in (1, 2, 2):
        for rank in range(2):
            progress = Progress(2, 5, [0, 0, changes], "step 3", True)
            found = server.client.report(rank, progress)
    assert found["awaited"] == {"rank 0": "waits there, too"}
    # One of many is behind, although this rank does not look at it.
    for rank in range(2):
        for _ in range(2):
            found = server.client.report(rank, Progress(3, 5, [0, 0, 2]))
    assert found["awaited"] == {"rank 2": "has given no sign of life"}


def test_only_some_of_many_late_ranks_are_named(server, monkeypatch):
    monkeypatch.setattr(settings, "MAX_RANKS_NAMED", 2)
    silent = "has given no sign of life"
    step = Progress(6, 5, [0, 1, 0], "step 1")
    reply = server.client.report(2, step)
    named = {"rank 0": silent, "rank 1": silent, "3 more": "likewise"}
    assert reply == {"awaited": named, "apart": {}, "gone": {}}
    monkeypatch.setattr(settings, "MAX_RANKS_CHECKED", 1)
    server.client.report(3, step)
    assert server.client.report(2, step)["awaited"] == {}
    # Those of a new round report anew.
    server.here.begin_round(place_ranks(["h"] * 6))
    late = server.client.report(2, Progress(6, 5))["awaited"]
    assert late == {"rank 3": silent}


def test_a_rank_that_is_gone_is_named_with_its_error(server):
    server.here.gone[1] = "rank 1 on h", "has ended"
    report = functools.partial(server.client.report, 0, Progress(2, 5))
    assert report()["gone"] == {"rank 1 on h": "has ended"}
    server.client.put(f"{store.ERROR}1", ("Boom: my bug", False))
    assert report()["gone"] == {"rank 1 on h (Boom: my bug)": "has ended"}
    server.here.begin_round(place_ranks(["h"] * 2))
    assert report()["gone"] == {}


def test_a_wait_has_a_limit():
    values = iter([None, None, 3])
    assert store.wait_for(lambda left_s: next(values), 60) == 3
    asked = []
    with pytest.raises(TimeoutError, match="not written after 0.05 s"):
        # As often as there is time for, also within the last pause.
        store.wait_for(asked.append, 0.05)
    assert len(asked) > 1 and asked[0] == 0.05 and asked[-1] == 0


def test_a_forged_answer_is_not_believed():
    class Forger(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'"forged"')

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Forger) as forger:
        Thread(target=forger.handle_request, daemon=True).start()
        client = store.StoreClient(
            store.Endpoint(*forger.server_address, SECRET)
        )
        with pytest.raises(OSError, match="signature is wrong"):
            client.get("plan")
