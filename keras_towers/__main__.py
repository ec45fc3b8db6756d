"""``python -m keras_towers``: the command ``keras-towers``."""

from keras_towers.cli.main import app

app(prog_name="keras-towers")
