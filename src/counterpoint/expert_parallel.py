"""Be `counterpoint.parallel.expert`, whose public name this is."""

import sys

from counterpoint.parallel import expert

sys.modules[__name__] = expert
