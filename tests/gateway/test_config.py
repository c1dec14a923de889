"""The configuration is strict, says what is wrong and where, and is documented in both directions."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from fakes.mistakes import refusal, unhelpful
from fakes.pages import disagreements
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from penstock.gateway.api.openapi import field_docs
from penstock.gateway.config import ConfigError, GatewayConfig, load
from penstock.gateway.model.settings import McpServer
from penstock.gateway.traffic.budgets.service import prices_of

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
UPSTREAM = '[[upstream]]\nname = "local"\nbase_url = "http://127.0.0.1:8000/v1/"\n'
SECTIONS = {
    "tls": "[tls]",
    "limits": "[limits]",
    "log": "[log]",
    "tape": "[tape]",
    "index": "[index]",
    "otlp": "[otlp]",
    "key": "[[key]]",
    "upstream": "[[upstream]]",
    "route": "[[route]]",
    "mcp": "[mcp]",
    "mcp.servers.NAME": "[mcp.servers.NAME]",
    "policy": "[[policy]]",
    "webhook": "[[webhook]]",
    "retention": "[[retention]]",
    "budget": "[[budget]]",
    "masking": "[[masking]]",
}


def read(tmp_path: Path, text: str, **overrides: Any) -> GatewayConfig:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return load(path, **overrides)


def model_of(name: str) -> type[BaseModel]:
    if name == "mcp.servers.NAME":
        return McpServer
    annotation: Any = GatewayConfig.model_fields[name].annotation
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation


def keys_of_all_sections() -> list[tuple[str, str]]:
    """("" or the section, key) of everything that can be set."""
    top = [("", name) for name in GatewayConfig.model_fields]
    return top + [(section, name) for section in SECTIONS for name in model_of(section).model_fields]


def test_everything_has_a_default() -> None:
    config = load(None)
    assert config == GatewayConfig()
    assert [upstream.name for upstream in config.upstreams()] == ["openai", "anthropic", "chatgpt", "gemini"]
    config.refuse_open_door()
    assert config.loopback
    assert not config.token_required


def test_overrides_win_and_none_does_not_count(tmp_path: Path) -> None:
    config = read(tmp_path, 'port = 1\nhost = "::1"\n', port=2, host=None, data=tmp_path)
    assert (config.port, config.host, config.data) == (2, "::1", tmp_path)


def test_the_documented_example_is_valid(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert example is not None
    config = read(tmp_path, example[1])
    assert list(config.route[0].upstream) == ["local"]
    assert config.tape.on_record_failure == {"online": "refuse", "train": "refuse", "val": "refuse", "test": "refuse"}


def test_an_upstream_replaces_the_public_one_of_its_family(tmp_path: Path) -> None:
    config = read(tmp_path, UPSTREAM + '[[route]]\nmodel = "qwen*"\nupstream = ["local", "anthropic"]\n')
    assert [upstream.name for upstream in config.upstreams()] == ["local", "anthropic", "chatgpt", "gemini"]
    assert config.upstream[0].base_url == "http://127.0.0.1:8000/v1"
    assert config.route[0].matches("qwen3-8b")
    assert not config.route[0].matches("Qwen3-8b")


def test_a_misspelt_key_names_its_path_and_the_nearest(tmp_path: Path) -> None:
    misspelt: list[tuple[str, str, str]] = []
    for section, key in keys_of_all_sections():
        head = SECTIONS.get(section, "")
        table = f"{section} 1: " if head.startswith("[[") else f"{section}." if section else ""
        misspelt.append((f"{head}\n{key}q = 1\n", table, key))
    faults = unhelpful(partial(read, tmp_path), misspelt)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[upstream]]\nname = "one"\nbase_url = 1\n', "upstream 'one': base_url: 1 is not text"),
        (UPSTREAM + '[[upstream]]\nbase_url = "http://x"\n', "upstream 2: name: it is missing"),
        (UPSTREAM + '[[upstream]]\nname = "local"\nbase_url = 1\n', "upstream 2: base_url: 1 is not text"),
        (UPSTREAM + "[[upstream]]\nname = 3\n", "upstream 2: name: 3 is not text"),
        ('[[upstream]]\nname = "one"\nbase_ulr = 1\n', "upstream 'one': base_ulr: unknown key; did you mean"),
        (
            '[[route]]\nmodel = "gpt-*"\nupstream = ["a", 1]\n',
            "route 'gpt-*': upstream: 1 is not the name of an upstream",
        ),
        ('[[route]]\nmodel = "m"\nupstream = { a = -1 }\n', "route 'm': upstream.a: -1 is not 0 or more"),
        (
            '[[upstream]]\nname = "a"\nbase_url = "http://x:99999"\n',
            "upstream 'a': base_url: its port must be a number from 1 to 65535 (found 'http://x:99999')",
        ),
        (
            "[mcp.servers.files]\nurl = 'http://x:99999/mcp'\n",
            "mcp.servers.files.url: its port must be a number from 1 to 65535 (found 'http://x:99999/mcp')",
        ),
        ('port = "4747"\n', "port: '4747' is not a whole number: write it without quotes"),
        ("[[budget]]\nmodel = 'm'\n", "budget 1: name: it is missing"),
        ("[[budget]]\nname = 'a'\nunit = 'usd'\nlimit = 4e-10\n", "limit: 4e-10 is less than 1e-09 US dollars"),
        ("[[budget]]\n[[budget]]\nname = 'team'\nlimit = 0\n", "budget 'team': limit: 0 is not more than 0"),
        ('names = ["a", "b c"]\n', "names 2: 'b c' is not the name of a host"),
        ("[mcp.servers.files]\ncommand = ['a', 1]\n", "mcp.servers.files.command 2: 1 is not text"),
        ('[upstream]\nname = "a"\n', "upstream: there may be several, so write [[upstream]] or a list of tables"),
        ('record = "strict"\n', "record: unknown key; did you mean [tape] record?"),
        ('verdict = "deny"\nglobs = []\n', "verdict: unknown key; did you mean [[policy]] verdict?"),
        ('base_url = "x"\nlevel = "x"\n', "base_url: unknown key; did you mean [[upstream]] base_url?; level: unkn"),
        ("[names]\na = 1\n", "names: an object is not a list"),
        ('[tape]\non_record_failure = { onlin = "pass" }\n', "tape.on_record_failure.onlin: 'onlin' is not 'train'"),
        (
            '[[policy]]\nname = "r"\nverdict = "deny"\nargument = [{ at = "a", blob = 1 }]\n',
            "policy 'r': argument 1: blob: unknown key; did you mean 'glob'?",
        ),
    ],
)
def test_a_repeated_table_has_its_name_or_its_number(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)


def test_a_key_that_is_like_no_other_is_answered_with_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="zzz: unknown key; known keys: record, queue_bytes"):
        read(tmp_path, "[tape]\nzzz = 1\n")


WRONG = {
    "": [
        "host = 1", "socket = 1", "names = 1", 'names = ["a b"]', "port = 70000", 'port = "80"', "port = true",
        "data = 1", "tls = 1", "limits = 1", "log = 1", "tape = 1", "otlp = 1", "index = 1", "key = 1", "upstream = 1",
        "route = 1", 'require_token = "yes"', "trust_agent_rewards = 1", "quiet_seconds = 0", "prices = 7",
        "reload_on_change = 1", "mcp = 1", "policy = 1", "masking = 1", "webhook = 1", "retention = 1", "budget = 1",
    ],
    "tls": ["certificate = 1", "key = 1", "client_ca = 1"],
    "log": ['format = "xml"', 'level = "loud"', "calls = 1"],
    "key": ['name = "a b"', 'role = "admin"', 'sha256 = "secret"'],
    "upstream": [
        'name = "a b"', 'base_url = "ftp://x"', 'base_url = "http://me:pw@x"', 'base_url = "http://x?key=1"',
        'base_url = "http://x:99999"', 'base_url = "http://x:http"', 'base_url = "http://x:0"', 'dialect = "grpc"',
        "key_env = 1", 'auth = "azure"', "max_concurrent = 0", "context = 0", "read_timeout = inf",
        'health_path = "health"', 'session_header = "Authorization"', "ca_file = 1", "client_cert = 1",
        "client_key = 1", 'proxy = "http://me:pw@x"', 'proxy = "http://x:99999"', "proxy_auth_env = 1",
        'auth = "azure"',
    ],
    "route": [
        "model = 1", "upstream = []", "upstream = { a = -1 }", 'stream = "half"', "alias = 1", "train = 1",
        "translate = 1",
    ],
    "limits": [
        "request_bytes = 0", "recorded_bytes = 1.5", "drain_seconds = -1", "drain_delay = -1",
    ],
    "tape": [
        "keep_bytes = 0", 'record = "sometimes"', "queue_bytes = 0", 'on_record_failure = { online = "drop" }',
        'on_record_failure = { onlin = "pass" }', "on_record_failure = 1", 'media = "drop"',
    ],
    "otlp": [
        'endpoint = "collector:4318"', 'endpoint = "http://collector:43180000"', "wait = 301",
        'endpoint = "http://me:pw@x"', 'capture_content = "yes"',
    ],
    "mcp": ["servers = 1", "write = 1"],
    "mcp.servers.NAME": [
        'url = "ftp://x"', 'command = "npx"', "env = { A = 1 }", 'env_keys = "KEY"', "cwd = 1", "processes = 0",
        "key_env = 1",
        "first_byte_timeout = inf", 'on_change = "refuse"',
        "max_concurrent = 0", "breaker_failures = 0",
    ],
    "policy": [
        'name = "a b"', "server = []", "tool = 1", 'argument = [{ at = "/path", glob = "*" }]',
        "annotations = { readOnly = true }", 'mode = "prod"', 'verdict = "block"', "message = 1",
        'redact = { pattern = "x" }', 'kernel = "module"', "wait = 0", "hard = 1",
        "agent = 1",
    ],
    "masking": ["name = 1", "pattern = 1", 'paths = ["**"]'],
    "retention": ["filter = 1", 'after = "soon"'],
    "budget": [
        'name = "a b"', 'per = "team"', 'only = "a"', 'model = ""', 'unit = "euros"', "limit = 0", 'window = "10ms"',
        'unknown = "free"',
    ],
    "index": ['when = "sometimes"', 'sql = "anything"'],
    "webhook": ['name = "a b"', "url = 1", "secret_env = 1", 'events = ["rollback"]'],
}  # fmt: skip
"""Lines that are wrong, by their section."""


def test_a_wrong_value_names_its_key(tmp_path: Path) -> None:
    faults: list[str] = []
    wrong = [(section, line) for section, lines in WRONG.items() for line in lines]
    for section, line in wrong:
        key, said = line.partition(" ")[0], refusal(partial(read, tmp_path), f"{SECTIONS.get(section, '')}\n{line}\n")
        named = re.search(rf"(?:^|[ ;.]){key}(?:[.:]| 1:)", said)
        faults += [] if named else [f"{section} {line}: it is answered {said!r}: name the key"]
    assert not faults, "\n".join(faults)
    assert {(section, line.partition(" ")[0]) for section, line in wrong} == set(keys_of_all_sections())


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"penstock\.toml: .*port.*; .*drain_seconds: -1 is not 0 or more"):
        read(tmp_path, "port = -1\n[limits]\ndrain_seconds = -1\n")


def test_only_engines_can_be_asked_for_token_ids(tmp_path: Path) -> None:
    route = '[[route]]\nmodel = "policy"\nupstream = {}\ntrain = true\n'
    assert read(tmp_path, UPSTREAM + route.format('"local"')).route[0].train
    said = r"route 'policy' has train = true and upstream '{}' \({}\) gives no token ids: name one that"
    for name, what in (("anthropic", "dialect 'anthropic'"), ("gemini", "dialect 'gemini'")):
        with pytest.raises(ConfigError, match=said.format(name, what)):
            read(tmp_path, UPSTREAM + route.format(f'["local", "{name}"]'))
    with pytest.raises(ConfigError, match=said.format("openai", "api.openai.com")):
        read(tmp_path, route.format('"openai"'))


def test_exact_tokens_are_those_of_a_model_that_is_trained(tmp_path: Path) -> None:
    (route,) = read(tmp_path, UPSTREAM + '[[route]]\nmodel = "policy"\nupstream = "local"\ntrain = "exact"\n').route
    assert (route.train, route.translates) == ("exact", True)
    with pytest.raises(ConfigError, match="route 'policy': train"):
        read(tmp_path, UPSTREAM + '[[route]]\nmodel = "policy"\nupstream = "local"\ntrain = "rough"\n')


def test_names_must_exist_and_differ(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="route 'x' names upstream 'lokal'; there are: local, anthropic"):
        read(tmp_path, UPSTREAM + '[[route]]\nmodel = "x"\nupstream = "lokal"\n')
    with pytest.raises(ConfigError, match=r"'local' .* two upstreams: choose one"):
        read(tmp_path, UPSTREAM + UPSTREAM)
    with pytest.raises(ConfigError, match=r"'gemini' .* public endpoint of dialect 'gemini': give"):
        read(tmp_path, UPSTREAM.replace("local", "gemini"))


@pytest.mark.parametrize("setting", ["data", "socket", "prices"])
def test_a_path_that_names_nothing_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: .*: give a path, or leave it out"):
        read(tmp_path, f'{setting} = ""\n')


def test_a_list_of_prices_that_is_not_there_is_named_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prices: .*nowhere\.toml does not exist"):
        prices_of(read(tmp_path, f'prices = "{tmp_path / "nowhere.toml"}"\n'))


URLS = ('[[upstream]]\nname = "a"\nbase_url', UPSTREAM + "proxy", "[otlp]\nendpoint", "[mcp.servers.a]\nurl")


@pytest.mark.parametrize("setting", URLS)
def test_a_port_that_there_cannot_be_is_refused(tmp_path: Path, setting: str) -> None:
    for port in ("x", "65536"):
        with pytest.raises(ConfigError, match=r"its port must be a number from 1 to 65535 \(found 'http://localhost:"):
            read(tmp_path, f'{setting} = "http://localhost:{port}/v1"\n')


@pytest.mark.parametrize("setting", URLS)
def test_a_url_in_other_letters_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=r"ASCII: .* xn--"):
        read(tmp_path, f'{setting} = "http://b\u00fccher.example/v1"\n')


@pytest.mark.parametrize("user", ["me:pass@phrase", ":phrase"])
def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path: Path, user: str) -> None:
    with pytest.raises(ConfigError, match=r"found 'http://\*\*\*@localhost/v1'\)") as caught:
        read(tmp_path, f'[[upstream]]\nname = "a"\nbase_url = "http://{user}@localhost/v1"\n')
    assert "phrase" not in str(caught.value)


@pytest.mark.parametrize(("content", "problem"), [(b"port = ", "TOML"), (b"\xff", "TOML"), (None, "does not exist")])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "penstock.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load(path)


def test_keys_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = read(tmp_path, UPSTREAM + 'key_env = "TEST_KEY"\n').upstream[0]
    monkeypatch.delenv("TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="TEST_KEY, which is not set"):
        upstream.key()
    monkeypatch.setenv("TEST_KEY", "k")
    assert upstream.key() == "k"
    assert load(None).upstreams()[0].key() is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "give it either url.* or command"),
        ('url = "http://x"\ncommand = ["x"]', "give it either url.* or command"),
        ('url = "http://x"\nenv = { A = "1" }', "env does nothing for a server with url"),
        ('command = ["x"]\nkey_env = "K"', "key_env does nothing for a server with command: env_keys gives it keys"),
        ("command = []", "command"),
        ('command = ["x"]\nenv_keys = ["PENSTOCK_ADMIN_KEY"]', "PENSTOCK_ADMIN_KEY is the gateway's own"),
    ],
)
def test_a_server_of_tools_is_reached_or_started(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, f"[mcp.servers.s]\n{text}\n")


def test_what_a_hosted_server_gets_is_kept_off_the_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = 'command = ["x"]\nenv = { A_TOKEN = "one", PLAIN = "two" }\nenv_keys = ["ITS"]\n'
    config = read(tmp_path, f"[mcp.servers.s]\n{server}")
    monkeypatch.delenv("ITS", raising=False)
    with pytest.raises(ConfigError, match=r"mcp\.servers\.s: env_keys names ITS, which is not set"):
        config.secrets()
    monkeypatch.setenv("ITS", "three")
    assert {"one", "three"} <= {*config.secrets()}
    assert "two" not in config.secrets()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example", ""])
def test_no_open_door_without_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, host=host)
    monkeypatch.delenv("PENSTOCK_ADMIN_KEY", raising=False)
    assert config.token_required
    with pytest.raises(ConfigError, match="PENSTOCK_ADMIN_KEY"):
        config.refuse_open_door()
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "k")
    config.refuse_open_door()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert load(None, host=host).loopback


@example({"path": None})
@given(st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=4) | st.lists(st.integers())))
def test_no_tree_raises_anything_else(tree: dict[str, Any]) -> None:
    with suppress(ConfigError):
        load(None, **tree)


def documented() -> dict[tuple[str, str], tuple[str, str]]:
    """(section, key) -> (default, meaning), as the tables of the document have them."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    section = ""
    for line in DOCS.read_text().splitlines():
        if heading := re.fullmatch(r"## `\[+([\w.]+)\]+`", line):
            section = heading[1]
        elif row := re.fullmatch(r"\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|", line):
            found[section, row[1]] = row[2], row[3]
    return found


