"""Webhooks: messages to others about changes of releases.

Begin with `service`, which sends deliveries. `outbox` makes them of the links of audit chains, on the tape. `message`
has the content, `sender` signs and sends, `retry` the pauses between attempts, `views` the state of each webhook:
these are pure.
"""
