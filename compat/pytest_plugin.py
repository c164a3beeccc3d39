"""The pytest plugin with the fixture `assert_parity`. pytest loads it if compat is installed."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def assert_parity() -> Any:
    """Return `compat.testing.assert_parity`, imported when a test asks for it."""
    from compat.testing import assert_parity

    return assert_parity
