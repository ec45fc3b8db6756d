"""What operations do to values, by families."""

from keras_towers.splitting.rules import (
    arithmetic as arithmetic,
)
from keras_towers.splitting.rules import (
    effects as effects,
)
from keras_towers.splitting.rules import (
    elementwise as elementwise,
)
from keras_towers.splitting.rules import (
    images as images,
)
from keras_towers.splitting.rules import (
    joins as joins,
)
from keras_towers.splitting.rules import (
    lists as lists,
)
from keras_towers.splitting.rules import (
    matrices as matrices,
)
from keras_towers.splitting.rules import (
    moves as moves,
)
from keras_towers.splitting.rules import (
    parts as parts,
)
from keras_towers.splitting.rules import (
    picks as picks,
)
from keras_towers.splitting.rules import (
    products as products,
)
from keras_towers.splitting.rules import (
    reductions as reductions,
)
from keras_towers.splitting.rules import (
    repeats as repeats,
)
from keras_towers.splitting.rules import (
    sizes_of as sizes_of,
)
from keras_towers.splitting.rules.common import RULES as RULES
