"""Steps to defeat the analysis with; see ``table``."""

from tests.splitting.cases import layers as layers
from tests.splitting.cases import losses as losses
from tests.splitting.cases import losses2 as losses2
from tests.splitting.cases import losses3 as losses3
from tests.splitting.cases import steps as steps
from tests.splitting.cases import steps2 as steps2
from tests.splitting.cases import steps3 as steps3
from tests.splitting.cases.table import CASES as CASES
