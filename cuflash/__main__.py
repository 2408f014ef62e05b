"""``python -m cuflash``: see :mod:`cuflash.cli`."""

import sys

from cuflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
