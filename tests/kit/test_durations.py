"""A run fails where a test, or all of them, take much longer than before."""

import json

from tests.kit.durations import LISTED_S, Durations


def limits(folder, sum_s, probe_ms=1e3, files_s=(), **tests_s):
    file = folder / "limits.json"
    known = {"sum_s": sum_s, "probe_ms": probe_ms, "files_s": dict(files_s)}
    file.write_text(json.dumps({**known, "tests_s": tests_s}))
    return file


def test_what_is_too_long(tmp_path):
    file = limits(tmp_path, sum_s=20, probe_ms=2, known=10)
    durations = Durations("check", file)
    durations.probes = [1e-3]
    durations.taken |= {"known": 17, "new": 1.4 * LISTED_S}
    assert durations.too_long() == []
    durations.taken |= {"known": 21, "new": 1.6 * LISTED_S + 5}
    known, new, _ = durations.too_long()
    assert known.startswith("known: 21.0 s, more than 20.0")
    assert new.startswith("new: ")
    # A processor that is twice as slow.
    durations.probes = [4e-3]
    assert durations.too_long() == []
    durations.taken["known"] = 60
    assert len(durations.too_long()) == 3
    assert durations.found()["tests_s"] == {"known": 60, "new": 8.2}


def test_what_tests_share_may_be_made_by_another(tmp_path):
    before = {"a.py::one": 10, "a.py::two": 2}
    file = limits(tmp_path, 20, 2, {"a.py": 12}, **before)
    durations = Durations("check", file)
    durations.probes = [2e-3]
    durations.taken |= {"a.py::one": 2, "a.py::two": 10}
    assert durations.too_long() == []
    durations.taken["a.py::one"] = 10
    (two, _) = durations.too_long()
    assert two.startswith("a.py::two: 10.0 s")
