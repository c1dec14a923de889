"""A release or a resource whose record is damaged: it is left alone, and all else goes on."""

from __future__ import annotations

import lmdb
import pytest
from fakes.experiment import Traffic, policy, prompt
from fakes.process import Gateway
from fakes.tape import Tape

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.audit import ActionRequest


async def harm(gateway: Gateway, database: bytes, key: bytes) -> None:
    """Starts it again on a tape of which this record is damaged."""
    _ = await gateway.terminate()
    with lmdb.open(str(gateway.data / "tape"), max_dbs=64) as tape, tape.begin(write=True) as txn:
        assert txn.replace(key, b"\xff\xff", db=tape.open_db(database, txn)) is not None
    await gateway.start(gateway.port)


async def test_a_damaged_release_keeps_no_gateway_from_starting(
    gateway: Gateway, client: Client, traffic: Traffic, tape: Tape
) -> None:
    """What it has given to rollouts stays theirs, others get the stable version, another release can be made."""
    release = await traffic.start("travel", "v2", policy(0.999))
    assert await traffic.rollout("r1", lambda _: None, calls=1) == "candidate"
    await harm(gateway, b"releases", release.id.encode())
    assert f"release {release.id} is left alone" in gateway.log
    _ = await traffic.call("r1")
    _ = await traffic.call("r2")
    assert [span.versions for span in await tape.spans("r1", 2)] == [{"travel": "v2"}] * 2
    assert [(span.versions, span.arm) for span in await tape.spans("r2", 1)] == [({"travel": "v1"}, None)]
    assert traffic.failures == []

    assert await client.releases() == []
    with pytest.raises(ClientError, match="its record cannot be read; run `penstock check`"):
        _ = await client.decide(release.id, "abort", ActionRequest(who="ann", why="it is damaged"))
    other = await traffic.start("travel", "v2", policy(0.999))
    assert other.id != release.id
    assert await traffic.rollout("r3", lambda _: None, calls=1) == "candidate"
    # Retention asks whether it still has to count its rollouts.
    _ = await client.cancel("r1")
    _ = await client.forget("r1")
    assert await client.rollouts_by_id(["r1"]) == []


@pytest.mark.parametrize(("database", "key"), [(b"resources", b"other\0v1\0"), (b"stable", b"other")])
async def test_a_damaged_resource_takes_no_other_with_it(
    gateway: Gateway, client: Client, traffic: Traffic, tape: Tape, database: bytes, key: bytes
) -> None:
    _ = await client.add_version("other", prompt("You are somebody else, and it is {date}.", sent=True))
    await harm(gateway, database, key)
    assert "resource other is left alone" in gateway.log
    assert [one.name for one in await client.resources()] == ["travel"]
    _ = await traffic.call("r1")
    _ = await traffic.call("r2", text="You are somebody else, and it is Tuesday.")
    assert [span.versions for span in await tape.spans("r1", 1)] == [{"travel": "v1"}]
    assert [span.versions for span in await tape.spans("r2", 1)] == [None]
    assert traffic.failures == []
