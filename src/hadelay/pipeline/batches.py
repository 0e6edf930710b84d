"""Hour files as Arrow record batches: numpy all the way, no row is ever a Python object. A split is a range of rows of
one hour."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from hadelay.pipeline.arrow import ARROW, Split
from hadelay.pipeline.events import Events
from hadelay.pipeline.hourfiles import Listing, Names, Store
from hadelay.pipeline.messages import Messages
from hadelay.pipeline.schema import KINDS, Options

#: Columns of few values, which `read` gives as dictionaries if it is asked to.
CODED = frozenset(("topic", "state", "content_type", "event", "consumer", "node", "reason"))


def schema(
    kind: str, columns: Sequence[str], *, as_codes: bool = False, required: Container[str] = ()
) -> pa.Schema:  # fmt: skip
    codes = pa.dictionary(pa.int32(), pa.string())
    types = {name: codes if as_codes and name in CODED else ARROW[KINDS[kind][name].type] for name in columns}
    return pa.schema([pa.field(name, types[name], name not in required) for name in columns])


def splits(listing: Listing, options: Options, *, even: bool = False) -> list[Split]:
    """Of every hour that the options take, oldest first. even: an hour that has to be split is split into
    equal parts, an even number of them, so that none is left over to be read alone by one of two tasks (no more: each
    that needs `state` looks through all events). Else each part has split_rows but the last: archives name their files
    after these."""
    found = []
    for files in sorted(listing.hours):
        if not options.takes(files.hour):
            continue
        count = files.entries if options.kind == "messages" else files.events
        cuts = [*range(0, count, options.split_rows), count]
        if even and len(cuts) > 2:
            parts = len(cuts) // 2 * 2
            cuts = [count * n // parts for n in range(parts + 1)]
        found += [Split(files, start, stop, listing.as_of_ms) for start, stop in pairwise(cuts) if start < stop]
    return found


def read(
    store: Store, options: Options, columns: Sequence[str], split: Split, names: Names | None = None, *,
    as_codes: bool = False, required: Container[str] = (),
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """The split's rows of the topics asked for. DamagedFile names file, hour and entry; with onTorn=skip such rows are
    left out. as_codes: columns of few values are dictionaries, which Parquet is written from quicker. required: columns
    that the schema says are never null."""
    target = schema(options.kind, columns, as_codes=as_codes, required=required)
    kind = Messages if options.kind == "messages" else Events
    whole = kind(store, options, split, names or store.names())
    needs_log = any(KINDS[options.kind][name].needs == "log" for name in columns)
    for start in range(split.start, split.stop, options.batch_rows):
        stop = min(start + options.batch_rows, split.stop)
        for batch in whole.batches(start, stop, needs_log):
            found = [batch.column(name) for name in target.names]
            made = [
                pa.array(a, f.type) if isinstance(a, np.ndarray) else a if a.type == f.type else a.cast(f.type)
                for a, f in zip(found, target, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(made, schema=target)
