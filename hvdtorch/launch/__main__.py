"""`python -m hvdtorch.launch` is `hvdrun`."""

import sys

from hvdtorch.launch.cli import main

sys.exit(main())
