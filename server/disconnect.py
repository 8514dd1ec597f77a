"""Work that ends when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from .errors import NoClientError

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end; cancels it, and waits until it is, when the client disconnects.

    Raises:
        NoClientError: the client disconnected.
    """
    watch = asyncio.ensure_future(_disconnected(receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watch, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise NoClientError("the client disconnected")
    finally:
        for each in (watch, task):
            each.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
