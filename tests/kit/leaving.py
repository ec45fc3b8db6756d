"""Ways to leave ``fit`` before its end."""

import os
import signal


class Boom(Exception):
    pass


class Unprintable(Exception):
    def __str__(self):
        raise self

    __repr__ = __str__


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
