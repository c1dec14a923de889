"""The nouns: the records of the tape and the messages of the control API. Pure; they import no other package of the
gateway.

Begin with `rollout` and `span`.
"""
