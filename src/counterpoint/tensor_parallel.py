"""Be `counterpoint.parallel.tensor`, whose public name this is."""

import sys

from counterpoint.parallel import tensor

sys.modules[__name__] = tensor
