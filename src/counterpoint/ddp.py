"""Publish `counterpoint.parallel.ddp` under its public name, `counterpoint.ddp`."""

import sys

from counterpoint.parallel import ddp

sys.modules[__name__] = ddp
