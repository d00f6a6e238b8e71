"""`python -m calmatch`, which is also what torchrun starts."""

import sys

from calmatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
