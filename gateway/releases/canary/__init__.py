"""The statistics of a release: assignment, evidence, decision, verification. Pure.

Begin with `decision`.
"""
