"""The tape as tables of Parquet in a directory or a bucket, for every engine that reads Delta Lake. Derived.

A process of its own reads the tape as any other reader does and appends new rows. `rows` has the tables, and reads a
chunk of the log in short transactions. `lake` writes the rows of a chunk to the files of each table and then commits
them, with the cursor that they reach, by one file that only one writer can create. So whatever is killed, a table is as
of a commit, and later changes are read from the tape once more. `location` is the directory or bucket,
`console.commands.serve` runs and reports the rounds.

Forgetting is as safe: rows that the tape has forgotten are deleted from the tables, and the files that had them are
deleted from the place.
"""
