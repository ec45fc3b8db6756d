"""How hosts are written, and which of them are this machine."""

import pytest

from keras_towers.errors import TowerError
from keras_towers.rendezvous import hosts, network

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not ''"),
        ("a:1:2", "not 'a:1:2'"),
        ("a:0", "the host a needs at least one slot"),
        ("a:1,a:2", "the host a is given twice"),
        ("a;rm -rf:1", "not 'a;rm -rf:1'"),
    ],
)
def test_what_is_no_host_is_named(text, said):
    with pytest.raises(TowerError, match=said):
        hosts.parse_hosts(text)


def test_hosts_and_their_slots(tmp_path):
    found = hosts.parse_hosts("a:2, b-1.net:1,c")
    assert found == {"a": 2, "b-1.net": 1, "c": 1}
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\n\nb:3  # old\nc\n")
    assert hosts.parse_hostfile(path) == {"a": 2, "b": 3, "c": 1}
    for text, said in (("# none\n", "no host was"), ("a slots\n", "'a slots'")):
        path.write_text(text)
        with pytest.raises(TowerError, match=f"hostfile .*{said}"):
            hosts.parse_hostfile(path)


def test_which_hosts_are_this_machine():
    assert network.is_local("localhost")
    assert network.is_local("127.0.0.7")
    assert not network.is_local("192.0.2.1")  # An address for documents.
