"""The facts of one call: the rollout it belongs to, whether it may pass, and its record.

It owns addresses, agent tokens, conversations, capture of token ids and records of calls. Begin with `admission`.
"""
