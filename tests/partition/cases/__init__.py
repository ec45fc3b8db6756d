"""Steps that are hard to divide; ``table`` has what they are made of."""

import importlib
import pkgutil

from tests.partition.cases.table import CASES as CASES

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_found.name)
