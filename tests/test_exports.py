"""What the package exports is what it says, sorted; nothing optional is imported on the way."""

from __future__ import annotations

import subprocess
import sys

import fluxon_gop as fg


def test_all_is_sorted_and_there():
    """Every name of __all__ can be imported, and the list is sorted."""
    assert sorted(fg.__all__) == fg.__all__
    assert all(hasattr(fg, name) for name in fg.__all__)


def test_importing_the_package_imports_neither_torch_nor_lance():
    """Optional and heavy packages come when they are used; Lance warns at every fork once imported."""
    code = "import sys, fluxon_gop; print([m for m in ('torch', 'lance', 'fluxon_gop.cli') if m in sys.modules])"
    out = subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True)
    assert "[]" == out.strip()


def test_the_version_is_a_version():
    """__version__ is the installed distribution's."""
    assert fg.__version__.count(".") == 2
