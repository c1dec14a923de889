"""What redirected connections say of themselves, the names of a network of its own, and the rules of the kernel."""

from __future__ import annotations

import ssl
import struct
from ipaddress import ip_address, ip_network

import pytest
from fakes.goldens import check_golden
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from penstock.sidecar.intercept import rules
from penstock.sidecar.intercept.agent_proxy import LARGEST, DnsTable, SniffResult, sniff

EDGE = st.sampled_from("abz019")
LABEL = st.one_of(EDGE, st.tuples(EDGE, st.text("abz019-", max_size=20), EDGE).map("".join))
NAME = st.lists(LABEL, min_size=1, max_size=6).map(".".join).filter(lambda it: not it.replace(".", "").isdigit())


def hello(name: str | None, alpn: tuple[str, ...] = ("h2", "http/1.1")) -> bytes:
    """As OpenSSL says it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the certificates of this machine, which take long
    context.check_hostname = False
    context.set_alpn_protocols(alpn)
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


@given(NAME, st.integers(1, 600))
def test_the_name_in_a_hello_is_read_whenever_it_is_whole(name: str, cut: int) -> None:
    data = hello(name)
    assert sniff(data) == SniffResult(True, name)
    assert sniff(data + b"\x14\x03\x03") == SniffResult(True, name)
    assert sniff(data[: min(cut, len(data) - 1)]) is None


@given(NAME, st.integers(1, 200))
def test_a_hello_in_several_records_is_one(name: str, size: int) -> None:
    message = hello(name)[5:]
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    data = b"".join(b"\x16\x03\x01" + struct.pack("!H", len(piece)) + piece for piece in pieces)
    assert sniff(data) == SniffResult(True, name)


def test_a_hello_may_name_nobody() -> None:
    assert sniff(hello(None)) == SniffResult(True, None)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_odd_bytes_never_raise(data: bytes, at: int) -> None:
    for one in (
        data,
        b"\x16" + data,
        (whole := hello("a.test"))[:at] + data,
        whole[:at] + data + whole[at + len(data) :],
    ):
        found = sniff(one)
        assert found is None or found.name is None or len(found.name) <= 253


def test_what_never_becomes_whole_is_given_up() -> None:
    assert sniff(b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + bytes(LARGEST)) == SniffResult(True, None)
    assert sniff(b"GET / HTTP/1.1\r\nX: " + b"x" * LARGEST) == SniffResult(False, None)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"GET / HTTP/1.1\r\nHost: LLM.test\r\n\r\n", SniffResult(False, "llm.test")),
        (b"POST /x HTTP/1.1\r\nA: b\r\nhost:llm.test:8080\r\n\r\nHost: other.test\r\n", SniffResult(False, "llm.test")),
        (b"GET / HTTP/1.1\r\nHost: [fd00::1]:80\r\n\r\n", SniffResult(False, "fd00::1")),
        (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", SniffResult(False, None)),
        (b"GET / HTTP/1.1\r\nHost: " + b"a" * 253 + b"\r\n\r\n", SniffResult(False, "a" * 253)),
        (b"GET / HTTP/1.1\r\nHost: " + b"a" * 254 + b"\r\n\r\n", SniffResult(False, None)),
        (b"GET / HTTP/1.1\r\nHost: [" + b"f" * 60000 + b"]\r\n\r\n", SniffResult(False, None)),
        (b"GET / HTTP/1.1\r\nHost: llm.te", None),
        (b"G", None),
        (b"", None),
        (b"SSH-2.0-OpenSSH_9.2\r\n", SniffResult(False, None)),
        (b"\0\0\0\x08\x04\xd2\x16\x2f", SniffResult(False, None)),
    ],
)
def test_plain_requests_name_their_host(data: bytes, found: SniffResult | None) -> None:
    assert sniff(data) == found


def question(name: str, kind: int = 1, number: int = 7) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in name.encode().split(b"."))
    return struct.pack("!HHHHHH", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


@given(st.lists(NAME, min_size=1, max_size=8))
def test_each_name_has_an_address_of_its_own(asked: list[str]) -> None:
    names = DnsTable()
    found = dict[str, str]()
    for name in asked:
        answer = names.answer(question(name))
        assert answer is not None
        assert answer.startswith(b"\0\x07\x81\x80\0\1\0\1\0\0\0\0" + question(name)[12:])
        address = str(ip_address(answer[-4:]))
        assert found.setdefault(name, address) == address
        assert names.name(address) == name
        assert ip_address(address) in ip_network("198.18.0.0/15")
    assert len(set(found.values())) == len(set(asked))
    assert names.name("1.2.3.4") == "1.2.3.4"


def test_a_name_has_no_other_records() -> None:
    answer = DnsTable().answer(question("llm.test", kind=28))
    assert answer == b"\0\x07\x81\x80\0\1\0\0\0\0\0\0" + question("llm.test", kind=28)[12:]


@pytest.mark.parametrize("name", ["llm.test:1\r\nX-More: 1", "a b", "é.test", "a\0b", ".".join(["a" * 60] * 5)])
def test_what_can_be_no_host_has_no_address(name: str) -> None:
    """A proxy beyond would be asked for it, line ends and all."""
    names = DnsTable()
    answer = names.answer(question(name))
    assert answer == b"\0\x07\x81\x83\0\1\0\0\0\0\0\0" + question(name)[12:]
    assert names.name("198.18.0.1") == "198.18.0.1"


@given(st.binary(max_size=64), st.integers(0, 40))
def test_odd_questions_never_raise(data: bytes, at: int) -> None:
    names = DnsTable()
    for one in (data, question("a.test")[:at], question("a.test")[:at] + data):
        answer = names.answer(one)
        assert answer is None or answer[:2] == one[:2]


def test_the_rules() -> None:
    made = [rules.nft(8100, 10001), rules.nft(8100, None), rules.nft_removal()]
    made += [rules.iptables(8100, uid, six) for uid in (10001, None) for six in (False, True)]
    check_golden("sidecar-rules", Text("\n".join([*made, rules.iptables_removal()])))


def test_a_tool_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(rules.RedirectError, match="install nftables"):
        rules.choose_tool(None)
    with pytest.raises(rules.RedirectError, match=r"--tool iptables: .* cannot be found"):
        rules.choose_tool("iptables")
