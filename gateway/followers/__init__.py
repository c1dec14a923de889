"""Parts that are made from the change feed of the tape, and may be killed at any time: each has a cursor and goes on.

`index` finds rows without a scan and answers SQL, `lake` writes tables of Parquet, `otlp` exports and takes
OpenTelemetry, `webhooks` tells others of releases.
"""
