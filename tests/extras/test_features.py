"""Each extra that is installed in a moment, alone in a clean environment, and what it is for."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import aiohttp
import anthropic
import pytest
from fakes import kubernetes, vllm_wire
from fakes.clean import Install
from fakes.cloud_credentials import clouds
from fakes.many_turns import hello
from fakes.process import ROOT, Gateway, upstream, upstreams
from fakes.provider import Provider
from fakes.shell import Done, Shell

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.run import NewRun, Point

EXAMPLES = {"openai_agent.py": "chat", "anthropic_agent.py": "messages"}
MORE = {"langchain_agent.py": "chat", "agents_sdk.py": "responses"}
READ = "import sys, json, pyarrow.parquet as it; print(json.dumps(it.read_table(sys.argv[1]).to_pylist()))"
TRAINED = '[[route]]\nmodel = "m"\nupstream = "vllm"\ntrain = true\n'
NOWHERE = upstreams(openai="http://127.0.0.1:9/v1")


async def good(shell: Shell, *words: str) -> Done:
    """A command that has done what it was asked for."""
    done = await shell.run(*words)
    assert done.code == 0, done.err
    return done


def test_demo(install: Install) -> None:
    said = install("demo").run("-m", "examples.demo.demo", env={"PYTHONPATH": str(ROOT)})
    assert said.count("The answer is 437.") >= 2


async def test_examples(install: Install, gateway: Gateway) -> None:
    clean = install("examples")
    for script, dialect in (EXAMPLES | MORE).items():
        addresses = {"OPENAI_BASE_URL": gateway.openai(dialect), "ANTHROPIC_BASE_URL": gateway.address(dialect)}
        keys = {"OPENAI_API_KEY": "sk-mine", "ANTHROPIC_API_KEY": "sk-ant-mine"}
        said = await asyncio.to_thread(clean.run, ROOT / "examples" / script, env=addresses | keys)
        assert said == "The answer is 437.\nYou said: Thank you, that is all.\n", script


async def test_parquet(install: Install, provider: Provider, tmp_path: Path) -> None:
    clean = install("parquet")
    async with clean.gateway(tmp_path / "home", upstreams(openai=provider.openai_url)) as gateway:
        shell = clean.shell(gateway.url, tmp_path)
        await hello(gateway, "r1")
        await good(shell, "export", "--format", "parquet", "-o", "out.parquet")
        await good(shell, "samples", "--form", "chat", "--format", "parquet", "-o", "chat.parquet")
    (rollout,), (chat,) = (json.loads(clean.run("-c", READ, tmp_path / f"{name}.parquet")) for name in ("out", "chat"))
    assert rollout["id"] == chat["rollout"] == "r1"
    assert json.loads(chat["messages"])[0]["content"] == "Hello."


async def test_index(install: Install, provider: Provider, tmp_path: Path) -> None:
    clean = install("index")
    config = f'[index]\nwhen = "always"\n{upstreams(openai=provider.openai_url)}'
    async with clean.gateway(tmp_path / "home", config) as gateway:
        shell = clean.shell(gateway.url, tmp_path)
        await hello(gateway, "r1")
        while not (told := await good(shell, "index")).text.startswith("ready: filters answer from it\n"):
            assert told.text.startswith("starting: "), told.text
        assert '"id":"r1"' in (await good(shell, "rollouts", "model:m", "--json")).text
        assert (await good(shell, "stats", "--by", "model")).text.startswith("Sums over the whole tape; ")
        assert "user: Hello." in (await good(shell, "search", "hello", "role:user")).text
        counted = await good(shell, "sql", "select count(*) as calls from spans", "--format", "csv")
        assert counted.out == b"calls\r\n1\r\n"
        written = await good(shell, "sql", "select * from messages", "--format", "parquet", "-o", "messages.parquet")
        assert "rows are in messages.parquet" in written.err
        assert (await good(shell, "prices", "--builtin")).text.startswith("# List prices of models")


async def test_lake(install: Install, provider: Provider, tmp_path: Path) -> None:
    clean = install("lake")
    async with clean.gateway(tmp_path / "home", upstreams(openai=provider.openai_url)) as gateway:
        shell = clean.shell(gateway.url, tmp_path)
        await hello(gateway, "r1")
        written = await good(shell, "lake", "--data", str(gateway.data), "--to", "lake", "--bodies")
        again = await good(shell, "lake", "--data", str(gateway.data), "--to", "lake")
    assert written.text.startswith("spans +1 (")
    assert again.text.startswith("nothing new since change ")
    read = "import sys, deltalake; print(deltalake.DeltaTable(sys.argv[1]).count())"
    assert clean.run("-c", read, shell.folder / "lake" / "bodies") == "1\n"


async def test_clouds(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = install("clouds")
    async with clouds() as cloud:
        monkeypatch.setenv("AWS_REGION", "eu-west-3")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{cloud.url}/credentials")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
        (tmp_path / "account.json").write_text(cloud.service_account())
        config = upstream("bedrock", cloud.url, "bedrock") + 'auth = "aws"\n'
        config += upstream("vertex", cloud.url, "vertex") + 'auth = "google"\n'
        google = "/v1/projects/p/locations/l/publishers/google/models/m:generateContent"
        async with clean.gateway(tmp_path / "home", config) as gateway, aiohttp.ClientSession() as session:
            for path in ("/model/m/converse", google):
                async with session.post(gateway.address("r1") + path, json={}) as answer:
                    assert answer.status == 200, await answer.text()
    assert (len(cloud.signed), cloud.seen[-1].header("authorization")) == (1, f"Bearer {cloud.tokens[-1]}")


async def test_masking(install: Install, provider: Provider, tmp_path: Path) -> None:
    clean = install("masking")
    rules = '[[masking]]\nname = "greetings"\npattern = "H[aeiou]llo"\n'
    async with clean.gateway(tmp_path / "home", upstreams(openai=provider.openai_url) + rules) as gateway:
        shell = clean.shell(gateway.url, tmp_path)
        await hello(gateway, "r1")
        exported = json.loads((await good(shell, "export", "--what", "messages")).text)
    assert exported["messages"][0]["parts"][0]["text"] == "*****."
    (tmp_path / "rules.toml").write_text(rules)
    (tmp_path / "body.json").write_text('{"said": "Hello."}')
    tried = await good(shell, "masking", "try", str(tmp_path / "body.json"), "--config", str(tmp_path / "rules.toml"))
    assert (tried.text, tried.err) == ('{"said": "*****."}', "greetings: 1\n")


async def test_yaml(install: Install, tmp_path: Path) -> None:
    shell = install("yaml").shell("", tmp_path)
    (tmp_path / "config.yaml").write_text("model_list: [{model_name: gpt-5, litellm_params: {model: openai/gpt-5}}]")
    assert 'model = "gpt-5"' in (await good(shell, "import", "litellm-config", "config.yaml")).text


@pytest.mark.parametrize("extra", ["samples", "samples,parquet"])
async def test_samples(install: Install, provider: Provider, tmp_path: Path, extra: str) -> None:
    clean, provider.formats = install(extra), vllm_wire.FORMATS
    config = upstream("vllm", provider.openai_url, "openai") + TRAINED
    format = "parquet" if "parquet" in extra else "jsonl"
    async with clean.gateway(tmp_path / "home", config) as gateway:
        shell = clean.shell(gateway.url, tmp_path)
        await hello(gateway, "r1")
        for form in ("samples", "triplets"):
            words = ("--form", form, "--allow", "no_reward", "--format", format, "-o", f"{form}.{format}")
            assert "1 row of 1 answer" in (await good(shell, "samples", *words)).err
    if format == "parquet":
        (made,) = json.loads(clean.run("-c", READ, tmp_path / "samples.parquet"))
    else:
        (made,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert len(made["response"]) == len(made["mask"]) == len(made["logprobs"]) > 0
    assert all(made["mask"])


HELLO = """{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25", \
"capabilities": {}, "clientInfo": {"name": "a test", "version": "1"}}}
"""


async def test_mcp(install: Install, tmp_path: Path) -> None:
    clean = install("mcp")
    async with clean.gateway(tmp_path / "home", NOWHERE) as gateway:
        process = await clean.shell(gateway.url, tmp_path).start("mcp", stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(HELLO.encode())
        told = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        _ = await process.communicate(b"")
    assert told["result"]["serverInfo"]["name"] == "penstock"
    assert process.returncode == 0


async def test_tui(install: Install, tmp_path: Path) -> None:
    clean = install("tui")
    async with clean.gateway(tmp_path / "home", NOWHERE) as gateway:
        shell = clean.shell(gateway.url, tmp_path)
        assert "== Rollouts" in (await good(shell, "tui", "--demo", "--plain")).text
        assert "Queue open" in (await good(shell, "tui", "--plain")).text
        refused = await shell.run("tui")
    assert (refused.code, "needs a terminal; `penstock tui --plain`" in refused.err) == (2, True), refused.err


async def queued(gateway: Gateway) -> None:
    """Two tasks."""
    async with Client(gateway.url) as client:
        await client.enqueue([RolloutSpec(input={"n": n}) for n in range(2)])


async def test_ray(install: Install, tmp_path: Path) -> None:
    clean = install("ray")
    async with clean.gateway(tmp_path / "home", NOWHERE) as gateway:
        await queued(gateway)
        words = ("run", "--on", "ray", "--", "sh", "-c", "echo '{\"reward\": 1}'")
        done = await good(clean.shell(gateway.url, tmp_path), *words)
    assert done.text.startswith("2 succeeded, 0 failed, mean reward 1.000")


async def test_kubernetes(install: Install, tmp_path: Path) -> None:
    clean = install("kubernetes")
    async with kubernetes.serving() as cluster, clean.gateway(tmp_path / "home", NOWHERE) as gateway:
        await queued(gateway)
        words = ("run", "--on", "kubernetes", "--image", "example/agent", "--", "sh", "-c", "echo '{\"reward\": 1}'")
        shell = clean.shell(gateway.url, tmp_path)
        shell.env["KUBECONFIG"] = str(cluster.kubeconfig(tmp_path))
        done = await good(shell, *words)
    assert done.text.startswith("2 succeeded, 0 failed, mean reward 1.000")


async def reported(gateway: Gateway) -> None:
    """A run of a trainer, with two steps."""
    async with Client(gateway.url) as client:
        await client.start_run(NewRun(id="run", kind="grpo"))
        await client.add_points("run", [Point(step=step, values={"reward": step / 4}) for step in (1, 2)])


async def test_plots(install: Install, tmp_path: Path) -> None:
    clean = install("plots")
    async with clean.gateway(tmp_path / "home", NOWHERE) as gateway:
        await reported(gateway)
        shell = clean.shell(gateway.url, tmp_path)
        await good(shell, "runs", "plot", "run", "--out", "run.png")
        await good(shell, "runs", "export", "run", "--to", "tensorboard", "-o", "board")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG\r\n")
    (events,) = (tmp_path / "board").iterdir()
    assert events.read_bytes().count(b"reward") == 2


async def test_mlflow(install: Install, tmp_path: Path) -> None:
    clean = install("mlflow")
    async with clean.gateway(tmp_path / "home", NOWHERE) as gateway:
        await reported(gateway)
        await good(clean.shell(gateway.url, tmp_path), "runs", "export", "run", "--to", "mlflow", "-o", "flow")
    with closing(sqlite3.connect(tmp_path / "flow" / "mlflow.db")) as database:
        found = database.execute("select key, step, value from metrics order by step").fetchall()
    assert found == [("reward", 1, 0.25), ("reward", 2, 0.5)]


APO = """
engine = "{engine}"
[run]
name = "{engine}"
directory = "{engine}"
[texts]
prompts = ["shop"]
[tasks]
file = "tasks.jsonl"
[budget]
rollouts = 120
[reflection]
model = "m"
"""
AGENT = """
import json, os, urllib.request
said = {"model": "m", "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello."}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(said).encode(), headers)).read()
print(json.dumps({"reward": int(json.loads(os.environ["PENSTOCK_INPUT"])["n"] % 2)}))
"""


@pytest.mark.parametrize("engine", ["ours", "gepa"])
async def test_apo(install: Install, provider: Provider, tmp_path: Path, engine: str) -> None:
    clean = install("apo")
    (tmp_path / "apo.toml").write_text(APO.format(engine=engine))
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(40)))
    (tmp_path / "agent.py").write_text(AGENT)
    async with clean.gateway(tmp_path / "home", upstreams(openai=provider.openai_url)) as gateway:
        async with Client(gateway.url) as client:
            await client.add_version("shop", NewVersion(kind="prompt", content={"text": "Be kind.", "sent": True}))
        shell = clean.shell(gateway.url, tmp_path)
        shell.patience = 600.0
        done = await good(shell, "train", "apo", "apo.toml", "--agent", f"{clean.python} agent.py")
    assert "texts stay as they are; the test stays" in done.err


async def test_providers(install: Install, provider: Provider, tmp_path: Path) -> None:
    # By its hash, as in `make install-providers`.
    clean = install("providers", "--require-hashes", "--no-deps", "--requirement", str(ROOT / ".ci" / "litellm.txt"))
    provider.formats = vllm_wire.FORMATS
    async with (
        clean.gateway(tmp_path / "home", upstream("vllm", provider.openai_url, "openai") + TRAINED) as gateway,
        anthropic.AsyncAnthropic(base_url=gateway.address("r1"), api_key="sk-a") as agent,
    ):
        said = await agent.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "Hello."}])
    assert said.content[0].type == "text"
    assert provider.log[-1].path == "/v1/chat/completions"
