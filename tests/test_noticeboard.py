"""What processes on one machine leave for one another."""

import pytest

from keras_towers import noticeboard

pytestmark = pytest.mark.core


def test_values_are_left_and_replaced(tmp_path, monkeypatch):
    monkeypatch.delenv(noticeboard.FOLDER, raising=False)
    assert noticeboard.from_environment() is None
    monkeypatch.setenv(noticeboard.FOLDER, str(tmp_path))
    mine, other = (noticeboard.from_environment() for _ in range(2))
    assert other.get("key") is None
    for value in (b"one", b""):
        mine.put("key", value)
        assert other.get("key") == value
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_folder_that_is_gone(tmp_path):
    board = noticeboard.Noticeboard(tmp_path / "gone")
    for ask in (lambda: board.get("key"), lambda: board.put("key", b"")):
        with pytest.raises(OSError):
            ask()
