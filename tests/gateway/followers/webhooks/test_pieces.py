"""The pieces of webhooks without a network: signatures, retries, deliveries on the tape, settings."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from fakes.hook import SECRET, documented
from fakes.releasing import Bench

from penstock.gateway.config import ConfigError, load
from penstock.gateway.followers import webhooks
from penstock.gateway.followers.webhooks import (
    PATIENCE_NS,
    DeliveryResult,
    Outbox,
    OutboxReader,
    Subscriptions,
    apply_result,
    event_of,
    give_up,
    message_body,
    signed_headers,
    webhook_views,
)
from penstock.gateway.model.release import RELEASE_EVENTS, AuditTrailEntry, Delivery, Release
from penstock.gateway.model.settings import Webhook
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.releases.transitions import PERSON_CHANGES, RULE_CHANGES, entry
from penstock.gateway.wire.http.request import retry_after

S = 10**9
TAKEN = DeliveryResult(204, "")
FAILED = DeliveryResult(500, "500 Internal Server Error")


def delivery(**fields: Any) -> Delivery:
    usual = {"number": 1, "webhook": "pager", "id": "msg_1", "event": "hold", "release": "travel-1", "entry": 2}
    return Delivery.model_validate(usual | {"made_ns": 100 * S} | fields)


def test_the_signature_is_the_one_that_standard_webhooks_publishes() -> None:
    """Its own example, which its libraries for every language are tested with."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    made = signed_headers([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert made["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert (made["webhook-id"], made["webhook-timestamp"]) == ("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330")


@pytest.mark.parametrize(
    ("attempts", "vary", "pause"), [(0, 1.0, 1.0), (1, 0.5, 1.0), (4, 1.5, 24.0), (12, 1.0, 3600.0), (90, 1.0, 3600.0)]
)
def test_pauses_double_up_to_an_hour_and_vary(attempts: int, vary: float, pause: float) -> None:
    before = delivery(attempts=attempts, failing_ns=90 * S)
    done = apply_result(before, FAILED, 200 * S, 201 * S, vary)
    assert (done.status, done.attempts, done.tried_ns) == ("waiting", attempts + 1, 200 * S)
    assert (done.next_ns, done.failing_ns, done.answer) == (int((201 + pause) * S), 90 * S, 500)


def test_what_was_taken_is_over() -> None:
    done = apply_result(delivery(failing_ns=5, error="x", next_ns=7), TAKEN, 200 * S, 201 * S, 1.0)
    assert (done.status, done.error, done.next_ns, done.answer) == ("delivered", "", None, 204)


def test_a_receiver_that_asks_for_time_gets_it() -> None:
    done = apply_result(delivery(), DeliveryResult(429, "429", 500.0), 200 * S, 201 * S, 1.0)
    assert done.next_ns == 701 * S


def test_the_last_try_is_a_day_after_the_change() -> None:
    last = 100 * S + PATIENCE_NS
    done = apply_result(delivery(attempts=40), FAILED, last - 9 * S, last - 8 * S, 1.0)
    assert (done.status, done.next_ns) == ("waiting", last)
    done = apply_result(done, DeliveryResult(503, "503", 10**6), last, last + S, 1.0)
    assert (done.status, done.next_ns, done.error) == ("given_up", None, "503")


def test_410_gives_up_at_once() -> None:
    assert apply_result(delivery(), DeliveryResult(410, "410 Gone"), 1, 2, 1.0).status == "given_up"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("7", 7), ("1e9", 60), ("inf", 60), ("nan", None), ("-3", None), ("soon", None), ("", None),
     ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("Fri, 01 Jan 2100 00:00:00 GMT", 60)],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, 60.0) == seconds


def test_every_action_of_a_release_is_an_event() -> None:
    for action in {"start", "check", "replay", "shadow", "canary", *RULE_CHANGES, *PERSON_CHANGES}:
        assert event_of(entry(action, "ann", "")) is not None, action
    assert {event_of(entry(action, "ann", "")) for action in (*RULE_CHANGES, *PERSON_CHANGES)} < set(RELEASE_EVENTS)


