"""`python -m with_faulty_cores ...`: freewheel with other classes inside its workers.

`FAULTY_CORES` names them, as JSON: fields of `Cores`.
"""

import functools
import json
import os
import sys

from freewheel.backends.ray import backend
from freewheel.cli.main import main

backend.Cores = functools.partial(backend.Cores, **json.loads(os.environ["FAULTY_CORES"]))

if __name__ == "__main__":
    sys.exit(main())
