"""`penstock run --on kubernetes`: the Jobs against the published schema, the runner against an API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fakes import waiting
from fakes.kubernetes import NAMESPACE, SCHEMA, Kubernetes, serving, validate
from fakes.runs import AGENTS, LEASE, PATIENCE, PYTHON, StartRun, enqueue, events, only_attempt, said
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import Claim
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Rollout
from penstock.sidecar.run.agent.environment import launch_plan
from penstock.sidecar.run.agent.process import ExitStatus, Stream
from penstock.sidecar.run.engines import kubernetes as engine
from penstock.sidecar.run.engines.kubernetes import connect
from penstock.sidecar.run.settings import AgentSettings, RunnerSettings, UsageError

CLAIM = Claim(
    rollout=Rollout(id="Task_1.a", mode="train", input={"question": "why?"}),
    attempt=Attempt(rollout="Task_1.a", id="a2"),
    address="/rollout/Task_1.a/attempt/a2/mode/train",
    token="pst_x",
)
TEMPLATE = f"""
apiVersion: batch/v1
kind: Job
metadata: {{labels: {{team: blue}}}}
spec:
  template:
    spec:
      nodeSelector: {{pool: agents}}
      containers:
        - name: agent
          image: example/agent:1
          command: ["{PYTHON}", "{AGENTS / "report.py"}"]
          resources: {{limits: {{cpu: "1", memory: 1Gi}}}}
          env:
            - {{name: COLOUR, value: blue}}
            - {{name: OPENAI_API_KEY, value: real}}
