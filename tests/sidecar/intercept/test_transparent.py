"""Transparent mode: the kernel brings an agent's connections to its sidecar. In networks of the test's own."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from fakes import alone, netfilter

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transparent"), pytest.mark.timeout(300)]
Found = dict[str, Any]


@functools.cache
def paths(folder: Path) -> dict[str, str]:
    """A PATH with each tool."""
    found = netfilter.programs(folder)
    if found is None:
        pytest.skip(netfilter.NOWHERE)
    return found


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return paths(tmp_path_factory.mktemp("netfilter"))


@pytest.fixture(scope="module")
def pods(tools: dict[str, str]) -> Found:
    """What happens in a pod, by the tool that has made its rules; with the second, only what depends on them."""
    if os.geteuid() != 0 or not alone.possible(alone.ROOT_ALONE):
        pytest.skip("a pod has several users: only root can make one")
    path = os.pathsep.join([tools["nft"], tools["iptables"]])
    return alone.run("fakes.redirected_pod", "nft", "iptables", alone=alone.ROOT_ALONE, PATH=path)


@pytest.fixture(scope="module", params=["nft", "iptables"])
def pod(request: pytest.FixtureRequest, pods: Found) -> Found:
    return pods[request.param]


@pytest.fixture(scope="module")
def whole(pods: Found) -> Found:
    return pods["nft"]


@pytest.fixture(scope="module")
def networks(tools: dict[str, str]) -> Found:
    """What happens to agents in networks of their own, by the tool; with the second, only what depends on the rules."""
    if not alone.possible():
        pytest.skip("this machine gives a process no namespaces of its own")
    found = alone.run("fakes.redirected_run", tools["nft"], tools["iptables"], PATH=tools["nft"])
    return dict(zip(("nft", "iptables"), found, strict=True))


@pytest.fixture(scope="module", params=["nft", "iptables"])
def own(request: pytest.FixtureRequest, networks: Found) -> Found:
    return networks[request.param]


@pytest.fixture(scope="module")
def others(networks: Found) -> Found:
    return networks["nft"]


def egress(found: Found) -> dict[str, Any]:
    return {event["server.address"]: event for event in found["egress"]}


def test_a_pods_model_host_gets_what_it_gets_without_a_sidecar(pod: Found) -> None:
    assert len(pod["direct"]["asked"]) == 1
    assert pod["behind"]["asked"] == pod["direct"]["asked"]
    assert pod["behind"]["out"] == pod["direct"]["out"]
    assert pod["six"]["asked"] == pod["direct"]["asked"]
    assert pod["six"]["code"] == 0


def test_a_pods_calls_are_on_the_tape(whole: Found) -> None:
    assert whole["calls"] == ["ok", "ok"]
    assert '"rollout": "r1"' in whole["check"]["out"]


def test_where_a_pods_agent_has_been_is_on_the_tape(whole: Found) -> None:
    assert whole["other"]["code"] == 0
    assert whole["address"]["code"] == 0
    events = egress(whole)
    assert events["other.test"]["fate"] == "tunnel"
    assert events["other.test"]["network.peer.address"] == "10.78.0.1"
    assert events["other.test"]["bytes_received"] > 400
    assert events["10.78.0.1"]["fate"] == "tunnel"


def test_a_pods_sidecar_proves_that_connections_get_to_it(pod: Found) -> None:
    assert pod["ready"] == {"status": 200, "text": "serving\n"}
    assert pod["no rules"]["status"] == 503
    assert pod["no rules"]["text"].startswith("connections of agents do not get here: ")
    assert "--uid" in pod["wrong user"]["ready"]["text"]
    assert pod["wrong user"]["ready"]["status"] == 503


def test_nothing_gets_past_a_sidecar_that_is_not_there(pod: Found) -> None:
    for when in ("nobody there", "killed"):
        assert pod[when]["code"] == 7, "curl: could not connect"
        assert pod[when]["asked"] == []


def test_http_3_is_refused_and_only_to_the_agent(pod: Found) -> None:
    assert pod["quic"]["packets"] == ["sidecar\n"]


def test_what_is_refused_is_refused_in_words_of_tls(whole: Found) -> None:
    assert "alert access denied" in whole["denied"]["err"]
    assert whole["denied"]["asked"] == []


def test_only_redirected_connections_are_taken(whole: Found) -> None:
    assert whole["not redirected"]["code"] != 0
    assert "only redirected connections" in egress(whole)["127.0.0.1"]["problem"]


def test_a_sidecar_that_its_rules_do_not_leave_alone_does_not_call_itself_for_ever(pod: Found) -> None:
    assert pod["wrong user"]["code"] == 35
    assert pod["wrong user"]["asked"] == []


def test_rules_are_made_by_whoever_has_the_right(pod: Found) -> None:
    assert pod["powerless"]["code"] == 1
    assert "CAP_NET_ADMIN" in pod["powerless"]["err"]
    assert pod["applied"] == {"code": 0, "out": "connections go to port 8100, but those of user 0\n", "err": ""}
    assert [one["code"] for one in pod["removed"]] == [0, 0]
    assert pod["after"]["asked"] == pod["direct"]["asked"]


def test_an_agent_in_a_network_of_its_own_sends_what_it_sends_without(own: Found) -> None:
    assert len(own["direct"]) == 1
    assert own["curl"]["asked"] == own["direct"]
    assert own["spans"][0]["kind"] == "llm"


def test_it_is_who_it_was_and_has_no_rights_over_its_network(others: Found) -> None:
    assert others["user"]["out"] == "0\n", "who has started it, and it could not take its network down"
    assert others["user"]["code"] == 128 + 15
    assert others["absent"]["code"] == 127
    assert "'no-such-command' could not be started" in others["absent"]["err"]


def test_each_name_leads_to_the_sidecar_which_looks_it_up(others: Found) -> None:
    assert others["python"]["out"] == "hello\nhello\n"
    assert [span["kind"] for span in others["spans"]][:3] == ["llm", "llm", "llm"]
    assert '"rollout": "r1"' in others["check"]["out"]
    assert "nowhere.test:443 could not be reached" in others["unknown"]["err"]
    assert "nowhere.test:443 may not be reached from here" in others["deny"]["err"]
    events = [span["attributes"] for span in others["spans"] if span["kind"] == "event"]
    assert [(event["server.address"], event["fate"]) for event in events] == [
        ("nowhere.test", "tunnel"),
        ("nowhere.test", "deny"),
    ]


def test_nothing_else_leads_out_of_its_network(own: Found) -> None:
    assert own["quic"]["code"] == 1
    assert own["killed"]["code"] == -9
    # Reset: it was there first, and waited to be taken.
    assert any(f"Connection {what}" in own["killed"]["out"] for what in ("refused", "reset"))
    assert own["killed"]["asked"] == []
