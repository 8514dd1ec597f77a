"""The `octavo` command over the fake engine; for tests that need a whole process."""

from __future__ import annotations

from typing import Any

import fake_engine

from octavo.core.config import EngineConfig
from octavo.core.engine.async_engine import AsyncEngine
from octavo.server.cli import main

real_start = AsyncEngine.start


async def start(config: EngineConfig, **more: Any) -> AsyncEngine:
    """AsyncEngine.start with the fake engine in place of a real one."""
    return await real_start(config, builder=fake_engine.BUILDER, open_frontend=fake_engine.frontend, **more)


if __name__ == "__main__":
    AsyncEngine.start = start  # type: ignore[method-assign, assignment]
    main()