def test_a_message_has_the_figures_and_no_more_of_the_evidence() -> None:
    release = Release.model_validate(
        {"id": "travel-1", "resource": "travel", "kind": "prompt", "stable": "v1", "candidate": "v2"}
    )
    link = AuditTrailEntry(
        number=1, at_ns=1_700_000_000_123_456_789, who="gateway", action="hold", before="canary", after="held"
    )
    link.evidence = {"harm": 1.5, "number": 3, "ok": True, "rollout": "r" * 999, "calls": [{"secret": 1}], "none": None}
    sealed = link.sealed("")
    made = message_body(release, sealed)
    found = documented()(SECRET, signed_headers([base64.b64decode(SECRET[6:])], "msg_1", _now(), made), made)
    assert found["data"]["figures"] == {"harm": 1.5, "number": 3, "ok": True, "rollout": "r" * 200}
    assert (found["type"], found["timestamp"]) == ("release.hold", "2023-11-14T22:13:20.123456Z")


def test_a_message_names_the_stage_of_the_canary_the_holdback_too() -> None:
    release = Release.model_validate(
        {"id": "travel-1", "resource": "travel", "kind": "prompt", "stable": "v1", "candidate": "v2"}
    )
    names: list[str | None] = []
    for step in range(len(release.policy.ramp)):
        link = AuditTrailEntry(
            number=1, at_ns=1, who="gateway", action="advance", before="canary", after="canary", step=step
        )
        names.append(json.loads(message_body(release, link.sealed("")))["data"]["canary"])
    assert names == ["5%", "20%", "50%", "holdback"]


def _now() -> int:
    import time

    return int(time.time())


# -- on the tape -------------------------------------------------------------------------------------------------------

ALL = {"pager": RELEASE_EVENTS}


async def hold_and_resume(made: Bench, release: str) -> None:
    for action in ("hold", "resume"):
        update = PERSON_CHANGES[action]
        await made.do(
            lambda tape, action=action, update=update: ReleaseOperations(tape).change(
                release, None, update(ReleaseOperations(tape).stored(release)), entry(action, "ann", ""), 7
            )
        )


async def test_links_become_deliveries_once_and_of_webhooks_that_were_there(made: Bench) -> None:
    reader = OutboxReader(made.context.tape)
    release = await made.release()
    assert await made.do(lambda tape: Outbox(tape).begin(ALL)) == []
    await hold_and_resume(made, release.id)
    assert reader.releases_behind() == [release.id]
    # Another process begins, with a webhook more: the new one is told nothing of what was before.
    found = await made.do(lambda tape: Outbox(tape).begin(ALL | {"new": RELEASE_EVENTS}))
    assert [(one.webhook, one.event, one.entry) for one in found] == [("pager", "hold", 2), ("pager", "resume", 3)]
    assert reader.releases_behind() == []
    await hold_and_resume(made, release.id)
    wanted: Subscriptions = {"pager": ["resume"], "new": ["hold"]}
    found = await made.do(lambda tape: Outbox(tape).collect(reader.releases_behind(), wanted))
    assert [(one.webhook, one.entry) for one in found] == [("new", 4), ("pager", 5)]
    assert await made.do(lambda tape: Outbox(tape).collect([release.id], wanted)) == []
    assert [one.number for one in reader.waiting()] == [1, 2, 3, 4]


async def test_what_waits_for_a_webhook_that_is_gone_from_the_configuration_is_given_up(made: Bench) -> None:
    reader = OutboxReader(made.context.tape)
    assert not reader.was_configured()
    await made.do(lambda tape: Outbox(tape).begin(ALL))
    assert reader.was_configured()
    await made.release()
    await made.do(lambda tape: Outbox(tape).collect(["travel-1"], ALL))
    await made.do(lambda tape: Outbox(tape).begin({}))
    (one,) = reader.newest()
    assert (one.status, one.error) == ("given_up", "the webhook is not configured any more")
    assert not reader.was_configured()
    await hold_and_resume(made, "travel-1")
    assert await made.do(lambda tape: Outbox(tape).begin(ALL)) == []


