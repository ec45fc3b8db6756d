"""Steps of somebody who did not know the analysis; see ``table``."""

from tests.splitting.hostile import contrastive as contrastive
from tests.splitting.hostile import control as control
from tests.splitting.hostile import generative as generative
from tests.splitting.hostile import gradients as gradients
from tests.splitting.hostile import inputs as inputs
from tests.splitting.hostile import learning as learning
from tests.splitting.hostile import recommenders as recommenders
from tests.splitting.hostile import sequences as sequences
from tests.splitting.hostile import sizes as sizes
from tests.splitting.hostile import sizes_of_data as sizes_of_data
from tests.splitting.hostile import state as state
from tests.splitting.hostile import structures as structures
from tests.splitting.hostile import teachers as teachers
from tests.splitting.hostile import vision as vision
