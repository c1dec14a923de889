"""An index beside the tape: columns of every span, rollout and attempt, queried by SQL. Derived: it may be deleted.

One process (`process`) reads the tape as any other reader does, and the gateway queries it (`link`); DuckDB is in that
process only. It follows the log, keeps new rows in memory and seals 50,000 spans at a time as Parquet files
(`segments`). A manifest names the files and the cursor that they reach; it is committed last. So whatever is killed,
the index is as of a manifest, and later changes are read from the tape once more.

The index proposes and the tape disposes: the index finds positions, and the gateway reads those rows from the tape and
applies the filter itself. An answer is as of the newest commit, because the process catches up before it answers.
Without an index, or far behind the tape, the gateway scans the tape: right, but slower.

`rows` makes rows from the tape's records, `tables` holds them in DuckDB, `follower` keeps both in step with the tape.
"""
