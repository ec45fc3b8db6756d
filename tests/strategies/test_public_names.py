"""What ``help`` of a strategy shows besides TensorFlow's names."""

import pydoc
import re

import pytest
import tensorflow as tf

import keras_towers as kt

ALL = {
    *("adopt", "average", "batches", "describe", "first_tower"),
    *("is_chief", "local_rank", "local_size", "mode", "num_replicas"),
    *("num_towers", "rank", "size", "sync_every_epoch", "updates"),
}
OWN = {
    "AsyncTowerStrategy": {"scale_gradient", "staleness"},
    "HorovodStrategy": {"mpi_enabled"},
    "NoOpStrategy": {"logs"},
    "ParameterServerTowerStrategy": {"placement", "ps_device"},
    "TowerStrategy": set(),
}


@pytest.mark.parametrize("name", OWN)
def test_public_names(name):
    if name == "HorovodStrategy":
        pytest.importorskip("horovod")
    cls, theirs = getattr(kt, name), dir(tf.distribute.MirroredStrategy)
    public = {n for n in dir(cls()) if not n.startswith("_")}
    assert public.difference(theirs) == ALL | OWN[name]
    shown = pydoc.plain(pydoc.render_doc(cls))
    shown = shown.partition("Methods defined here:")[2]
    ours = shown.partition("inherited from tensorflow")[0]
    members = set(re.findall(r"^ \|  (\w+)(?=\(|$| =)", ours, re.MULTILINE))
    assert "describe" in members
    # Python adds the last one where somebody has asked for it.
    members -= public | set(theirs) | {"__annotations__"}
    assert members == {"__enter__", "__exit__"}
