"""Work for agents, and the runs of trainers: operations on the tape.

Begin with `dispatcher`; `runs` keeps the events and figures of training runs.
"""
