"""Requests that any event loop may await."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hadelay.client.aio import AsyncClient
from hadelay.client.background import loop
from hadelay.client.sync import Client

R = TypeVar("R")


async def awaited(client: Client, request: Callable[[AsyncClient], Coroutine[Any, Any, R]]) -> R:
    """Await a request on the event loop that blocking clients share. Unlike an AsyncClient, the client belongs to no
    event loop of the caller, survives a fork, and need not be closed. The request runs with the caller's context
    variables."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request(client._async()), loop()))
