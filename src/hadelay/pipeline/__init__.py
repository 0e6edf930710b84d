"""The data pipeline: the hour files as Arrow and as a Spark data source, and the jobs on them.

    schema.py      columns and options, as documented              stores.py     where hour files are read from
    batches.py     files → Arrow record batches, without Spark     source.py     spark.read.format("hadelay")
    reconcile.py   a verdict per message    exact.py  the same in SQL    archive.py    hours → Parquet with manifest
    archived.py    deleted hours, from there    places.py    directories here, in object stores, in HDFS
    lateness.py, load.py, forecast.py   how late, how much, and what is coming, on timing.py    page.py    their reports
    publish.py     rows → messages    schedule.py    tables → messages    replay.py    dead letters by filter, due again
    stream.py      offsets of a stream      tail.py    a stream into Parquet
    session.py     finding Java, starting Spark      pack.py    what executors need, as an archive

Needs the extra `hadelay[spark]`; nothing else of hadelay imports this package.
"""
