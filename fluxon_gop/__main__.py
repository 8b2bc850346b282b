"""``python -m fluxon_gop`` is the command line."""

from __future__ import annotations

import sys

from fluxon_gop.cli import main

sys.exit(main())
