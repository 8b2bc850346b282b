"""What a benchmark's figures were taken with: date, cores, versions, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from typing import Any


def about(*packages: str) -> dict[str, Any]:
    """Return the conditions of this run; ``packages`` are those whose versions matter."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "command": " ".join(sys.argv),
    }
