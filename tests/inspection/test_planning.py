"""``planning``: what a plan says is what a step on devices has, and sends."""

import dataclasses
import re

import keras
import pytest

import keras_towers as kt
from keras_towers.fit.step.reports.step_reports import planned_memory
from keras_towers.foundation.byte_sizes import format_bytes
from keras_towers.foundation.errors import TowerError
from keras_towers.inspection import planning
from keras_towers.inspection.user_models import random_examples
from keras_towers.transport.absent_ranks import AbsentRanks
from tests.kit.meshes import layout_map, mesh_of
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.alternate

TOWERS = 3
# With them each tower has its copy of what is not in shards, as on GPUs.
OPTIONS = {
    "copies": {},
    'updates="sharded"': {"updates": "sharded"},
    'weights="sharded"': {"weights": "sharded", "gather_bytes": 2**17},
}


def with_data(model):
    return model, *random_examples(model, model.name, 12)


def perceptron():
    # Of 256 rows towers have different numbers, and of 129 axes one even share.
    layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(129)]
    model = keras.Sequential([keras.Input((200,)), *layers], name="perceptron")
    model.compile("adam", "mse", jit_compile=False)
    return with_data(model)


def images():
    layers = [
        keras.layers.Conv2D(96, 3, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.Conv2D(96, 3),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3, "softmax"),
    ]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers], name="images")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0)
    model.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
    )
    return with_data(model)


