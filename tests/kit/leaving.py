"""Ways to leave ``fit`` before its end."""

import os
import signal


class Boom(Exception):
    pass


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
