"""``python -m deltarefit``, for where the script is not on PATH."""

import sys

from deltarefit.cli import main

sys.exit(main())
