"""Steps to defeat the analysis with; see ``table``."""

from tests.splitting.cases import by_the_data as by_the_data
from tests.splitting.cases import effects as effects
from tests.splitting.cases import functions as functions
from tests.splitting.cases import gradients as gradients
from tests.splitting.cases import inputs as inputs
from tests.splitting.cases import of_examples as of_examples
from tests.splitting.cases import of_keras as of_keras
from tests.splitting.cases import pairs as pairs
from tests.splitting.cases import sizes_as_numbers as sizes_as_numbers
from tests.splitting.cases import state as state
from tests.splitting.cases import statistics as statistics
from tests.splitting.cases import wrong_axes as wrong_axes
from tests.splitting.cases.table import CASES as CASES
