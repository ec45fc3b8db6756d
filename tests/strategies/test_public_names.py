"""What ``help`` of a strategy shows besides TensorFlow's names."""

import pydoc
import re

import pytest
import tensorflow as tf

import keras_towers as kt

ALL = {
    "adopt",
    "average",
    "batches",
    "describe",
    "first_tower",
    "num_replicas",
    "num_towers",
    "sync_every_epoch",
    "updates",
}
RANKS = {"is_chief", "local_rank", "local_size", "mpi_enabled", "rank", "size"}
OWN = {
    "AsyncTowerStrategy": {"mode", "scale_gradient", "staleness"},
    "HorovodStrategy": {"mode", *RANKS},
    "NoOpStrategy": {"logs"},
    "ParameterServerTowerStrategy": {"mode", "placement", "ps_device"},
    "TowerStrategy": {"mode"},
}


@pytest.mark.parametrize("name", OWN)
def test_public_names(name):
    if name == "HorovodStrategy":
        pytest.importorskip("horovod")
    strategy = getattr(kt, name)()
    theirs = dir(tf.distribute.MirroredStrategy)
    public = {n for n in dir(strategy) if not n.startswith("_")}
    assert public.difference(theirs) == ALL | OWN[name]


@pytest.mark.parametrize("name", OWN)
def test_help(name):
    shown = pydoc.plain(pydoc.render_doc(getattr(kt, name)))
    shown = shown.partition("Methods defined here:")[2]
    ours = shown.partition("inherited from tensorflow")[0]
    members = set(re.findall(r"^ \|  (\w+)(?=\(|$| =)", ours, re.MULTILINE))
    named = ALL | OWN[name] | set(dir(tf.distribute.MirroredStrategy))
    assert "describe" in members
    assert members - named == {"__enter__", "__exit__"}
