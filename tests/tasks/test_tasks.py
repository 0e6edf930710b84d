"""Tasks without a cluster: arguments, outcomes, types, and the inline mode."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import decimal
import enum
import math
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from hadelay import Put
from hadelay.errors import ConfigError
from hadelay.tasks import App, Attempt, Dead, Snooze, current
from hadelay.tasks.load import load
from hadelay.tasks.outcomes import Rules, done, outcome_of

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Order:
    number: uuid.UUID
    due: datetime


app = App("http://127.0.0.1:1")
called: list[object] = []


@app.task(topic="orders", unique=True)
async def remind(order: Order, *parts: int, loud: bool = False, **names: str) -> None:
    called.append((order, parts, loud, names))


@app.task(name="plain")
def add(a: int, b: int = 1, /) -> int:
    called.append((a, b, current().number))
    return a + b


def test_arguments_come_back_with_their_types() -> None:
    order = Order(uuid.uuid4(), datetime(2026, 11, 23, tzinfo=UTC))
    encoded = remind.arguments.encode((order, 1, 2), {"loud": True, "x": "y"})
    bound = remind.arguments.decode(encoded)
    assert (bound.args, bound.kwargs) == ((order, 1, 2), {"loud": True, "x": "y"})
    assert add.arguments.decode(add.arguments.encode((1,), {})).args == (1,)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "plain: missing a required argument: 'a'"),
        (("1",), {}, "plain: Expected `int`, got `str` - at `$.a`"),
        ((1, 2, 3), {}, "plain: too many positional arguments"),
        ((object(),), {}, "plain: Encoding objects of type object is unsupported"),
    ],
)
async def test_wrong_arguments_are_refused_where_they_are_published(args: object, kwargs: object, said: str) -> None:
    with app.testing() as box, pytest.raises(TypeError) as refused:
        await add.put(*args, **kwargs)  # type: ignore[arg-type, misc]
    assert str(refused.value) == said
    assert box.puts == []


def test_a_parameter_of_another_version_is_named() -> None:
    with pytest.raises(TypeError, match="plain: this version of the function has no parameter 'c'"):
        add.arguments.decode(b'{"a":1,"c":2}')


def test_a_message_names_its_task_and_parameters() -> None:
    order = Order(uuid.UUID(int=7), datetime(2026, 11, 23, tzinfo=UTC))
    put = remind.options(delay="3d", meta={"tenant": "a"}).message(order)
    assert (put.topic, put.delay, put.meta) == ("orders", "3d", {"tenant": "a"})
    assert msgspec.json.decode(put.body) == {
        "task": f"{remind.__module__}.remind",
        "args": {"order": {"number": str(order.number), "due": "2026-11-23T00:00:00Z"}},
    }
    # unique: the key follows from the arguments, unless the caller gives one.
    assert put.key == remind.message(order).key != remind.message(order, 1).key
    assert remind.options(key="mine").message(order).key == "mine"
    # unique="1d": the same key, for a day also behind the end of the message.
    nightly = App("http://127.0.0.1:1").task(name=remind.name, unique="1d")(remind.function)
    assert (put.unique_for, nightly.message(order).key, nightly.message(order).unique_for) == (None, put.key, "1d")
    assert nightly.options(unique_for="2d", key="mine").message(order).unique_for == "2d"
    with pytest.raises(ValueError, match="soon"):
        App("http://127.0.0.1:1").task(unique="soon")(remind.function)
    with pytest.raises(TypeError, match="a publish has no option 'dealy'"):
        remind.options(dealy="1s")  # type: ignore[call-arg]


RULES = Rules(retry={OSError: "1h", ConnectionError: ["1s", timedelta(minutes=1)]})


@pytest.mark.parametrize(
    ("error", "attempt", "kind", "delay"),
    [
        (ConnectionResetError(), 1, "failed", 1),
        (ConnectionResetError(), 2, "failed", 60),
        (ConnectionResetError(), 3, "failed", 60),
        (PermissionError(), 1, "failed", 3600),
        (ValueError(), 1, "failed", None),
        (Dead("no such order"), 1, "dead", None),
        (Snooze("2m"), 9, "snoozed", 120),
    ],
)
def test_outcomes(error: Exception, attempt: int, kind: str, delay: float | None) -> None:
    outcome = outcome_of(error, RULES, attempt)
    assert (outcome.kind, outcome.delay_s) == (kind, delay)


def test_wrong_declarations() -> None:
    with pytest.raises(ValueError, match="duration"):
        app.task(retry={OSError: "soon"})
    with pytest.raises(ValueError, match="must not be empty"):
        app.task(retry={OSError: []})
    with pytest.raises(ValueError, match="two tasks 'plain'"):
        app.task(name="plain")(lambda: None)

    async def unready() -> None: ...

    with pytest.raises(TypeError, match="not for async def"):
        app.task(cpu=True)(unready)
    with pytest.raises(TypeError, match="missing a required argument"):
        app.periodic("* * * * *")(lambda order: None)  # type: ignore[misc, arg-type]
    with pytest.raises(RuntimeError, match="no task runs here"):
        current()


def test_annotations_that_json_cannot_carry_are_named_at_the_start() -> None:
    def odd(value: Callable[[], None] | complex) -> None: ...

    task = App().task(odd)
    with pytest.raises(TypeError, match=r"odd: its annotations cannot be used for JSON"):
        task.arguments.check()


@pytest.mark.parametrize("where", ["no_such_module", "json:app", "json"])
def test_apps_that_are_not_there(where: str) -> None:
    with pytest.raises(ConfigError, match=where.partition(":")[0]):
        load(where)


async def test_inline() -> None:
    order = Order(uuid.uuid4(), datetime.now(UTC))
    called.clear()
    with app.testing(inline=True) as box:
        await remind.options(delay="3d").put(order, loud=True)
        remind.put_sync(order)
        await add.put(1)
        with pytest.raises(RuntimeError, match="no task runs here"):
            current()
    assert called == [(order, (), True, {}), (order, (), False, {}), (1, 1, 1)]
    assert [put.delay for put in box.puts] == ["3d", None, None]
    await remind(order)  # a task is still a function
    assert called.pop() == (order, (), False, {})
    with app.testing() as box:
        add.put_sync(5)
    assert len(box.puts) == 1


async def test_inline_results() -> None:
    own = App()

    @own.task(result=True)
    async def order(number: int) -> Order:
        return Order(uuid.UUID(int=number), datetime(2026, 11, 23, tzinfo=UTC))

    with own.testing(inline=True):
        assert await order.result(await order.put(7), timeout=1) == await order(7)
    with own.testing(), pytest.raises(TimeoutError):
        order.result_sync(order.put_sync(7))
    with pytest.raises(TypeError, match="keeps no results: give it result=True"):
        remind.result_sync("id")


tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")


async def test_middleware_of_publishes() -> None:
    own = App()

    @own.before_put
    def mark(put: Put) -> None:
        put.meta = {**(put.meta or {}), "tenant": tenant.get()}

    @own.middleware
    async def enter(attempt: Attempt, proceed: Callable[[], Awaitable[None]]) -> None:
        tenant.set(attempt.meta["tenant"])
        await proceed()

    @own.task
    async def work() -> None: ...

    tenant.set("a")
    with own.testing() as box:
        await work.put()
    assert box.puts[0].meta == {"tenant": "a"}


def test_mypy_refuses_wrong_arguments(tmp_path: Path) -> None:
    page = (tmp_path / "typed").with_suffix(".py")
    page.write_text(
        "from hadelay.tasks import App\n"
        "app = App()\n"
        "@app.task\n"
        "async def remind(order: int, loud: bool = False) -> None: ...\n"
        "@app.task(timeout='1m', result=True)\n"
        "def add(a: int, b: int) -> int: return a + b\n"
        "@app.periodic('0 9 * * *', tz='Europe/Vienna')\n"
        "async def daily() -> None: ...\n"
        "async def main() -> None:\n"
        "    await remind.put(4711, loud=True)\n"
        "    await remind.options(delay='3d', key='k').put(4711)\n"
        "    number: int = add(1, 2)\n"
        "    number = await add.result(add.put_sync(1, 2))\n"
        "    await remind(4711)\n"
        "    await remind.put('4711')\n"
        "    await remind.options(delay='1s').put(4711, lout=True)\n"
        "    remind.options(dealy='1s')\n"
        "    add.put_sync(1)\n"
        "    await daily.put(1)\n"
        "    text: str = add.result_sync('id')\n"
    )
    options = ("--config-file", ROOT / "pyproject.toml")  # as `make check` does, whose cache makes this quick
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, page],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [int(line.split(":")[1]) for line in errors] == [15, 16, 17, 18, 19, 20], done.stdout + done.stderr


def test_the_import_brings_neither_numpy_nor_the_server() -> None:
    code = (
        "import sys, hadelay.tasks, hadelay.tasks.worker\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'lmdb', 'uvloop') "
        "or m.startswith(('hadelay.server', 'hadelay.storage'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.stdout == "[]\n"


def test_put_sync_in_a_program_with_an_event_loop() -> None:
    async def main() -> None:
        with app.testing(inline=True):
            remind.put_sync(Order(uuid.uuid4(), datetime.now(UTC)))

    called.clear()
    asyncio.run(main())
    assert len(called) == 1


async def test_a_task_that_returned_nothing_has_the_result_none() -> None:
    own = App("http://127.0.0.1:1")

    @own.task(result=True)
    def nothing() -> None: ...

    @own.task(result=True)
    def untyped():  # type: ignore[no-untyped-def]
        ...

    ended = SimpleNamespace(state="acked", history=[], result=msgspec.UNSET)  # of an ack without a result
    client = SimpleNamespace(wait_for=lambda *_, **__: ended)
    own._client = client, own.urls  # type: ignore[assignment]
    assert nothing.result_sync("id") is None  # type: ignore[func-returns-value]
    assert untyped.result_sync("id") is None


class Colour(enum.Enum):
    RED = "red"


class Step(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Point:
    x: int
    more: Any = None


class Pair(NamedTuple):
    a: int


#: What JSON gives back as another value, if nothing says what it was.
OTHERWISE = [
    b"bytes", bytearray(b"x"), datetime(2026, 1, 2, tzinfo=UTC), date(2026, 1, 2),
    timedelta(hours=1), decimal.Decimal("1.50"), uuid.UUID(int=7), Point(1), Colour.RED, {1, 2}, frozenset({1}),
    {1: "a"}, Pair(1), math.nan, -math.inf,
]  # fmt: skip


@pytest.mark.parametrize("value", OTHERWISE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("inside", [lambda x: x, lambda x: [x], lambda x: {"k": (1, [x])}], ids=["", "list", "deep"])
def test_an_argument_that_would_arrive_as_another_value_is_refused(value: Any, inside: Callable[[Any], Any]) -> None:
    app, got = App(), []

    @app.task
    def untyped(value, *rest: Any, **named: Any) -> None:  # type: ignore[no-untyped-def]
        got.append(value)

    @app.task
    def loose(value: dict | list | None = None, point: Point | None = None) -> None:  # type: ignore[type-arg]
        got.append(value)

    with app.testing(inline=True):
        for call in (
            lambda: untyped.put_sync(inside(value)), lambda: untyped.put_sync(1, 2, inside(value)),
            lambda: untyped.put_sync(1, name=inside(value)), lambda: loose.put_sync({"x": inside(value)}),
            lambda: loose.put_sync([inside(value)]), lambda: loose.put_sync(point=Point(1, inside(value))),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=r"untyped|loose") as caught:
                call()
            assert "arguments." in str(caught.value)
    assert got == []


def test_an_annotated_argument_arrives_as_what_it_is() -> None:
    app, got = App(), []

    @app.task
    def typed(
        raw: bytes, when: datetime, price: decimal.Decimal, id: uuid.UUID, point: Point, colour: Colour,
        some: set[int], pair: tuple[int, ...], rate: float, none: float | None = None, any: Any = None,
    ) -> None:  # fmt: skip
        got.append((raw, when, price, id, point, colour, some, pair, rate, none, any))

    args = (
        b"x", datetime(2026, 1, 2), decimal.Decimal("1.50"), uuid.UUID(int=7), Point(1), Colour.RED, {1, 2},
        (1, 2), 1, None, {"list": [1, 2.5, "a", None, True], "tuple": (1, 2), "step": Step.ONE},
    )  # fmt: skip
    with app.testing(inline=True):
        typed.put_sync(*args)
        # What the annotation makes of another class is as wanted.
        typed.put_sync(
            b"x",
            "2026-01-02T00:00:00Z",
            0.5,
            str(uuid.UUID(int=7)),
            {"x": 1},
            "red",
            [1, 2],
            [1, 2],
            1,  # type: ignore[arg-type]
        )
    assert got[0] == (*args[:-1], {"list": [1, 2.5, "a", None, True], "tuple": [1, 2], "step": 1})
    assert [type(one) for one in got[1]] == [type(one) for one in got[0][:-1]] + [type(None)]


@pytest.mark.parametrize("value", [math.nan, {"a": [math.inf]}])
def test_a_result_that_json_has_not_is_refused(value: Any) -> None:
    app = App()

    @app.task(result=True)
    def kept() -> Any:
        return value

    @app.task
    def dropped() -> Any:
        return value

    with app.testing(inline=True):
        with pytest.raises(ValueError, match=r"result.*JSON has no"):
            kept.put_sync()
        dropped.put_sync()
    with pytest.raises(ValueError, match="JSON has no"):
        done(value, kept.rules)
