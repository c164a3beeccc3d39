"""What the tests of native.c need of the machine."""

from __future__ import annotations

import shutil

import pytest

from compat.decoding.native_library import library

WITH_COMPILER = shutil.which("cc") is not None
needs_compiler = pytest.mark.skipif(not WITH_COMPILER, reason="no C compiler")
needs_panels = pytest.mark.skipif(
    not WITH_COMPILER or not library().has_panels(),
    reason="native.c multiplies many rows on processors with AVX-512 VNNI only",
)
