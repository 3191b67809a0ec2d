"""Publish `counterpoint.parallel.expert` under its public name, `counterpoint.expert_parallel`."""

import sys

from counterpoint.parallel import expert

sys.modules[__name__] = expert
