"""Which requests the store's server answers."""

import stat
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from keras_towers import settings
from keras_towers.rendezvous import activity, store
from keras_towers.rendezvous.hosts import place_ranks
from keras_towers.rendezvous.store import (
    SIGNATURE,
    Progress,
    path_token,
    sign_request,
)
from keras_towers.rendezvous.store_server import (
    Report,
    StoreServer,
    awaited_ranks,
    ranks_apart,
)

SECRET = "ab" * 32


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(settings, "HOLD_S", 0.5)
    started = StoreServer("127.0.0.1", secret=SECRET)
    port = started.endpoint.port
    started.begin_round(place_ranks(["h", "h"]))
    yield SimpleNamespace(
        url=f"http://127.0.0.1:{port}",
        path=f"/{path_token(SECRET)}:{port}",
        port=port,
        client=store.StoreClient(started.endpoint),
        values=started.values,
        here=started,
    )
    started.stop()


def ask(server, method, path, body=None, headers=None):
    """The status of the answer."""
    request = urllib.request.Request(
        server.url + path, body, headers or {}, method=method
    )
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
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


def test_values_that_are_too_large_are_refused(server, monkeypatch):
    """They are read before it is known who sends them."""
    monkeypatch.setattr(store, "MAX_BYTES", 10)
    path = f"{server.path}/worker_addresses/h:0"
    assert ask(server, "PUT", path, b"x" * 11) == 403
    assert ask(server, "PUT", path, b"x" * 10) == 200


