"""The benchmark's tables and its JSON file."""

import io
import json
import re

from rich.console import Console

from keras_towers.bench import rows
from keras_towers.bench.report import show_report, write_json
from tests.bench.shared import ADOPTION, FACTS, samples_of

TOWERS = [
    sample
    for towers in (2, 4)
    for sample in samples_of(
        rows.TOWERS,
        {
            "plain": [[10.0], [20.0]],
            "stock-default": [[20.0], [30.0]],
            "towers": [[5.0], [10.0]],
            "towers-cpu": [[5.0], [10.0]],
        },
        towers,
        mode="cpu",
    )
]
PROCESSES = samples_of(
    rows.PROCESSES,
    {
        "compute": [[10.0]],
        "strategy": [{"step_ms": [12.0], "how": "shared memory"}],
        "stock-loop": ["exit code 1"],
    },
)


def shown(samples, width=80):
    console = Console(file=io.StringIO(), width=width)
    show_report(console, FACTS, samples)
    return console.file.getvalue()


def test_table_of_towers():
    text = shown(TOWERS)
    assert re.search(r" 2 +plain \(cpu\) +15\.0 +1\.00 +0\.58 ", text)
    # Numbers of towers are told once, each above its rows.
    assert re.search(
        r"\n +stock-default \(cpu\) \* +25\.0 +1\.75 +1\.00 ", text
    )
    assert re.search(r"\n +1\.50–2\.00", text)
    assert re.search(r"\n +towers \(cpu\) +7\.50 +0\.50 ", text)
    # Its name says so.
    assert re.search(r"\n +towers-cpu +7\.50 ", text)
    assert re.search(r"\n +\n +4 +plain ", text)
    assert "1.75 1.50–2.00" in shown(TOWERS, width=120)
    assert "a processor, 2 cores, no GPU; TensorFlow 2.21.0, Keras 3.1" in text
    assert "until it trains" not in text


def test_table_of_what_a_row_needs_until_it_trains():
    needs = [("plain", 2.5), ("stock-one-device", 10.0), ("towers", 5.0)]
    found = {
        row: [{"first_step_s": s, "memory_mb": 50 * s}] for row, s in needs
    }
    text = shown(samples_of(rows.TOWERS, found))
    _, _, table = text.partition("until it trains")
    assert re.search(r" towers +5\.0 s +2\.00 +0\.50 +250 MB +2\.00 +0", table)
    assert re.search(r"memory:\s+growth", table)


def test_table_of_processes():
    text = shown(PROCESSES)
    assert re.search(r" 2 +compute +10\.0 +– +– +0\.10 s", text)
    assert re.search(r"strategy \(shared memory\) +12\.0 +2\.00 +–", text)
    assert re.search(r"stock-loop failed +– +– +– +–", text)
    assert "failed: large, 2 processes, stock-loop\nexit code 1\n" in text
    assert "strategy: HorovodStrategy(); strategy-NAME" in text
    assert "horovod-raw:" not in text


def test_table_of_adoption():
    text = shown(ADOPTION)
    row = r" 2 +towers +9\.000 s +2\.000 s +4\.0 +2\.500 s +5\.0 "
    assert re.search(row, text)
    assert re.search(r"\n +async failed +– +– +– +– +– ", text)
    assert "failed: adoption, 2 towers, async\n[bad]" in text


DOCUMENTED = {
    "training": "model towers strategy step_ms to_plain to_stock_default "
    "to_best_stock best_stock epoch_cost_s first_step_s first_step_s_to_plain "
    "first_step_s_to_best_stock memory_mb memory_mb_to_plain "
    "memory_mb_to_best_stock mode failed",
    "processes": "model processes row step_ms cost_ms to_raw epoch_cost_s "
    "first_step_s memory_mb how failed",
    "adoption": "towers strategy megabytes copy_s first_adopt_s adopt_s "
    "release_s failed",
}


def test_json_has_the_documented_names(tmp_path):
    path = tmp_path / "bench.json"
    write_json(path, FACTS, {"batches": 3}, [*TOWERS, *PROCESSES, *ADOPTION])
    document = json.loads(path.read_text())
    assert document["machine"] == FACTS
    assert document["settings"] == {"batches": 3}
    for kind, keys in DOCUMENTED.items():
        assert list(document[kind][0]) == keys.split()
    assert list(document["training"][0]["step_ms"]) == ["median", "low", "high"]
    counts = [len(document[kind]) for kind in DOCUMENTED]
    assert counts == [8, 3, 2]
    first = document["samples"][0]
    assert list(first) == ["job", "result", "error"]
    job = ["kind", "model", "strategy", "towers", "repeat"]
    assert sorted(first["job"]) == sorted(job)