"""


@pytest.fixture
async def kubernetes() -> AsyncGenerator[Kubernetes]:
    """An API server."""
    async with serving() as made:
        yield made


def made(agents: AgentSettings, template: engine.Json = engine.TEMPLATE) -> engine.Json:
    """The Job of the claim."""
    settings = RunnerSettings(gateway="http://gateway:4747", name="w_1", agents=agents)
    return engine.job(template, settings, CLAIM, launch_plan(CLAIM, settings.gateway, agents, Path("input.json")))


def test_a_job_is_what_the_schema_says() -> None:
    agents = AgentSettings(command=("python", "agent.py"), args=("{question}",), image="example/agent:2")
    job = made(agents)
    validate.validate(job, SCHEMA, strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "agent.py", "why?"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["OPENAI_BASE_URL"] == "http://gateway:4747/rollout/Task_1.a/attempt/a2/mode/train/v1"
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 31)
    assert engine.TEMPLATE["spec"]["template"]["spec"]["containers"] == [{"name": "agent"}]


def test_the_schema_is_not_fooled() -> None:
    job = made(AgentSettings(command=("true",), image="x"))
    job["spec"]["template"]["spec"]["containers"][0]["commnad"] = ["x"]
    with pytest.raises(validate.ValidationError):
        validate.validate(job, SCHEMA, strict=True)


def test_names_are_labels_and_no_attempt_shares_one() -> None:
    other = CLAIM.model_copy(update={"rollout": CLAIM.rollout.model_copy(update={"id": "Task-1-a"})})
    names = {engine.job_name("w", CLAIM), engine.job_name("w", other), engine.job_name("v", CLAIM)}
    assert len(names) == 3
    assert all(len(name) <= 63 and name.startswith("penstock-task-1-a-a2-") for name in names)
    assert engine.worker_label("_w:1_") == "w-1"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"kind": "Pod"}, "it must be of apiVersion batch/v1 and kind Job"),
        ({"kind": "Job", "apiVersion": "batch/v1", "spec": {}}, "it has no spec.template.spec.containers"),
        (engine.TEMPLATE, "needs an image"),
    ],
)
def test_templates_that_cannot_be_used(template: engine.Json, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _ = engine.validate_template(template, None)


def test_what_a_pod_says() -> None:
    def pod(**state: Any) -> engine.Json:
        return {"status": {"containerStatuses": [{"name": "proxy", "state": {}}, {"name": "agent", "state": state}]}}

    times = {"startedAt": "2026-11-21T10:00:00Z", "finishedAt": "2026-11-21T10:00:05Z"}
    assert engine.exit_status({}, "agent") is None
    assert engine.exit_status(pod(running=times), "agent") is None
    assert engine.exit_status(pod(terminated=times | {"exitCode": 3}), "agent") == ExitStatus(
        exit_code=3, duration_ns=5 * 10**9
    )
    assert engine.exit_status(pod(terminated=times | {"exitCode": 137}), "agent") == ExitStatus(
        None, "SIGKILL", 5 * 10**9
    )
    stuck = engine.exit_status(pod(waiting={"reason": "ImagePullBackOff", "message": "no"}), "agent")
    assert stuck == ExitStatus(error="ImagePullBackOff: no")
    evicted = engine.exit_status({"status": {"phase": "Failed", "reason": "Evicted", "message": "memory"}}, "agent")
    assert evicted == ExitStatus(error="the pod failed: Evicted memory")


async def test_attempts_are_jobs(kubernetes: Kubernetes, client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = (tmp_path / "job.yaml").write_text(TEMPLATE)
    _ = await enqueue(client, {"question": "why?"})
    words = ("--on", "kubernetes", "--job-template", str(tmp_path / "job.yaml"), "--arg", "{question}")
    run = await start_run(*words, env={"KUBECONFIG": str(kubernetes.kubeconfig(tmp_path))})
    assert await run.ended() == 0, run.stderr
    attempt = await only_attempt(client)
    assert attempt.outcome is not None
    seen = attempt.outcome.output
    assert seen["argv"] == ["why?"]
    assert seen["env"]["OPENAI_API_KEY"] == seen["env"]["PENSTOCK_TOKEN"]
    assert json.loads(seen["env"]["PENSTOCK_INPUT"]) == {"question": "why?"}
    assert said(await events(client), "stdout").startswith("a line that is no JSON\n")
    (job,) = kubernetes.jobs.values()
    assert job["metadata"]["labels"]["team"] == "blue"
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "agents"}


async def test_a_job_ends_with_its_attempt(
    kubernetes: Kubernetes, client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    _ = await enqueue(client, None)
    words = ("--on", "kubernetes", "--image", "example/agent", *LEASE)
    agent = (PYTHON, "-c", "import time; print('here', flush=True); time.sleep(600)")
    run = await start_run(*words, agent=agent, env={"KUBECONFIG": str(kubernetes.kubeconfig(tmp_path))})
    await until(lambda: len(kubernetes.deadlines) > 1)
    assert kubernetes.deadlines == sorted(kubernetes.deadlines)

    async def heard() -> bool:
        return said(await events(client), "stdout") == "here"

    await waiting.until(heard)
    _ = await client.cancel("r1")
    assert await run.ended() == 1
    assert not kubernetes.jobs
    (pod,) = kubernetes.pods.values()
    assert pod.process is not None
    assert pod.process.returncode is not None
    assert (await only_attempt(client)).status == AttemptStatus.CANCELLED
    assert said(await events(client), "stdout") == "here"


@pytest.mark.parametrize(
    ("agent", "image", "reason"),
    [
        (("sh", "-c", "exit 4"), "example/agent", "exit code 4"),
        (("true",), "no/such:image", "ImagePullBackOff: no such image"),
    ],
)
async def test_a_job_that_fails(
    kubernetes: Kubernetes,
    client: Client,
    start_run: StartRun,
    tmp_path: Path,
    agent: tuple[str, ...],
    image: str,
    reason: str,
) -> None:
    _ = await enqueue(client, None)
    config = str(kubernetes.kubeconfig(tmp_path))
    run = await start_run("--on", "kubernetes", "--image", image, agent=agent, env={"KUBECONFIG": config})
    assert await run.ended() == 1
    attempt = await only_attempt(client)
    assert attempt.outcome is not None
    assert (attempt.status, attempt.outcome.reason) == (AttemptStatus.FAILED, reason)


async def test_a_job_that_the_cluster_does_not_take_is_told_before_anything_is_claimed(
    kubernetes: Kubernetes, client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    wrong = TEMPLATE.replace("nodeSelector: {pool: agents}", "nodeSelector: [agents]")
    _ = (tmp_path / "job.yaml").write_text(wrong)
    _ = await enqueue(client, None)
    words = ("--on", "kubernetes", "--job-template", str(tmp_path / "job.yaml"), "--arg", "{question}")
    run = await start_run(*words, env={"KUBECONFIG": str(kubernetes.kubeconfig(tmp_path))})
    assert await run.ended() == 2
    assert f"in namespace '{NAMESPACE}'" in run.stderr
    assert "nodeSelector" in run.stderr
    assert (await client.rollout("r1")).tries == 0
    assert not kubernetes.jobs


async def test_no_cluster_is_told_before_anything_is_claimed(
    client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    _ = await enqueue(client, None)
    run = await start_run("--on", "kubernetes", "--image", "x", env={"KUBECONFIG": str(tmp_path / "none")})
    assert await run.ended() == 2
    assert "no cluster is configured" in run.stderr
    assert (await client.rollout("r1")).tries == 0


async def ran(
    kubernetes: Kubernetes, home: Path, monkeypatch: pytest.MonkeyPatch, program: str, lease_s: float = 30.0
) -> tuple[ExitStatus, dict[str, str]]:
    """A Job that was waited for: how it ended, and what it said."""
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig(home)))
    monkeypatch.setattr(engine, "PAUSE_S", 0.05)
    agents = AgentSettings(command=(PYTHON, "-c", program), image="example/agent")
    settings = RunnerSettings(gateway="http://gateway:4747", name="w_1", agents=agents, lease_s=lease_s)
    said: dict[str, bytes] = {"stdout": b"", "stderr": b""}

    def sink(stream: Stream, data: bytes) -> None:
        said[stream] += data

    async with connect() as cluster:
        jobs = engine.KubernetesEngine(settings, engine.TEMPLATE, cluster)
        async with jobs.running(CLAIM, sink) as job:
            ending = await job.wait()
            job.terminate()
    return ending, {stream: data.decode() for stream, data in said.items()}


LINES = "import time\nfor at in range(5): print('line', at, flush=True); time.sleep(0.2)\nprint('{\"reward\": 1}')"


@pytest.mark.parametrize("cuts", [[True], [False], [True, False, True]])
async def test_a_log_that_is_cut_off_is_read_on(
    kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[bool]
) -> None:
    kubernetes.cut_logs = list(cuts)
    ending, said = await ran(kubernetes, tmp_path, monkeypatch, LINES)
    assert (ending.exit_code, ending.error) == (0, None)
    assert said["stdout"] == "".join(f"line {at}\n" for at in range(5)) + '{"reward": 1}\n'
    assert not said["stderr"]


async def test_a_watch_that_is_lost_without_a_word_is_made_anew(
    kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "WATCH_S", 0)
    monkeypatch.setattr(engine, "REQUEST_S", 0.5)
    kubernetes.silent_watches = 1
    async with asyncio.timeout(PATIENCE):
        ending, _ = await ran(kubernetes, tmp_path, monkeypatch, "pass")
    assert (ending.exit_code, ending.error) == (0, None)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_cluster_that_is_away_when_a_job_is_made_is_asked_again(
    kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    kubernetes.odd, kubernetes.lost = ["POST", "POST"], lost
    ending, _ = await ran(kubernetes, tmp_path, monkeypatch, "pass")
    assert (ending.exit_code, ending.error) == (0, None)
    assert len(kubernetes.pods) == 1


async def test_what_a_proxy_says_in_place_of_the_cluster_is_asked_again(
    kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order to move the deadline, one to delete the Job, and its pods."""
    kubernetes.odd, moved = ["PATCH", "DELETE", "GET", "GET"], tmp_path / "moved"
    program = f"import pathlib, time\nwhile not pathlib.Path({str(moved)!r}).exists(): time.sleep(0.01)"
    running = asyncio.ensure_future(ran(kubernetes, tmp_path, monkeypatch, program, lease_s=0.6))
    await until(lambda: bool(kubernetes.deadlines))  # they are moved on after the first answer that was none
    moved.touch()
    ending, _ = await running
    assert (ending.exit_code, ending.error) == (0, None)
    assert not kubernetes.jobs
    assert not kubernetes.odd
