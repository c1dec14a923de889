"""Reports of runs, with the evidence for each figure: `result` is the stored form, everything else is made from it.

    result.json --files--> RunResult --summary--> Summary --terminal, page--> what a person reads

`result_builder` makes the result of a search, with the leak test (`leaks`); `statistics` has the intervals; `changes`
lists the changes of the texts, and the rollouts that led to each line.
"""
