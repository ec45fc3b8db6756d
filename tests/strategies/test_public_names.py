"""What ``help`` of a strategy shows besides TensorFlow's names."""

import pydoc
import re

import tensorflow as tf

import keras_towers as kt

OURS = {
    *("adopt", "average", "batches", "describe", "first_tower"),
    *("is_chief", "local_rank", "local_size", "mode", "num_replicas"),
    *("num_towers", "rank", "size", "sync_every_epoch", "updates"),
    *("scale_gradient", "staleness"),
}


def test_public_names():
    cls, theirs = kt.AsyncTowerStrategy, dir(tf.distribute.MirroredStrategy)
    public = {n for n in dir(cls()) if not n.startswith("_")}
    assert public.difference(theirs) == OURS
    shown = pydoc.plain(pydoc.render_doc(cls))
    shown = shown.partition("Methods defined here:")[2]
    ours = shown.partition("inherited from tensorflow")[0]
    members = set(re.findall(r"^ \|  (\w+)(?=\(|$| =)", ours, re.MULTILINE))
    assert "describe" in members
    # Python adds the last one where somebody has asked for it.
    members -= public | set(theirs) | {"__annotations__"}
    assert members == {"__enter__", "__exit__"}
