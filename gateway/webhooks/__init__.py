"""Webhooks: others are told what becomes of releases.

Begin with `service`, which sends deliveries. `outbox` makes them of the links of audit chains, on the tape. `message`
says what is sent, `signing` who has sent it, `retry` when it is sent again, `views` how it goes: these are pure.
"""
