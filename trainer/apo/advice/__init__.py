"""`penstock train apo advise`: finds out, before a run, if there is anything to gain, and by which means.

A small probe (`probe`) runs the texts as they are and a handful of very different ones (`probe_prompts`) on a few
tasks of the train split. Its rollouts, and earlier ones on the tape (`tape_observations`), are observations
(`observation`). From these the variance of the reward is split (`variance`), gains are estimated (`belief`), the race
of a run is simulated (`forecast`), and a table decides what is worth doing (`decision`). `page` prints it for a
person. Everything but `tape_observations` and `session` is pure or uses a `Laboratory` only, so that
`bench.apo.advising` tries the same code on scripted worlds.
"""
