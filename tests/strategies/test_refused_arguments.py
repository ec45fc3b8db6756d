"""Arguments of strategies that cannot be: the message says which can."""

import pytest

import keras_towers as kt
from keras_towers.strategies import modes

Tower, Replicas = kt.TowerStrategy, kt.SyncReplicasStrategy
BACKUP = {"replicas_to_aggregate": 2, "total_num_replicas": 2}
ALL_MODES = ", ".join(map(repr, modes.MODES))


@pytest.mark.parametrize(
    "strategy, arguments, message",
    [
        (Tower, {"towers": 0}, "0"),
        *(
            (Tower, {"mode": mode}, f"mode={mode!r} .*{ALL_MODES}, or None")
            for mode in ("NCCL", "", 3, True, ["cpu"])
        ),
        *(
            (Tower, {option: value}, f"{option}={value!r} .*'each'")
            for option in ("batches", "updates")
            for value in ("", "all", 1, True, ["each"])
        ),
        *(
            (Tower, {"average": value}, f"average={value!r} .*True.*False")
            for value in ("no", None, 1)
        ),
        *(
            (kt.NoOpStrategy, {"logs": value}, "logs=.* dictionary")
            for value in (0.5, "loss", ["loss"])
        ),
        (
            kt.ParameterServerTowerStrategy,
            {"ps_device": "tpu"},
            "'tpu'.*'cpu', 'gpu'",
        ),
        (Replicas, {"replicas_to_aggregate": 0}, "at least 1 gradient"),
        (Replicas, {"replicas_to_aggregate": -1}, "at least 1 gradient"),
        (Replicas, {"replicas_to_aggregate": 2.0}, "the number of gradients"),
        (Replicas, {"replicas_to_aggregate": True}, "the number of gradients"),
        (Replicas, {**BACKUP, "replicas_to_aggregate": 5000}, "too many"),
        (Replicas, {"total_num_replicas": 99}, "99"),
        (Replicas, {"total_num_replicas": 0}, "0"),
        (Replicas, {**BACKUP, "towers": 3}, "contradicts"),
        (Replicas, {"variable_averages": 0.9}, "ExponentialMovingAverage"),
        (Replicas, {"tokens": "each"}, "tokens='each'"),
        (Replicas, {"stall_shutdown_s": 0}, "stall_shutdown_s=0"),
        (Replicas, {"batches": "split"}, "batches='split'"),
    ],
)
def test_refused(strategy, arguments, message, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    message = message.replace("[", r"\[")
    with pytest.raises(kt.TowerError, match=message):
        strategy(**arguments)
