"""SQL over the tape, for people: a query runs in a process of its own that can read the files of the index and nothing
else.

DuckDB's own settings do not ensure that: its SQL can write files and take gigabytes in spite of them. So the process
(`child`) gives up all rights first (Landlock, limits of the kernel), then checks the query, and answers; `runner` kills
it at its deadline. It serves one query, so that no data of one remains for the next. `views` are the
tables that a query sees.
"""
