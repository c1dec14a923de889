"""The statistics of a release: assignment, evidence, decision, verification. Pure.

It may import `config`, `metrics` and `model`. Begin with `decision`.
"""
