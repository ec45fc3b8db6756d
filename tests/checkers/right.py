"""A user's script, in which type checkers find nothing."""

from collections.abc import Callable
from typing import Any, assert_type

import keras

import keras_towers as kt
from keras_towers.fit.weights.least_loaded import LeastLoadedPlacement
from keras_towers.reduction.packing import GradientPacker


def train(model: keras.Model, x: Any, y: Any) -> None:
    with kt.TowerStrategy(2, mode="host", updates="once") as towers:
        assert_type(towers, kt.TowerStrategy)
        model.fit(x, y)
    assert_type(towers.describe(), str)
    assert_type(towers.num_replicas_in_sync, int)
    kt.TowerStrategy(["/gpu:0", "/gpu:1"], packer=GradientPacker())
    kt.TowerStrategy([0, 1], batches="each", batch_norm="global")
    kt.TowerStrategy((0, "gpu:1"), batch_norm="tower")
    with kt.ParameterServerTowerStrategy(ps_device="host") as servers:
        assert_type(servers, kt.ParameterServerTowerStrategy)
        assert_type(servers.placement, LeastLoadedPlacement)
        servers.adopt(model)
    with kt.AsyncTowerStrategy(4) as without_waiting:
        model.fit(x, y)
    assert_type(without_waiting.staleness.mean, float)
    with kt.HorovodStrategy(compression="fp16", sync_every=4) as ranks:
        assert_type(ranks.rank, int)
    with kt.NoOpStrategy(logs={"loss": 1.0}) as nothing:
        assert_type(nothing.logs, dict[str, float])


def loop(strategy: kt.TowerStrategy, batch: Any) -> Any:
    with strategy.scope() as same:
        assert_type(same, kt.TowerStrategy)
        losses = same.run(lambda part: part, args=(batch,))
        assert_type(same.experimental_local_results(losses), tuple[Any, ...])
        return same.reduce("SUM", losses, axis=None)


def by_name(name: str) -> None:
    with kt.strategy(name), kt.strategy("tower", towers=4):
        pass


def step(images: Any, texts: Any) -> Any:
    tower = kt.current_tower()
    assert_type(tower.index, int)
    return tower.is_main, images, texts


def prepare(model: keras.Model, x: Any) -> list[keras.callbacks.Callback]:
    assert_type(kt.virtual_towers(4), list[str])
    found = kt.verify(model, x, strategy=kt.TowerStrategy(2), steps=2)
    assert_type(found.difference, float)
    return [kt.ChiefOnly(keras.callbacks.CSVLogger("log.csv"))]


def start(train: Callable[[int], list[float]]) -> None:
    assert_type(kt.launch(train, np=2, args=(5,)), list[float])


def survive(model: keras.Model, x: Any) -> None:
    @kt.elastic.run
    def run(state: kt.elastic.State, epochs: int) -> float:
        commit = kt.elastic.Commit(state, every=50)
        model.fit(x, epochs=epochs, callbacks=[commit])
        return 1.0

    state = kt.elastic.State(model, best=1.0)
    assert_type(run(state, 3), float)
    assert_type(state.epoch, int)
