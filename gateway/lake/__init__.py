"""The tape as tables of Parquet in a directory or a bucket, for every engine that reads Delta Lake. Derived.

A process of its own reads the tape as any other reader does and appends what is new. `reading` reads a chunk of the
log in short transactions and makes rows of it, in the shapes of `shapes`. `table` puts the rows of a chunk into files
and then commits them, with the cursor that they reach, by one file that only one writer can create. So whatever is
killed, a table is as of a commit, and what came after it is read from the tape once more. `place` is where the tables
are, `lake` holds those of one tape together, `following` says how it goes.

The other way round nothing is lost either: what is forgotten on the tape is deleted from the tables, and the files that
had it are deleted from the place (`erasing`).
"""
