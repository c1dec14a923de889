"""What is known of one call: which rollout it belongs to, whether it may pass, and what is recorded of it.

It owns addresses, agent tokens, conversations, capture of token ids and records of calls. It may import every layer
from `queue`, `upstreams` and `display` down. Begin with `admission`.
"""
