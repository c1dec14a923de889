"""The nouns: what is on the tape and what the control API says. Pure; they import nothing else of ours.

Begin with `rollout` and `span`.
"""
