"""Runs a service or a worker as a program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from typing import Awaitable, Callable


def run_until_signal(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `serve(stop)` in a new event loop and sets `stop` when the process is interrupted or
    terminated. Log lines go to standard output unless the program has set up logging."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    asyncio.run(_serve_until_signal(serve))


async def _serve_until_signal(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not available on Windows.
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    await serve(stop)
