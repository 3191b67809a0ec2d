"""Register backend `counterpoint` with torch.distributed when this module is imported.

import counterpoint.torch_backend
torch.distributed.init_process_group("counterpoint")
...
print(counterpoint.torch_backend.report())
"""

from counterpoint.parallel.backend.group import report
from counterpoint.parallel.backend.registration import register
from counterpoint.parallel.backend.symmetric import symmetric_memory
from counterpoint.parallel.options import BackendOptions

__all__ = ["BackendOptions", "report", "symmetric_memory"]
register()
