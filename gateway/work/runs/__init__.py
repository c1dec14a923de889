"""Training runs: the reports of trainers, their storage on the tape, and reading them.

Begin with `operations`.
"""
