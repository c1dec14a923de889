"""How long rollouts stay: by rule, by the size of the tape, while somebody keeps them, or until they are forgotten.

`operations` has what is decided in a write transaction, `service` what a gateway does in the background.
"""
