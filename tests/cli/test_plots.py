"""The picture of step times."""

import xml.etree.ElementTree

import pytest

from keras_towers.cli.bench import COLUMNS, summarize
from keras_towers.cli.plots import check_plot, draw_plot
from keras_towers.foundation.errors import TowerError
from tests.inspection.bench.shared import samples_of

pytestmark = pytest.mark.core


def test_each_row_that_was_measured_has_a_bar(tmp_path):
    pytest.importorskip("matplotlib")
    samples = samples_of({"plain": [1.5, 2.5, 2.0], "tower": ["broke"]})
    results = summarize(samples, COLUMNS)
    path, titles = tmp_path / "steps.svg", {samples[0].cell.model: "A model"}
    check_plot(path, "bench")
    draw_plot(results, titles, path)
    comments = [
        node.text.strip()
        for node in xml.etree.ElementTree.parse(
            path,
            xml.etree.ElementTree.XMLParser(
                target=xml.etree.ElementTree.TreeBuilder(insert_comments=True)
            ),
        ).iter(xml.etree.ElementTree.Comment)
    ]
    # Text is drawn as paths, and named in comments.
    (bar,) = [text for text in comments if "×" in text]
    assert bar.startswith("plain ×")
    assert "2.0" in comments and "A model" in comments
    with pytest.raises(TowerError, match="all runs have failed"):
        draw_plot(results[1:], titles, path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("steps.txt", "ends in .png, .svg, .pdf, not "),
        ("none/steps.png", "No such"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused_at_once(tmp_path, name, said):
    pytest.importorskip("matplotlib")
    with pytest.raises(TowerError, match=said):
        check_plot(tmp_path / name, "bench")


def test_it_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        TowerError, match=r"pip install 'keras-towers\[plots\]'"
    ):
        check_plot(tmp_path / "steps.png", "bench")
