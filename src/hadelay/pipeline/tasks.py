"""Work on many items: as tasks on Spark's executors, or in this process, one item after the other.

What a job collects has to be small: counts, names, what was done. Rows stay with the executors (`keep`), are brought
together there (`regroup`), and come to the driver one item at a time (`Kept.stream`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from hadelay.errors import BadRequest

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")
M = TypeVar("M", covariant=True)

#: (done, total): items, in this process only: Spark has a bar of its own.
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


def no_connect(spark: Any) -> None:
    """BadRequest for a session of Spark Connect, which has no SparkContext."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise BadRequest(
            "a Spark Connect session cannot run this job, which sends tasks of its own to the executors: use a classic "
            "session (--master local[*], spark://… or spark-submit; unset SPARK_REMOTE and spark.api.mode)"
        )


def _context(spark: Any) -> Any:
    no_connect(spark)
    return spark.sparkContext


def cores(spark: Any) -> int:
    return 1 if spark is None else int(_context(spark).defaultParallelism)


def each(
    spark: Any, work: Callable[[T], R], items: Sequence[T], progress: Progress = silent
) -> list[R]:  # fmt: skip
    """work(item) of each, a task per item. The results are collected."""
    if spark is not None and items:
        found: list[R] = _context(spark).parallelize(items, len(items)).map(work).collect()
        return found
    results = []
    for n, item in enumerate(items, 1):
        results.append(work(item))
        progress(n, len(items))
    return results


class Kept(Protocol[M]):
    """Results where they were made."""

    def told(self, what: Callable[[M], V]) -> list[V]:
        """what(result) of each, which is small."""
        ...

    def stream(self, what: Callable[[M], Iterable[V]], parts: int = 0) -> Iterator[V]:
        """All of what(result) of each, one at a time. They come to the driver in so many parts, each of which is in the
        memory of an executor and of the driver's Java; 0: as they were made."""
        ...

    def free(self) -> None: ...


class _Here(Generic[R]):
    def __init__(self, results: list[R]) -> None:
        self.results = results

    def told(self, what: Callable[[R], V]) -> list[V]:
        return [what(result) for result in self.results]

    def stream(self, what: Callable[[R], Iterable[V]], parts: int = 0) -> Iterator[V]:
        return chain.from_iterable(map(what, self.results))

    def free(self) -> None:
        self.results = []


class _There(Generic[R]):
    """On the disks of the executors: computed once, when first asked for."""

    def __init__(self, results: Any) -> None:
        from pyspark import StorageLevel

        self.results = results.persist(StorageLevel.DISK_ONLY)

    def told(self, what: Callable[[R], V]) -> list[V]:
        found: list[V] = self.results.map(what).collect()
        return found

    def stream(self, what: Callable[[R], Iterable[V]], parts: int = 0) -> Iterator[V]:
        pieces = self.results.flatMap(what)
        found: Iterator[V] = (pieces.repartition(parts) if parts else pieces).toLocalIterator()
        return found

    def free(self) -> None:
        self.results.unpersist()


def keep(
    spark: Any, work: Callable[[T], Iterable[R]], items: Sequence[T], progress: Progress = silent
) -> Kept[R]:  # fmt: skip
    """All of work(item) of each, a task per item; the results stay where they were made, and are small each: Java holds
    one of them at a time."""
    if spark is None or not items:
        return _Here(
            [result for results in each(None, lambda item: [*work(item)], items, progress) for result in results]
        )
    return _There(_context(spark).parallelize(items, len(items)).flatMap(work))


def regroup(
    spark: Any, kept: Sequence[Kept[R]], pick: Callable[[R], Iterable[tuple[int, V]]],
    work: Callable[[list[V]], T], groups: int,
) -> Kept[T]:  # fmt: skip
    """work(values) of each of so many groups. pick: (group, value) pairs of a result."""
    there = [results.results for results in kept if isinstance(results, _There)]
    if spark is None or not there:
        found: defaultdict[int, list[V]] = defaultdict(list)
        for results in kept:
            for group, value in results.stream(pick):
                found[group].append(value)
        return _Here([work(found[group]) for group in range(groups)])
    pairs = _context(spark).union(there).flatMap(pick).partitionBy(groups)
    return _There(pairs.mapPartitions(lambda some: [work([value for _, value in some])]))
