"""Whole numbers that only say where entries of examples are.

``tf.range(n)`` numbers the examples of a tower, and ``tf.where(mask)`` says
where the entries are that a mask leaves. One device has other numbers, but what
is picked by them, or added up by them, is that of the same example: as long as
a number stays within its example, it does not matter how many are ahead.
"""

from keras_towers.splitting.places import counting as counting
from keras_towers.splitting.places import parts as parts
from keras_towers.splitting.places import picks as picks
from keras_towers.splitting.places.meanings import Ends as Ends
from keras_towers.splitting.places.meanings import of_ragged as of_ragged
from keras_towers.splitting.places.moving import bounded as bounded
from keras_towers.splitting.places.moving import followed as followed
