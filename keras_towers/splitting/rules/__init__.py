"""What operations do to values, by families."""

from keras_towers.splitting.rules import effects as effects
from keras_towers.splitting.rules import elementwise as elementwise
from keras_towers.splitting.rules import images as images
from keras_towers.splitting.rules import lists as lists
from keras_towers.splitting.rules import matrices as matrices
from keras_towers.splitting.rules import moves as moves
from keras_towers.splitting.rules import parts as parts
from keras_towers.splitting.rules import picks as picks
from keras_towers.splitting.rules import reductions as reductions
from keras_towers.splitting.rules import shapes as shapes
from keras_towers.splitting.rules.common import RULES as RULES
from keras_towers.splitting.rules.common import SIZES as SIZES
