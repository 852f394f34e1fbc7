"""`python -m tstar` is `tstar`."""

import sys

from tstar.cli import main

if __name__ == "__main__":
    sys.exit(main())
