"""Publish `counterpoint.parallel.tensor` under its public name, `counterpoint.tensor_parallel`."""

import sys

from counterpoint.parallel import tensor

sys.modules[__name__] = tensor
