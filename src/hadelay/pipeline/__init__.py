"""The data pipeline: the hour files as Arrow and as a Spark data source, and the jobs on them.

    schema.py      columns and options, as documented        jobs.py     options of jobs, and what they report
    batches.py     files → Arrow record batches, with messages.py, events.py, arrow.py, and without Spark
    stores.py      where hour files are read from            source.py   spark.read.format("hadelay")
    reconcile.py   a verdict per message                     check.py    files are as written, with damage.py
    archive.py     hours → Parquet with manifest             archived.py deleted hours, from there
    lateness.py, load.py, forecast.py   how late, how much, and what is coming, on timing.py    page.py   their reports
    publish.py     rows → messages    schedule.py   tables → messages    replay.py   dead letters by filter, due again
    stream.py      offsets of a stream    tail.py   a stream into Parquet    locations.py   directories, object stores
    session.py     finding Java, starting Spark              pack.py     what executors need, as an archive

Needs the extra `hadelay[spark]`; nothing else of hadelay imports this package.
"""
