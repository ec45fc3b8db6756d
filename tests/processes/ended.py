"""A check that can only be the last of a job, since just rank 0 goes on."""

import os

from keras_towers import settings
from keras_towers.rendezvous import watch
from tests.kit.ranks import check
from tests.processes import small as s


@check
def a_call_is_refused_when_the_other_ranks_have_ended():
    mine, strategy = s.eager(), s.Strategy()
    # It would wait for ranks to start that have ended before it is made.
    s.gather(s.RANK)
    if s.RANK == 0:
        # Who has ended is certain sooner.
        os.environ[settings.ENV_STALL_WARNING] = "5"
        watch.stop_watch()
        watch.start_watch(0, 2)
        words = "1 has ended, and does not call evaluate, but rank 0 does."
        with s.refused(words, "behind the `with` block of"), strategy:
            mine.evaluate(s.X, s.Y, verbose=0)
