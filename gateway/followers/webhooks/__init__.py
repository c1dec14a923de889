"""Webhooks: messages to others about changes of releases.

Begin with `service`, which sends deliveries. `outbox` makes them of the links of audit chains, on the tape. `sender`
makes the content, signs it and sends it; `retry` has the pauses between attempts, and `views` the state of each
webhook: these two are pure.
"""
