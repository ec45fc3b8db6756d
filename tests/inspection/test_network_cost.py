"""``network_cost``: rings, as they are added up by hand."""

import pytest
import tensorflow as tf

from keras_towers.fit.step.reports.step_costs import Exchanged
from keras_towers.inspection.network_cost import Ring, time_step
from keras_towers.partition.ir.axes import BATCH, COLUMNS, ONCE
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.sizes import EXAMPLES, UNKNOWN

AXES = {
    "columns": Ring(2, 2e9, 1e-6),
    "towers": Ring(4, 2e9, 1e-6),
    "ranks": Ring(3, 1e9, 1e-5),
}


def exchanged(sizes, is_sum=True, over=("towers", "ranks"), **given):
    axes = BATCH | given.pop("also", ONCE)
    level, groups = given.pop("level", 0), given.pop("groups", 1)
    tensor = Tensor(tf.float32, tf.TensorShape(None), axes)
    return Exchanged(level, tensor, sizes, is_sum, over, groups)


def time(*exchanges, work=None, computing=None, examples=10):
    return time_step(exchanges, AXES, examples, work or {}, computing)


def test_a_sum_goes_around_the_ring_of_each_axis_twice():
    found = time(exchanged([5_000_000]))
    # 20 MB: 2 x 3 of 4 rounds, and 2 x 2 of 3.
    assert found.sending["towers"] == pytest.approx(6 * (1e-6 + 5e6 / 2e9))
    assert found.sending["ranks"] == pytest.approx(4 * (1e-5 + 20e6 / 3 / 1e9))
    assert found.seconds == pytest.approx(sum(found.sending.values()))
    assert found.efficiency is None


def test_rows_go_around_it_once_and_are_as_many_as_the_examples():
    found = time(exchanged([EXAMPLES, 500_000], False, ("ranks",)))
    assert found.sending == {
        "ranks": pytest.approx(2 * (1e-5 + 20e6 / 3 / 1e9))
    }


def test_one_member_sends_nothing():
    assert Ring(1, 1.0, 1.0).seconds(100, 1, True) == 0


def test_small_exchanges_of_a_level_share_a_message():
    small, apart = [exchanged([10]) for _ in range(5)], exchanged([10], level=1)
    one, five, two = time(small[0]), time(*small), time(small[0], apart)
    assert one.sending["ranks"] == pytest.approx(4 * (1e-5 + 40 / 3e9))
    assert five.sending["ranks"] == pytest.approx(4 * (1e-5 + 200 / 3e9))
    assert two.sending["ranks"] == pytest.approx(2 * one.sending["ranks"])


def test_columns_exchange_their_part_and_share_the_link_of_their_host():
    within = time(exchanged([1_000_000], over=("columns",), groups=4))
    assert within.sending == {
        "columns": pytest.approx(2 * (1e-6 + 1e6 / 2 / 2e9))
    }
    found = time(exchanged([1_000_000], also=COLUMNS))
    assert found.sending["towers"] == pytest.approx(6 * (1e-6 + 1e6 / 2e9))
    assert found.sending["ranks"] == pytest.approx(4 * (1e-5 + 8e6 / 3 / 1e9))


def test_a_level_takes_what_is_longer_of_computing_and_sending():
    exchanges = [
        exchanged([250_000], over=("ranks",)),
        exchanged([2_500_000], over=("ranks",), level=1),
    ]
    short, long = (4 * (1e-5 + size / 3 / 1e9) for size in (1e6, 1e7))
    assert short < 0.005 < long
    found = time(*exchanges, work={0: 3, 1: 1, 2: 2}, computing=0.012)
    assert found.seconds == pytest.approx(0.006 + long + 0.004)
    assert found.efficiency == pytest.approx(0.012 / found.seconds)


def test_what_the_data_decides_is_left_out():
    assert time(exchanged([UNKNOWN, 4])).seconds == 0
    assert time(exchanged([UNKNOWN, 4]), computing=0.5).seconds == 0.5
