"""`python -m edgemoe` is the `edgemoe` command."""

import sys

from edgemoe.cli import main

sys.exit(main())
