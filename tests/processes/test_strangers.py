"""What others on the machine can do to an elastic job."""

import base64
import os
import pickle
import urllib.error
import urllib.request

import psutil
import pytest

from keras_towers import rendezvous
from tests.launching.jobs import Launched


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def put(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, method="PUT"
    )
    try:
        return urllib.request.urlopen(request, timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code


def listening(process):
    return {
        connection.laddr
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
def test_they_find_loopback_alone_and_are_refused(tmp_path):
    (tmp_path / "stay").touch()
    job = Launched(
        tmp_path,
        ("--min-np", "2", "--verbose", "-m", "tests.processes.enduring")
        + (str(tmp_path), "default", "1", "4"),
        # A proxy that nobody may be asked through.
        http_proxy="http://127.0.0.1:9",
    )
    try:
        job.wait_for(tmp_path / "steps", lines=20)
        launcher = psutil.Process(job.process.pid)
        family = job.family()
        everything = [a for p in (launcher, *family) for a in listening(p)]
        assert {address.ip for address in everything} == {"127.0.0.1"}
        ((_, port),) = listening(launcher)
        body = base64.b64encode(pickle.dumps(Payload(tmp_path / "ran")))
        assert put(port, "/worker_addresses/127.0.0.1:0", body) == 403
        for rank in range(2):
            assert put(port, f"/keras_towers/stall-{rank}", b"{}") == 403
        assert put(port, "/keras_towers/hosts_updated", b"[9e9, 1]") == 403
        ranks = [
            process
            for process in family
            if rendezvous.SECRET in process.environ()
        ]
        assert len(ranks) == 2
        secret = ranks[0].environ()[rendezvous.SECRET]
        for process in (launcher, *family):
            line = " ".join(process.cmdline())
            assert secret not in line
            assert rendezvous.token(secret) not in line
    finally:
        (tmp_path / "stay").unlink()
        done = job.finish(60)
    assert done.code == 0, done.out + done.err
    assert done.out.count("as undisturbed after 1 epochs") == 2
    assert not (tmp_path / "ran").exists()
