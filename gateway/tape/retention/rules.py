"""The filters of retention rules, parsed before a gateway starts. Pure."""

from __future__ import annotations

from penstock.gateway.model.retention import RetentionRule
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.reading.filters.query import Query, QueryError, parse


def parse_rule(place: int, rule: RetentionRule) -> Query:
    """Return the filter of the `place`th rule. Raises `ConfigError` when it cannot be understood, or is about calls."""
    try:
        query = parse(rule.filter, "rollouts")
    except QueryError as error:
        raise ConfigError(f"retention {place}: filter: {rule.filter!r} cannot be understood: {error}") from None
    if query.needs_spans:
        raise ConfigError(
            f"retention {place}: filter: {rule.filter!r} is about calls, and rollouts are forgotten as a whole: name "
            "what `penstock rollouts` shows of them, such as status, mode, group, reward or metadata.NAME"
        )
    return query
