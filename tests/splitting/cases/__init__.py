"""Steps to defeat the analysis with; see ``table``."""

import importlib
import pkgutil

from tests.splitting.cases.table import CASES as CASES

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    if ".test_" not in _found.name:
        importlib.import_module(_found.name)
