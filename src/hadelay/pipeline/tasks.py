"""Run work on many items: as tasks on Spark's executors, or one after the other in this process.

The driver collects small results only: counts, names, statuses. Rows stay with the executors (`keep`, `regroup`), and
come to the driver in pieces (`Kept.stream`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from hadelay.errors import BadRequest

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")

#: Callback for progress: (done, total) numbers of items. Called only in this process: Spark has its own progress bar.
Progress = Callable[[int, int], None]
#: Limit of tasks per core. Further items share a task, because its start takes longer than reading a small hour.
_TASKS_PER_CORE = 32


def silent(done: int, total: int) -> None:
    """Progress callback that shows nothing."""


def no_connect(spark: Any) -> None:
    """Raise BadRequest if the session is one of Spark Connect, which has no SparkContext."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise BadRequest(
            "a Spark Connect session cannot run this job, which sends tasks of its own to the executors: use a classic "
            "session (--master local[*], spark://… or spark-submit; unset SPARK_REMOTE and spark.api.mode)"
        )


def cores(spark: Any) -> int:
    if spark is None:
        return 1
    no_connect(spark)
    return int(spark.sparkContext.defaultParallelism)


def _spread(spark: Any, items: Sequence[Any]) -> Any:
    """Distribute the items to Spark tasks, as an RDD."""
    count = min(len(items), _TASKS_PER_CORE * cores(spark))
    return spark.sparkContext.parallelize(items, count)


def each(spark: Any, work: Callable[[T], R], items: Sequence[T], progress: Progress = silent) -> list[R]:
    """Run work(item) for each item; returns the list of results."""
    if spark is not None and items:
        return [*_spread(spark, items).map(work).collect()]
    results = []
    for n, item in enumerate(items, 1):
        results.append(work(item))
        progress(n, len(items))
    return results


class Kept(Generic[R]):
    """Results that stay where they were made: on the disks of Spark's executors, or in a list of this process."""

    def __init__(self, results: Any) -> None:
        self.here = type(results) is list
        if not self.here:
            from pyspark import StorageLevel

            results = results.persist(StorageLevel.DISK_ONLY)
        self.results = results

    def describe(self, what: Callable[[R], V]) -> list[V]:
        """Compute what(result) for each result; returns the list, so the values should be small."""
        return [what(result) for result in self.results] if self.here else [*self.results.map(what).collect()]

    def stream(self, what: Callable[[R], Iterable[V]], parts: int = 0) -> Iterator[V]:
        """Iterate over the items of what(result) of all results. parts: number of parts in which items come to the
        driver, each small enough for the memory of an executor and of the driver; 0: the parts of the kept results."""
        if self.here:
            return chain.from_iterable(map(what, self.results))
        pieces = self.results.flatMap(what)
        found: Iterator[V] = (pieces.repartition(parts) if parts else pieces).toLocalIterator()
        return found

    def free(self) -> None:
        if not self.here:
            self.results.unpersist()


def keep(spark: Any, work: Callable[[T], Iterable[R]], items: Sequence[T], progress: Progress = silent) -> Kept[R]:
    """Run work(item) for each item, and keep all results. Each result must be small: Java has one of them in memory at
    a time."""
    if spark is None or not items:
        return Kept([*chain.from_iterable(each(None, lambda item: [*work(item)], items, progress))])
    return Kept(_spread(spark, items).flatMap(work))


def regroup(
    spark: Any,
    kept: Sequence[Kept[R]],
    pick: Callable[[R], Iterable[tuple[int, V]]],
    work: Callable[[list[V]], T],
    groups: int,
) -> Kept[T]:
    """Group values from kept results, and run work(values) for each group. pick: gives the pairs (number of the group,
    value) of a result."""
    there = [results.results for results in kept if not results.here]
    if not there:
        found: defaultdict[int, list[V]] = defaultdict(list)
        for group, value in chain.from_iterable(results.stream(pick) for results in kept):
            found[group].append(value)
        return Kept([work(found[group]) for group in range(groups)])
    pairs = spark.sparkContext.union(there).flatMap(pick).partitionBy(groups)
    return Kept(pairs.mapPartitions(lambda some: [work([value for _, value in some])]))