def texts():
    layers = [
        keras.layers.Embedding(3000, 16),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(
        [keras.Input((7,), dtype="int32"), *layers], name="texts"
    )
    model.compile("adam", "mse", jit_compile=False)
    return with_data(model)


def half_precision():
    layers = [
        keras.layers.Dense(255, "relu", dtype="mixed_float16"),
        keras.layers.Dense(96, dtype="mixed_float16"),
    ]
    model = keras.Sequential([keras.Input((128,)), *layers], name="half")
    adam = keras.optimizers.Adam()
    scaled = keras.optimizers.LossScaleOptimizer(adam)
    model.compile(scaled, "mse", jit_compile=False)
    return with_data(model)


MODELS = [perceptron, images, texts, half_precision]


def plans_of(build, kind, towers=TOWERS):
    devices = [f"/device:{kind}:{index}" for index in range(towers)]
    setting = planning.PlanSetting(devices, 12, gather_bytes=2**17)
    return {one.choice: one for one in planning.plan(build, setting)}


def bytes_said(strategy, kind):
    """The bytes on each device that a strategy says it holds, by its name."""
    (line,) = re.findall(rf"^  {kind}: (.*)", strategy.describe(), re.M)
    parts = re.findall(r"([\d,]+) bytes on (\S+?)(?:, |$)", line)
    return {name: int(n.replace(",", "")) for n, name in parts}


def assert_described(plan, strategy):
    """A plan has the numbers of a strategy, device by device."""
    names = [f"/device:CPU:{k}" for k in range(len(plan.weights))]
    for kind, found in (
        ("weights", plan.weights),
        ("optimizer state", plan.optimizer),
    ):
        planned = {n: b for n, b in zip(names, found, strict=True) if b}
        assert planned == bytes_said(strategy, kind)


@pytest.mark.parametrize("build", sample_of(MODELS))
def test_a_plan_is_what_a_step_has_and_sends(build):
    by_host = plans_of(build, "CPU")
    for choice, options in OPTIONS.items():
        model, x, y = build()
        with kt.TowerStrategy(TOWERS, **options) as strategy:
            model.fit(x, y, batch_size=12, verbose=0)
            said = strategy.describe()
            assert_described(by_host[choice], strategy)
            described = planned_memory(strategy)
        # After the block it says where they were.
        assert strategy.describe() == said
        found, costs = by_host[choice], by_host[choice].costs
        assert f"{model.name!r}: {costs.exchange_summary}" in said
        replaced = f"in place of sums of {format_bytes(costs.replaced_sums)}"
        assert (replaced in said) == bool(costs.replaced_sums)
        gathers = f"at most {format_bytes(costs.gathered)} of gathered"
        assert (gathers in said) == bool(costs.gathered)
        # On CPUs it is what the process has.
        assert found.total == sum(found.process.values())
        assert found.process.keys() == described.keys()
        for what, size in described.items():
            rel = 0.2 if what == "the graphs of steps" else 1e-3
            assert found.process[what] == pytest.approx(size, rel=rel), what


def test_processes_also_have_what_they_send():
    def plans_with(messages=None):
        ranks = AbsentRanks(2, 2, messages)
        setting = planning.PlanSetting(["/device:CPU:0"], 12, ranks=ranks)
        return planning.plan(images, setting)

    def sent(plans):
        return [plan.process["messages between ranks"] for plan in plans]

    plans, largest = plans_with(), 3 * 3 * 96 * 96 * 4
    for plan in plans:
        held = sum(plan.weights) + sum(plan.optimizer)
        assert plan.process["variables"] == held
    # Copies have sums of all gradients in shared memory.
    copies, *in_shards = sent(plans)
    assert copies > sum(plans[0].weights)
    # Of the largest gradient, the parts that it gets of others.
    assert in_shards == [largest, largest]
    # Another engine has other messages.
    others = sent(plans_with(lambda kind, size, ranks: ranks))
    assert others[0] > copies
    assert max(others[1:]) < 20


@pytest.mark.parametrize("build", sample_of(MODELS))
def test_a_plan_for_gpus_has_what_devices_of_their_own_memory_have(build):
    planned = plans_of(build, "GPU")
    for choice, options in OPTIONS.items():
        if options.get("updates") == "sharded":
            # Its weights are not copied where towers share memory.
            continue
        model, x, y = build()
        with kt.TowerStrategy(TOWERS, updates="each", **options) as strategy:
            model.fit(x, y, batch_size=12, verbose=0)
            found = planned[choice]
            assert_described(found, strategy)
            said = strategy.describe()
        if choice != "copies":
            # Where copies share memory, rows may be gathered instead of sums.
            assert found.costs.exchange_summary in said
        assert found.total == (
            max(map(sum, zip(found.weights, found.optimizer, strict=True)))
            + found.step
        )


def feed_forward():
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((16, 32))
    for k in range(2):
        wide = keras.layers.Dense(256, "relu", name=f"up_{k}")(x)
        x = x + keras.layers.Dense(32, name=f"down_{k}")(wide)
    model = keras.Model(inputs, keras.layers.Dense(3)(x), name="feed_forward")
    model.compile("adam", "mse", jit_compile=False)
    return with_data(model)


def layouts_of_pairs(devices, shape=(2, 2)):
    return layout_map(
        mesh_of(*shape, devices=devices),
        {
            r"up_\d/kernel": (None, "model"),
            r"up_\d/bias": ("model",),
            r"down_\d/kernel": ("model", None),
        },
    )


def model_parallel(devices):
    return keras.distribution.ModelParallel(
        layout_map=layouts_of_pairs(devices), batch_dim_name="batch"
    )


def planned_by(layouts, kind="GPU"):
    devices = [f"/device:{kind}:{index}" for index in range(4)]
    setting = planning.PlanSetting(devices, 12, layouts=layouts)
    *_, last = planning.plan(feed_forward, setting)
    return last


@pytest.mark.parametrize(
    "layouts", sample_of([layouts_of_pairs, model_parallel])
)
def test_layouts_are_planned_on_a_mesh(layouts, devices):
    plan, on_host = (planned_by(layouts, kind) for kind in ("GPU", "CPU"))
    model, x, y = feed_forward()
    with kt.ModelParallelStrategy(layouts_of_pairs(devices[:4])) as strategy:
        model.fit(x, y, batch_size=12, verbose=0)
        assert plan.costs.exchange_summary in strategy.describe()
        assert_described(on_host, strategy)
    # Towers of GPUs have their own, and what a tower has once is on its first.
    assert plan.weights == [*on_host.weights[:2], *on_host.weights[:2]]
    assert on_host.weights[2:] == [0, 0]
    rows = 4 * 6 * 16 * 32
    # Forward two sums in a tower, and backward one: the inputs of the model get
    # no gradient. Towers add up gradients, and the loss.
    assert plan.costs.sent == {"": 3 * rows + plan.weights[0] + 4}
    assert plan.step > 0


def test_more_hosts_have_the_plan_that_each_number_has_alone():
    """The program of one number of hosts is used for others."""
    devices = [f"/device:GPU:{index}" for index in range(2)]
    setting = planning.PlanSetting(devices, 12, hosts=[2, 4, 64])
    alone = dataclasses.replace(setting, hosts=[64])
    together = [
        p for p in planning.plan(half_precision, setting) if p.hosts > 4
    ]
    found = planning.plan(half_precision, alone)
    for one, other in zip(together, found, strict=True):
        assert one.choice == other.choice
        assert one.examples == other.examples == 12 * 64
        assert one.weights == other.weights
        assert one.optimizer == other.optimizer
        # Moves are weighed by the work for the first number of hosts.
        plan = other.costs.plan
        work = dataclasses.replace(
            one.costs.plan, multiplications=plan.multiplications
        )
        assert dataclasses.replace(one.costs, plan=work) == other.costs
        assert one.work == other.work
    # Of 128 rows of 128 devices each has one; with 64 KiB or more of weights.
    copies, _, shards, in_hosts = (max(one.weights) for one in together)
    assert shards < copies / 10
    # The two devices of each host have half of them, whatever others have.
    assert in_hosts == pytest.approx(copies / 2, rel=0.01)


def test_layouts_on_other_devices_are_refused():
    with pytest.raises(TowerError, match="other devices than the function"):
        planned_by(lambda devices: layouts_of_pairs(devices[:2], (1, 2)))


@pytest.mark.parametrize("towers", sample_of([2, 4, 8], 3))
def test_rows_are_gathered_in_place_of_sums_in_the_memory_of_one_host(towers):
    """GPUs would compute the whole gradient each, which none has measured."""
    on_host, on_gpus = (
        plans_of(perceptron, kind, towers)["copies"].costs
        for kind in ("CPU", "GPU")
    )
    assert on_host.replaced_sums > on_gpus.replaced_sums == 0


def test_each_choice_has_the_names_that_a_model_has_alone():
    # The first one of a process has no number.
    _, layer = keras.layers.Dense(2), keras.layers.Dense(2)
    number = int(layer.name.rpartition("_")[2])
    setting = planning.PlanSetting(["/device:GPU:0", "/device:GPU:1"], 12)
    names = []

    def build():
        model = keras.Sequential([keras.Input((9000,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        names.append(model.layers[0].name)
        return model

    planning.plan(build, setting)
    # Three of them in the table, and one that saves nothing.
    assert names == [f"dense_{number + 1}"] * 4
    assert keras.layers.Dense(2).name == names[0]
