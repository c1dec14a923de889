"""`penstock train apo advise`: is there anything to gain, and by what, before anything is spent.

A small probe (`probe`) runs the texts as they are and a handful of very different ones (`stances`) on a few tasks of
the train split. What comes of it, and what the tape has already (`evidence`), are observations (`observation`). From
these the variance of the reward is split (`variance`), gains are estimated (`belief`), the race of a run is played in
advance (`forecast`), and a table says what is worth doing (`decision`). `page` says it to a person. Everything but
`evidence` and `session` is pure or knows a `Laboratory` only, so that `bench.apo.advising` tries the same code on
scripted worlds.
"""
