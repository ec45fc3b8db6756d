"""``keras-towers plan``: what it prints, and its exit codes."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

from keras_towers.cli import plan_hosts
from keras_towers.cli.main import app
from keras_towers.foundation.byte_sizes import parse_bytes
from keras_towers.foundation.errors import TowerError
from tests.kit.meshes import layout_map, mesh_of

pytestmark = pytest.mark.alternate


def model(**compiled):
    layers = [
        keras.layers.Dense(256, use_bias=False, name="hidden"),
        keras.layers.Dense(1, name="last"),
    ]
    made = keras.Sequential([keras.Input((256,)), *layers], name="planned")
    made.compile("adam", "mse", **compiled)
    return made


def with_arrays():
    return model(), np.zeros((1, 256)), np.zeros((1, 1))


def with_specs():
    return model(), tf.TensorSpec((1, 256)), tf.TensorSpec((1, 1))


def with_dataset():
    arrays = np.zeros((8, 256), "float32"), np.zeros((8, 1), "float32")
    return model(), tf.data.Dataset.from_tensor_slices(arrays).batch(2)


def larger_than_memory():
    # Weights of 4 TB.
    layers = [keras.layers.Dense(2**20, use_bias=False) for _ in range(1)]
    made = keras.Sequential([keras.Input((2**20,)), *layers])
    made.compile("adam", "mse")
    return made


def columns(devices):
    mesh = mesh_of(1, len(devices), devices=devices)
    return layout_map(mesh, {".*kernel": (None, None)})


def no_layouts(devices):
    return devices


def fails():
    raise ValueError("no weights today")


def eager():
    return model(run_eagerly=True)


def wrong_data():
    return model(), np.zeros((1, 255)), np.zeros((1, 1))


def scalars():
    return model(), 3, 4


def deep():
    layers = [keras.layers.Dense(64, "gelu") for _ in range(8)]
    model = keras.Sequential([keras.Input((64,)), *layers], name="deep")
    model.compile("sgd", "mse", jit_compile=False)
    return model


def run(words):
    """Plan what a function of this file returns; for four devices, if alone."""
    target, *options = words.split()
    options = options or ["--towers", "4"]
    return CliRunner().invoke(app, ["plan", f"{__name__}:{target}", *options])


def test_a_table_has_each_choice_and_says_what_fits():
    ended = run("model --towers 4 --batch-size 8 --device-memory 1MB")
    assert ended.exit_code == 0, ended.output
    title, *lines = ended.stdout.splitlines()
    assert title == (
        "planned: 65,793 parameters on 4 devices, 8 examples per step"
    )
    rows = {line[:20].strip(): line[20:].split() for line in lines}
    assert rows["on each device"] == [
        "copies",
        'updates="sharded"',
        'weights="sharded"',
        "TowerStrategy()",
    ]
    # The small ones are 257 numbers.
    held = ["263", "KB", "263", "KB", "66.6", "KB"]
    assert rows["weights"] == [*held, "66.6", "KB"]
    assert rows["fits 1MB"] == ["no", "yes", "yes", "yes"]
    assert "smaller than 64 KiB: 2 (" in ended.stdout
    assert lines[-1].startswith(
        "Write `with kt.TowerStrategy():`, which has its variables in shards: "
        "each device has 1 MB, and it needs "
    )
    ended = run("model --towers 4 --device-memory 100KB")
    assert "Nothing fits: the smallest plan misses by " in ended.stdout


def test_on_cpus_a_process_has_rows_of_its_own():
    ended = run("model --towers 2 --cpus horovod --device-memory 100KB")
    assert ended.exit_code == 0, ended.output
    title, *lines = ended.stdout.splitlines()
    assert "on a device in each of 2 processes, 32 examples" in title
    rows = {line[:25].strip(): line[25:].split() for line in lines}
    assert rows["in each process"][0] == "copies"
    assert rows["messages between ranks"][-2:] == ["262", "KB"]
    assert rows["gaps between tensors"][-1] == "KB"
    assert rows["the graphs of steps"][-1] == "MB"
    assert rows["fits 100KB"] == ["no"] * 3
    one, two = (
        json.loads(run(f"model --towers 2 --cpus {name} --json").stdout)
        for name in ("tower", "multi-worker")
    )
    for found in (*one["choices"], *two["choices"]):
        held = sum(found["weights"]) + sum(found["optimizer"])
        assert found["process"]["variables"] == held
        assert found["total"] == sum(found["process"].values())
    sent = "messages between ranks"
    assert not any(found["process"][sent] for found in one["choices"])
    assert all(found["process"][sent] for found in two["choices"])


def test_json_has_numbers_of_bytes():
    ended = run("model --towers 4 --json --device-memory 1MB")
    found = json.loads(ended.stdout)
    assert found["parameters"] == 256 * 256 + 257
    assert found["device_memory"] == 10**6
    copies, _, shards, by_itself = found["choices"]
    assert by_itself["choice"] == "TowerStrategy()"
    assert by_itself["fits"]
    small = 4 * 257
    assert copies["weights"] == [4 * 256 * 256 + small for _ in range(4)]
    assert shards["weights"] == [256 * 256 + small for _ in range(4)]
    assert shards["gradients"] == 256 * 256 + small
    assert shards["gathered"] == 4 * 256 * 256
    held = shards["weights"][0] + shards["optimizer"][0]
    assert shards["total"] == held + shards["step"]
    assert [copies["fits"], shards["fits"]] == [False, True]
    # A sum goes around a ring twice: the gradients, and the loss.
    assert copies["sent"] == 2 * (copies["gradients"] + 4) * 3 // 4


@pytest.mark.parametrize("build", [with_arrays, with_specs, with_dataset])
def test_data_says_only_what_the_shapes_are(build):
    ended = run(f"{build.__name__} --towers 2 --json")
    assert ended.exit_code == 0, ended.output
    choices = json.loads(run("model --towers 2 --json").stdout)
    assert json.loads(ended.stdout)["choices"] == choices["choices"]


def test_a_model_may_be_larger_than_the_memory():
    ended = run("larger_than_memory --towers 64 --json")
    assert ended.exit_code == 0, ended.output
    *_, shards = json.loads(ended.stdout)["choices"]
    assert shards["weights"] == [2**42 // 64 for _ in range(64)]


def test_layouts_are_a_choice_of_their_own():
    ended = run(f"model --towers 4 --layouts {__name__}:columns --json")
    first, *_, last = json.loads(ended.stdout)["choices"]
    assert last["choice"] == "layouts"
    # Nothing is divided: what a tower has once is on its first device.
    assert last["weights"] == [first["weights"][0], 0, 0, 0]


def test_what_is_computed_again_is_a_choice_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.svg"
    ended = run(f"deep --towers 1 --batch-size 256 --plot {picture}")
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    rows = {line[:20].strip(): line[20:].split() for line in lines}
    assert rows["on each device"] == ["copies", "remat=True"]
    numbers = rows["step, at its peak"]
    before, after = (
        parse_bytes("step", "".join(numbers[k : k + 2])) for k in (0, 2)
    )
    assert after < 0.6 * before
    assert rows["computed again"][0] == "-"
    assert picture.read_text().startswith("<?xml")


def test_one_device_has_one_choice():
    ended = run("model --towers 1 --json")
    (alone,) = json.loads(ended.stdout)["choices"]
    assert alone["choice"] == "copies"
    assert (alone["exchanges"], alone["sent"]) == (0, 0)


HOSTS = "--towers 2 --batch-size 8 --hosts 1,...,4"
ON_HOSTS = f"{HOSTS} --link-between 1Gbit,0us --link-within 1GB/s,0us"


def test_several_hosts_have_times_and_a_choice_to_take(tmp_path):
    pytest.importorskip("matplotlib")
    curve = tmp_path / "curve.svg"
    given = f"--device-memory 850KB --step-ms 2 --plot {curve}"
    ended = run(f"model {ON_HOSTS} {given}")
    assert ended.exit_code == 0, ended.output
    title, *lines, last = ended.stdout.splitlines()
    assert title == (
        "planned: 65,793 parameters on hosts of 2 devices, 8 examples per step "
        "and host"
    )
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    copies, *_ = (r for r in rows if r[:2] == ["4", "copies"])
    sent = 4 * (256 * 256 + 257 + 1)
    within, between = sent / 1e6, 2 * 3 / 4 * sent * 8 / 1e6
    assert copies[2:4] == [f"{within:.1f}", f"{between:.1f}"]
    # The update, which is a part of computing, waits for what is sent.
    took = float(copies[4])
    assert within + between < took < within + between + 2
    rate, efficiency = (
        float(cell.strip("%").replace(",", "")) for cell in copies[5:7]
    )
    assert rate == pytest.approx(4 * 8 / took * 1e3, rel=0.02)
    assert efficiency == pytest.approx(2 / took * 100, rel=0.02)
    assert copies[-1] == "no"
    in_hosts = [r for r in rows if r[1] == 'shard_over="process"']
    # Hosts sum what copies do, and have what one of them has.
    assert [row[0] for row in in_hosts] == ["1", "2", "4"]
    assert float(in_hosts[-1][3]) == pytest.approx(between, rel=0.05)
    assert len({tuple(row[-3:]) for row in in_hosts}) == 1
    # Copies do not fit, and the state alone is not in enough shards on one.
    assert last.startswith(
        'Take weights="sharded" on 1 host, updates="sharded" on 2 to 4 hosts: '
    )
    assert " examples/s on 4 hosts, " in last
    assert curve.read_text().startswith("<?xml")


def test_hosts_without_a_step_have_times_of_exchanges_only():
    ended = run(f"model {ON_HOSTS} --json")
    found = json.loads(ended.stdout)
    assert [c["hosts"] for c in found["choices"]] == [1] * 4 + [2] * 4 + [4] * 4
    copies = found["choices"][-4]
    assert copies["efficiency"] is copies["examples_per_s"] is None
    assert copies["step_ms"] == pytest.approx(
        sum(copies["sending_ms"].values())
    )
    assert found["take"].startswith("Take copies on 1 to 4 hosts: exchanges ")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("1", [1]),
        ("3,5,6", [3, 5, 6]),
        ("1,2,...,16", [1, 2, 4, 8, 16]),
        ("3,...,12,13", [3, 6, 12, 13]),
    ],
)
def test_dots_double_numbers_of_hosts(text, hosts):
    assert plan_hosts.parse_hosts(text, 8) == hosts


@pytest.mark.parametrize(
    "text", ["", "0", "2,1", "2,2", "1,...", "...,4", "1,...,3", "1,...,...,4"]
)
def test_other_numbers_of_hosts_are_refused(text):
    with pytest.raises(TowerError, match="give numbers of hosts in ascending"):
        plan_hosts.parse_hosts(text, 8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model --towers 2 --step-ms 1", "add --hosts"),
        (
            "model --towers 2 --hosts 2",
            "needs --link-between: the rate between",
        ),
        (
            f"model {HOSTS} --link-between 1Gbit",
            "--hosts needs --link-within: the rate between the devices of a",
        ),
        (
            f"model {HOSTS} --link-between 1Gbit,1",
            "--link-between 1Gbit,1 is not allowed: give the latency in micro",
        ),
        (f"model {ON_HOSTS} --step-ms 0", "--step-ms 0 is not allowed"),
        (f"model {ON_HOSTS} --plot a.svg", "draws examples/s: add --step-ms"),
        ("model --towers 2048 --hosts 4", "not allowed: these are 8,192"),
        (
            "model --towers 2 --cpus multi_worker",
            "Did you mean 'multi-w",
        ),
        (
            f"model {ON_HOSTS} --cpus tower",
            "--cpus plans no --hosts: leave on",
        ),
        ("fails", "ValueError: no weights today (test_plan.py, line "),
        ("eager", "leave out run_eagerly=True"),
        ("wrong_data", "cannot be planned: ValueError"),
        ("scalars", "one of them is 3"),
        (
            f"model --towers 4 --layouts {__name__}:no_layouts",
            f"{__name__}:no_layouts: it must return a keras.distribution.",
        ),
        (
            f"model --towers 2 --layouts {__name__}:fails",
            "fails must be a function of the list of the devices' names, but",
        ),
        (
            "model --towers 2 --device-memory 24Gb",
            "--device-memory 24Gb is not allowed: Gb may be bits, so write GB",
        ),
        (
            "model --towers 2 --device-memory 24",
            "--device-memory 24 is not allowed: give a number of bytes with "
            "its unit, such as 24GiB",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exits_with_2(words, said):
    ended = run(words)
    assert ended.exit_code == 2, ended.output
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("keras-towers plan: ")
    assert said in line
    assert not ended.stdout


def small():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


@pytest.mark.parametrize("options", ["--towers 2", ON_HOSTS])
def test_where_no_weight_is_large_only_copies_are_planned(options):
    ended = run(f"small {options}")
    assert ended.exit_code == 0, ended.output
    assert "sharded" not in ended.stdout
    assert "smaller than 64 KiB: 2" in ended.stdout
    assert "No weight can be in shards, so the table has only" in ended.stdout
