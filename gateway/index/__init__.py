"""An index beside the tape: columns of every span, rollout and attempt, asked by SQL. Derived: it may be deleted.

One process (`process`) reads the tape as any other reader does, and the gateway asks it (`link`); DuckDB is in that
process only. It follows the log, keeps what is new in memory and seals 50,000 spans at a time as Parquet files
(`segments`). A manifest names the files and the cursor that they reach; it is committed last. So whatever is killed,
the index is as of a manifest, and what came after it is read from the tape once more.

An index proposes and the tape disposes: it finds *where* to look, and the gateway reads those rows from the tape and
looks at them with the filter itself. A question is answered as of the newest commit, because the process reads on
before it answers. Where there is no index, or it is far behind, the gateway scans the tape: right, but slower.

`rows` reads what is indexed off the tape, `tables` holds it in DuckDB, `follower` keeps both in step.
"""
