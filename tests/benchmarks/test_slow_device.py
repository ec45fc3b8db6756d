"""The pictures of the documentation, of made-up results."""

import os
import types

import pytest

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def saved(tmp_path):
    """Draw a figure into a file, and return all that is written in it."""

    def save(figure):
        figure.savefig(tmp_path / "picture.png")
        texts = figure.findobj(matplotlib.text.Text)
        return {text.get_text() for text in texts if text.get_visible()}

    return save


def curve(*losses):
    times, updates = [0, 1, 2], [0, 10, 20]
    return types.SimpleNamespace(times=times, losses=losses, updates=updates)


def test_the_lowest_curve_is_first_in_the_legend(saved, monkeypatch):
    pytest.importorskip("sklearn")
    # It sets variables of TensorFlow.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    from benchmarks import slow_device

    curves = curve(2.0, 1.5, 1.25), curve(2.0, 1.6, 1.5), curve(2.0, 0.5, 0.25)
    figure = slow_device.draw(
        slow_device.ASYNC_VS_SYNC, curves, "a processor, 2 cores", updates=True
    )
    assert any("a processor, 2 cores" in text for text in saved(figure))
    legend = [text.get_text() for text in figure.axes[1].get_legend().texts]
    assert legend == [
        "AsyncTowerStrategy, does not wait: 0.25",
        "TowerStrategy (the default), waits: 1.25",
        "ParameterServerTowerStrategy, waits: 1.50",
    ]
