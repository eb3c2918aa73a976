"""`python -m freewheel`."""

import sys

from freewheel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
