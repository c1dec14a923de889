"""Budgets of calls, as configured: reserved before a call goes out, settled with its span. Begin with `operations`,
which does both in a transaction; `service` is their interface for calls, `claims` computes how much a request may use
at most, and `ledgers` keeps reservations in memory."""
