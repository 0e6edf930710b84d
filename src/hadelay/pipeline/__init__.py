"""The data pipeline: hour files as Arrow and as a Spark data source, and jobs on them.

    schema.py      columns and options, as documented        jobs.py     options and summaries of jobs
    stores.py      sources of hour files                     hourfiles.py   listings, rows, damage
    batches.py     rows as Arrow record batches              source.py   spark.read.format("hadelay")
    reconcile.py   a verdict per message                     check.py    files are as they were written
    archive.py     hours to Parquet, with manifests          archived.py deleted hours, from an archive
    lateness.py, load.py, forecast.py   on timing.py         page.py     HTML reports
    publish.py     rows → messages    schedule.py   tables → messages    replay.py   dead letters, due again
    tail.py        a stream into Parquet                     pack.py     packages for executors
    session.py     find Java, start Spark

Needs the extra `hadelay[spark]`. Of hadelay, only the command line imports this package.
"""
