"""Whether a training step splits over towers, proven from its graph.

This room knows nothing of strategies. ``analyse`` takes the graph of a step of
one tower and what its inputs and variables are, and says whether the towers'
gradients, logs and state add up to those of one device, or which operation
prevents it. It is an abstract interpretation: ``values`` has the lattice,
``sizes`` the arithmetic of shapes, ``rules`` what single operations do,
``interpreter`` the pass over a graph, with ``variables``, ``control_flow`` and
``marks`` of what towers exchange.
"""

from keras_towers.splitting.analysis import MEAN as MEAN
from keras_towers.splitting.analysis import SUM as SUM
from keras_towers.splitting.analysis import Analysis as Analysis
from keras_towers.splitting.analysis import Difference as Difference
from keras_towers.splitting.analysis import Effect as Effect
from keras_towers.splitting.analysis import Result as Result
from keras_towers.splitting.analysis import Variable as Variable
from keras_towers.splitting.analysis import analyse as analyse
