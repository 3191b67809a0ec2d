"""Be `counterpoint.parallel.ddp`, whose public name this is."""

import sys

from counterpoint.parallel import ddp

sys.modules[__name__] = ddp
