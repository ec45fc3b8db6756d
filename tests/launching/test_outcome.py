"""Whose fault it is."""

from dataclasses import dataclass

import pytest

from keras_towers.launching.outcome import Blame, blame, describe

pytestmark = pytest.mark.core


@dataclass
class Ended:
    code: int
    text: str = ""

    def tail(self) -> str:
        return self.text


SHUT_DOWN = "UnknownError: Horovod has been shut down. This was caused by"
LOST = "Gloo: Read error [127.0.0.1]: Connection reset by peer"


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ([Ended(0), Ended(0)], None),
        ([Ended(0), Ended(3)], Blame(1, True)),
        ([Ended(1, "ValueError"), Ended(1, SHUT_DOWN)], Blame(0, True)),
        # The rank that raised is the last one to be gone.
        ([Ended(1, SHUT_DOWN), Ended(1, "ValueError")], Blame(1, True)),
        ([Ended(1, LOST), Ended(137)], Blame(1, True)),
        ([Ended(1, LOST), Ended(134, LOST), Ended(9)], Blame(2, True)),
        ([Ended(1, SHUT_DOWN), Ended(0)], Blame(0, False)),
    ],
)
def test_the_first_that_failed_by_itself(ended, expected):
    assert blame(ended) == expected


@pytest.mark.parametrize(
    ("code", "host", "shown", "said"),
    [
        (1, None, True, "rank 1 ended with exit code 1; its last lines are"),
        (1, None, False, "rank 1 ended with exit code 1"),
        (137, None, True, "rank 1 was killed by SIGKILL"),
        (139, None, True, "rank 1 was killed by SIGSEGV"),
        (200, None, False, "rank 1 ended with exit code 200"),
        (255, "b", True, "rank 1: lost the ssh connection to b"),
        (255, None, False, "rank 1 ended with exit code 255"),
    ],
)
def test_what_is_said(code, host, shown, said):
    assert describe("rank 1", code, host, shown).startswith(said)