async def test_old_deliveries_go_and_those_that_wait_stay(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "KEPT", 4)
    reader = OutboxReader(made.context.tape)
    await made.do(lambda tape: Outbox(tape).begin(ALL))
    release = await made.release()
    await made.do(lambda tape: Outbox(tape).collect([release.id], ALL))
    (first,) = reader.newest()
    for _ in range(4):
        await hold_and_resume(made, release.id)
        for one in await made.do(lambda tape: Outbox(tape).collect([release.id], ALL)):
            await made.do(lambda tape, one=one: Outbox(tape).put(give_up(one)))
    assert [one.number for one in reader.newest()][-1] == 1
    await made.do(lambda tape: Outbox(tape).put(give_up(first)))
    for _ in range(3):
        await hold_and_resume(made, release.id)
        await made.do(lambda tape: Outbox(tape).collect([release.id], ALL))
    assert [one.number for one in reader.newest()] == [15, 14, 13, 12, 11, 10]


# -- how it goes -------------------------------------------------------------------------------------------------------


def hook(**fields: Any) -> Webhook:
    return Webhook.model_validate({"name": "pager", "url": "https://x.example", "secret_env": "S"} | fields)


def test_a_view_says_since_when_and_why() -> None:
    rows = [
        delivery(number=4, made_ns=40, failing_ns=45, next_ns=90, tried_ns=50, error="503"),
        delivery(number=3, made_ns=30),
        delivery(number=2, status="delivered", tried_ns=20),
        delivery(number=1, status="given_up", tried_ns=10, failing_ns=9, error="410"),
        delivery(number=5, webhook="nobody"),
    ]
    (found,) = webhook_views([hook()], rows)
    assert (found.waiting, found.oldest_ns, found.failing_ns, found.next_ns) == (2, 30, 45, 90)
    assert (found.error, found.given_up, found.last) == ("503", 1, rows[2])
    (found,) = webhook_views([hook()], rows[2:])
    assert (found.failing_ns, found.error) == (None, "")
    (found,) = webhook_views([hook()], rows[3:])
    assert (found.failing_ns, found.error, found.last) == (9, "410", None)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://hooks.example/t0ken?k=t0ken", "url: 'http://hooks.example' is not on this machine, and http://"),
        ("http://me:t0ken@10.0.0.1:8/x", "url: 'http://10.0.0.1:8' is not on this machine"),
        ("ftp://me:t0ken@x", "url: it must be an https:// URL, with a host"),
        ("https://:9/t0ken", "url: it must be an https:// URL, with a host"),
        ("https://x:99999/t0ken", "url: it must be an https:// URL, with a host and perhaps a port"),
        ("https://[x/t0ken", "url: it must be an https:// URL, with a host and perhaps a port"),
    ],
)
def test_a_wrong_url_is_refused_and_what_may_be_secret_in_it_not_said(url: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, webhook=[{"name": "pager", "url": url, "secret_env": "S"}])
    assert problem in str(caught.value)
    assert "t0ken" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["https://x.example/a?b=c", "http://127.0.0.1:8/x", "http://[::1]:8/x", "http://localhost/x"]
)
def test_a_right_url_is_taken(url: str) -> None:
    assert hook(url=url).url == url


def test_names_differ() -> None:
    one = {"name": "pager", "url": "https://x.example", "secret_env": "S"}
    with pytest.raises(ConfigError, match="'pager' is the name of two webhooks: choose one for each"):
        load(None, webhook=[one, one])


@pytest.mark.parametrize("value", ["whsec_", "secret", SECRET[6:], "whsec_c2hvcnQ=", "whsec_!" + SECRET[6:], " "])
def test_a_secret_that_is_none_is_refused_and_not_said(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S", value)
    with pytest.raises(ConfigError, match=r"webhook 'pager': secret_env names S, whose value is no secret") as caught:
        hook().keys()
    assert "openssl rand" in str(caught.value)
    assert SECRET[6:] not in str(caught.value)


def test_a_secret_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("S", raising=False)
    with pytest.raises(ConfigError, match="webhook 'pager': secret_env names S, which is not set in the environment"):
        hook().keys()


def test_secrets_are_known_so_that_they_are_kept_off_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S", f"{SECRET} {SECRET}")
    config = load(None, webhook=[{"name": "p", "url": "https://u:pw%2Fd@x.example/?k=v", "secret_env": "S"}])
    assert {SECRET[6:], "pw/d", "k=v"} <= {*config.secrets()}
    assert config.webhook[0].redacted_url == "https://x.example"
