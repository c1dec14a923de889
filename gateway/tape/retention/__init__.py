"""Retention: rollouts stay until a rule, the size of the tape or a request removes them; a held rollout stays.

`operations` has the decisions inside a write transaction, `service` the work in the background.
"""
