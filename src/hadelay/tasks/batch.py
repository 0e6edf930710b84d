"""`app.batch()`: calls of tasks, and one more call once all of them have ended."""

from typing import Any, ParamSpec, Protocol

from hadelay.client import Client, Delay, Put, Receipt
from hadelay.client.anyloop import awaited
from hadelay.client.batches import On
from hadelay.client.wire import new_key
from hadelay.tasks.task import Task

P = ParamSpec("P")

#: Options that the call after a batch may have.
_OPTIONS = ("delay", "tags", "ttl", "meta")


class Publisher(Protocol):
    """Interface of the App that a batch publishes messages through."""

    @property
    def client(self) -> Client: ...
    @property
    def inline(self) -> bool: ...
    def publish_sync(self, put: Put) -> Receipt: ...
    async def publish(self, put: Put) -> Receipt: ...


class Batch:
    """A batch of calls. `then` names the call that follows; the end of `with` or `async with` seals the batch, and an
    exception cancels it. Tasks join by `put`, or with the option `batch=batch.key`, also from inside the batch."""

    def __init__(self, publisher: Publisher, key: str | None, on: On, ttl: Delay | None) -> None:
        self._publisher, self.key, self._on, self._ttl = publisher, key or new_key(), on, ttl
        self._next: Put | None = None

    def then(self, task: Task[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> "Batch":
        """Set the task to call once all calls of the batch have ended, with the outcome that `on` of the batch
        names."""
        put = task.message(*args, **kwargs)
        given = {name for name in Put.__struct_fields__ if getattr(put, name) is not None}
        wrong = given - {"topic", "body", "content_type", "traceparent", "idempotency_key", "on_conflict", *_OPTIONS}
        if wrong:
            raise TypeError(f"{task.name}: the call after a batch has no option {min(wrong)!r}")
        self._next = put
        return self

    async def put(self, task: Task[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Publish a call that joins the batch; from any event loop."""
        return await task.options(batch=self.key).put(*args, **kwargs)

    def put_sync(self, task: Task[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Like `put`, but blocking."""
        return task.options(batch=self.key).put_sync(*args, **kwargs)

    def __enter__(self) -> "Batch":
        put = self._named()
        if not self._publisher.inline:
            self._publisher.client.open_batch(put.topic, put.body, **self._how(put))
        return self

    async def __aenter__(self) -> "Batch":
        put = self._named()
        if not self._publisher.inline:
            how = self._how(put)
            await awaited(self._publisher.client, lambda client: client.open_batch(put.topic, put.body, **how))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._publisher.inline:
            client = self._publisher.client
            (client.seal_batch if kind is None else client.cancel_batch)(self.key)
        elif kind is None and self._on != "death":
            self._publisher.publish_sync(self._named())

    async def __aexit__(self, kind: object, *_: object) -> None:
        if not self._publisher.inline:
            await awaited(
                self._publisher.client,
                lambda client: (client.seal_batch if kind is None else client.cancel_batch)(self.key),
            )
        elif kind is None and self._on != "death":
            await self._publisher.publish(self._named())

    def _named(self) -> Put:
        if self._next is None:
            raise TypeError("name the call that follows the batch: app.batch().then(task)")
        return self._next

    def _how(self, put: Put) -> dict[str, Any]:
        return {
            "key": self.key,
            "on": self._on,
            "ttl": self._ttl,
            "delay": put.delay,
            "content_type": put.content_type,
            "tags": put.tags or (),
            "meta": put.meta,
            "message_ttl": put.ttl,
        }
