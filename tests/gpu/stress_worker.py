"""One rank of test_stress.py: FSDP2, tensor and expert parallelism, and the backend at once, beside stock.

python stress_worker.py FOLDER DEVICE STEPS    with torchrun's variables; DEVICE is cuda or cpu; writes FOLDER/seen.json
"""

import faulthandler
import sys
from pathlib import Path

import msgspec

from counterpoint.measurement.session import Session
from tests.dist.stress_programs import stressed

SEED = 2


def main(folder: Path, device: str, steps: int) -> None:
    faulthandler.dump_traceback_later(540, exit=True)
    session = Session(device)
    everyone = session.gather(stressed(session, SEED, steps))
    if session.rank == 0:
        (folder / "seen.json").write_bytes(msgspec.json.encode(everyone))
    session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