def test_only_values_are_served(server, tmp_path, monkeypatch):
    """And no files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("")
    assert ask(server, "HEAD", f"{server.path}/private/key") == 403
    assert ask(server, "GET", f"{server.path}/private/key") == 404
    assert ask(server, "GET", f"{server.path}/private") == 403


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
    right = sign_request(SECRET, "PUT", path, body)
    for signed in (
        *(None, "0" * 64, sign_request("another", "PUT", path, body)),
        *(
            sign_request(SECRET, "GET", path, body),
            sign_request(SECRET, "PUT", path, b""),
        ),
        sign_request(SECRET, "PUT", "/keras_towers/stall-2", body),
    ):
        headers = {SIGNATURE: signed} if signed else {}
        assert ask(server, "PUT", server.path + path, body, headers) == 403
    assert ask(server, "PUT", path, body, {SIGNATURE: right}) == 403
    assert server.client.get("stall-1") == "right"
    # Nor is a value left where there is none yet.
    other = server.path + "/keras_towers/facts"
    assert ask(server, "POST", other, body, {SIGNATURE: right}) == 403
    assert [server.client.setdefault("facts", n) for n in (1, 2)] == [1, 1]
    accepted = {SIGNATURE: right}
    assert ask(server, "PUT", server.path + path, body, accepted) == 200
    assert server.client.get("stall-1") == "forged"


def test_no_proxy_is_asked(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server.client.put("mine", 3)
    assert server.client.get("mine") == 3


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


STEP = "step 3"
PREPARES = "the preparation of step 3"


def reports_of(*progress, silent_s=0, since_s=9):
    """What ranks have said, the last ones so long ago."""
    ages = [0, *[silent_s] * len(progress[1:])]
    return {
        rank: Report(100 - age, 100 - age - since_s, one)
        for rank, (age, one) in enumerate(zip(ages, progress, strict=True))
        if one
    }


@pytest.mark.parametrize(
    ("its", "silent_s", "found"),
    [
        (None, 0, "has given no sign of life"),
        (([0, 3, 7], STEP), 9, "has stopped giving signs of life"),
        (([0, 3, 7], STEP), 1, None),
        (([0, 2, 9], "step 2 of fit"), 1, "was last seen in step 2 of fit"),
        # It does something else, as a callback that sleeps.
        (
            ([0, 2, 9], "step 2 of fit", False, True),
            1,
            "was last seen after step 2 of fit",
        ),
        # It has not begun the exchange in which this rank waits.
        (([0, 3, 6], STEP), 1, f"was last seen in {STEP}"),
        (([0, 0, 0], ""), 1, "is outside of training"),
        (([0, 4, 7], "step 4"), 1, None),
        # It has not connected again since a call has failed.
        (([-1, 9, 9], STEP, True), 1, f"is in {STEP}"),
        # It waits, too, but for something else.
        (
            ([0, 3, 7], "the end of epoch 1", True),
            1,
            "is in the end of epoch 1",
        ),
        # It has not reached the action in which this rank waits.
        (([0, 3, 7], PREPARES), 1, f"was last seen in {PREPARES}"),
    ],
)
def test_a_report_returns_which_ranks_are_late(its, silent_s, found):
    other = its and Progress(2, 5, *its)
    reports = reports_of(
        Progress(2, 5, [0, 3, 7], STEP), other, silent_s=silent_s
    )
    assert awaited_ranks(0, reports) == ({"rank 1": found} if found else {})


def waiting(position=(0, 3, 7), action=STEP, waits=True, **more):
    return Progress(2, 5, list(position), action, waits, **more)


TOO = "waits there, too"


@pytest.mark.parametrize(
    ("mine", "its", "since_s", "found"),
    [
        (waiting(), waiting(), 9, TOO),
        # What it sent last does not arrive here.
        (waiting(), waiting((0, 4, 8), "step 4"), 9, "is in step 4"),
        (waiting(), waiting((0, 4, 8), "", False), 9, "is outside of training"),
        # They may go on.
        (waiting(), waiting(), 0, None),
        # It computes, as all do.
        (waiting(waits=False), waiting(waits=False), 9, None),
        # The other has not come to the exchange, and is late.
        (
            waiting(),
            waiting((0, 3, 6), waits=False),
            0,
            f"was last seen in {STEP}",
        ),
    ],
)
def test_ranks_that_all_wait_are_told_so(mine, its, since_s, found):
    reports = reports_of(mine, its, since_s=since_s)
    assert awaited_ranks(0, reports) == ({"rank 1": found} if found else {})


IN_STEP = {"exchanges": ["sum"]}
IN_PYTHON = {"exchanges": ["gather"], "in_python": True}


@pytest.mark.parametrize(
    ("its", "since_s", "are_apart"),
    [
        (waiting(**IN_STEP), 9, True),
        (waiting(exchanges=["other"], in_python=True), 9, True),
        (waiting(**IN_STEP), 0, False),
        (waiting(**IN_PYTHON), 9, False),
        (waiting(exchanges=["gather", "sum"]), 9, False),
        # It has begun the exchange of this rank, or this rank may begin its.
        (waiting((0, 3, 8), **IN_STEP), 9, False),
        (waiting((0, 3, 6), **IN_STEP), 9, False),
        (waiting(), 9, False),
    ],
)
def test_ranks_in_exchanges_that_never_meet(its, since_s, are_apart):
    mine = waiting(does="compares the model", **IN_PYTHON)
    reports = reports_of(mine, its, since_s=since_s)
    both = {"rank 0": "compares the model", "rank 1": f"is in {STEP}"}
    assert ranks_apart(0, reports) == (both if are_apart else {})
    assert ranks_apart(1, reports) == (both if are_apart else {})


@pytest.mark.parametrize(
    ("its", "since_s", "waits_in_vain"),
    [
        # Rank 0 waits for this one, however far it is.
        (waiting((0, 5, 9), **IN_PYTHON), 9, True),
        (waiting((0, 3, 6), **IN_STEP), 9, True),
        # It computes, or may go on.
        (waiting(), 9, False),
        (waiting(**IN_PYTHON), 0, False),
    ],
)
def test_rank_0_waits_and_will_not_save(its, since_s, waits_in_vain):
    saves = {"exchanges": [activity.SAVE], "in_python": True}
    mine = waiting(does="waits for a save", **saves)
    reports = reports_of(its, mine, since_s=since_s)
    both = {"rank 0": f"is in {STEP}", "rank 1": "waits for a save"}
    assert ranks_apart(1, reports) == (both if waits_in_vain else {})
    # It can go on once the other one has its error.
    assert ranks_apart(0, reports) == {}
    # Only rank 0 saves: nobody waits for another one.
    others = reports_of(waiting(), waiting(**IN_PYTHON), mine, since_s=since_s)
    assert ranks_apart(2, others) == {}
    assert ranks_apart(1, others) == {}


def test_graphs_may_begin_exchanges_in_another_order():
    mine, its = waiting(**IN_STEP), waiting(exchanges=["other"])
    assert ranks_apart(0, reports_of(mine, its)) == {}


def test_what_a_rank_says_again_is_unchanged(server):
    for changes in (1, 2, 2):
        for rank in range(2):
            found = server.client.report(rank, waiting((0, 0, changes)))
    assert found["awaited"] == {"rank 0": TOO}
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


def test_a_wait_has_a_limit():
    assert store.wait_for(iter([None, None, 3]).__next__, 60) == 3
    asked = []
    with pytest.raises(TimeoutError, match="not written after 0.05 s"):
        # As often as there is time for, also within the last pause.
        store.wait_for(lambda: asked.append(0), 0.05)
    assert len(asked) > 1


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


def test_a_folder_that_holds_a_store_is_private(tmp_path):
    kept = store.FileStore(tmp_path / "job")
    kept.put("where", 1)
    assert kept.get("where") == 1
    assert stat.filemode((tmp_path / "job").stat().st_mode) == "drwx------"