def test_every_setting_is_documented_as_it_is() -> None:
    """With its default, and in the words of the code. A default that is None is said in words; what stands for a table
    says where that is."""
    docs = {section: field_docs(model_of(section) if section else GatewayConfig) for section in ["", *SECTIONS]}
    told = documented()
    known: dict[tuple[str, str], tuple[str, str]] = {}
    for section, key in keys_of_all_sections():
        default, said = known[section, key] = told.get((section, key), ("", ""))
        if section or key not in SECTIONS:
            field = (model_of(section) if section else GatewayConfig).model_fields[key]
            shown = "required" if field.is_required() else default if field.default is None else as_toml(field.default)
            meaning = docs[section][key].split(" Default:")[0]
            known[section, key] = shown, said if said.startswith(meaning) else meaning
    faults = disagreements(DOCS.name, readable(told), readable(known))
    assert not faults, "\n".join(faults)


def readable(rows: dict[tuple[str, str], tuple[str, str]]) -> dict[str, str]:
    return {f"[{section}] {key}": f"{default} | {meaning}" for (section, key), (default, meaning) in rows.items()}


def as_toml(value: Any) -> str:
    if value in ([], {}):
        return "none"
    if isinstance(value, list):
        return f"`{json.dumps(value)}`"
    if isinstance(value, dict):
        inner = ", ".join(f'{key} = "{one}"' for key, one in value.items())  # pyright: ignore[reportUnknownVariableType]
        return f"`{{ {inner} }}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str | Path) else f"`{value}`"
