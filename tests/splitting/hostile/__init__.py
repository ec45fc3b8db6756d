"""Steps of somebody who did not know the analysis; see ``table``."""

from tests.splitting.hostile import contrastive as contrastive
from tests.splitting.hostile import generative as generative
from tests.splitting.hostile import learning as learning
from tests.splitting.hostile import sequences as sequences
from tests.splitting.hostile import sizes as sizes
