"""`python -m with_faulty_cores ...`: freewheel with other classes inside its workers.

`FAULTY_CORES` names them, as JSON: fields of `Cores`.
"""

import json
import os
import sys

from freewheel.backends.ray.cores import Cores
from freewheel.cli.main import main

FAULTY = Cores(**json.loads(os.environ["FAULTY_CORES"]))
Cores.of = classmethod(lambda _, rollout: FAULTY)

if __name__ == "__main__":
    sys.exit(main())
