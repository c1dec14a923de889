"""`penstock train apo advise`: finds out, before a run, if there is anything to gain, and by which means.

A small probe (`probe`) runs the texts as they are and a handful of very different ones on a few tasks of the train
split. From its rollouts, and earlier ones on the tape (`session`), gains and the length of a race are estimated
(`estimates`), and a table decides what is worth doing (`decision`). Everything but `session` is pure or uses a
`Laboratory` only, so that `bench.apo.advising` tries the same code on scripted worlds.
"""
