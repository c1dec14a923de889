"""What a run has come to, so that nobody has to believe it: `result` is what is kept, the rest is made from it.

    result.json --files--> RunResult --summary--> Summary --terminal, page--> what a person reads

`gathered` makes the result of a search, with the leak test (`leaks`); `statistics` has the intervals; `changes` says
what has changed in the texts, and which rollouts led to each line.
"""
