"""The result backend: the ack of a call carries its result."""

from contextlib import suppress
from typing import Any

from msgspec import UNSET, json
from taskiq import AsyncResultBackend, TaskiqResult
from taskiq.exceptions import ResultGetError, ResultSetError

from hadelay.client import MessageInfo, exactjson
from hadelay.client.anyloop import awaited
from hadelay.client.queues import last_of
from hadelay.errors import BadRequest, NotFound
from hadelay.taskiq.broker import HadelayBroker
from hadelay.taskiq.delivery import keep


class HadelayResultBackend(AsyncResultBackend[Any]):
    """Results of a broker's calls, kept with the calls' messages: for the topic's retention, or for 24 h if the topic
    has none."""

    def __init__(self, broker: HadelayBroker) -> None:
        self._broker = broker

    async def set_result(self, task_id: str, result: TaskiqResult[Any]) -> None:
        """Store a result, for the ack to take along. Stores an error instead if the result is no JSON or is too large.
        Raises ResultSetError if the call was acked before its result."""
        try:
            with suppress(TypeError):  # classes that only pydantic can encode are not checked for NaN
                exactjson.refuse_nan(result.model_dump(include={"return_value"})["return_value"], "result")
            unacked = keep(result.model_dump_json().encode())
        except ValueError as error:  # store an error instead: the result is no JSON, or is too large
            result = result.model_copy(update={"is_err": True, "return_value": None, "error": error})
            unacked = keep(result.model_dump_json().encode())
        if not unacked:
            raise ResultSetError from RuntimeError("results need the acknowledgement when_saved")

    async def is_result_ready(self, task_id: str) -> bool:
        """Whether a call has ended, also by a cancellation or as a dead letter."""
        found = await self._find(task_id)
        return found is not None and found.state in ("acked", "dead", "cancelled", "expired")

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[Any]:
        found = await self._find(task_id)
        if found is None:
            raise ResultGetError from LookupError("there is no message of this call; it may be published later")
        if found.result is UNSET:
            raise ResultGetError from LookupError(f"the message is {found.state}, without a result")
        result: TaskiqResult[Any] = TaskiqResult.model_validate_json(json.encode(found.result))
        return result

    async def _find(self, task_id: str) -> MessageInfo | None:
        """The last message of a call: a retry is a message of its own. None for a call that is not published, such as a
        later step of a pipeline."""
        topic = self._broker.topic
        with suppress(NotFound):
            return await awaited(self._broker.client, lambda client: last_of(client, topic, task_id))
        with suppress(NotFound, BadRequest):
            # The message of a schedule's occurrence has no client key, and the task id is the message's id.
            return await awaited(self._broker.client, lambda client: client.get(task_id))
        return None
