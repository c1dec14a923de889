"""The commands of `penstock`, each by its dotted path and with its help, so that `--help` loads none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Command(NamedTuple):
    """A command of the table."""

    path: str
    help: str
    """The first sentence of its docstring, which cannot be read without loading it."""


COMMANDS: Final[dict[str, Command]] = {
    "serve": Command("penstock.gateway.cli.serve:serve", "Run the gateway."),
    "enqueue": Command("penstock.gateway.cli.enqueue:enqueue", "Queue the tasks of a file of JSON lines."),
    "run": Command(
        "penstock.sidecar.commands:run", "Take rollouts from the queue and run an unmodified agent on each."
    ),
    "audit": Command("penstock.gateway.cli.audit:audit", "List who changed what, and why, newest first."),
    "queue": Command("penstock.gateway.cli.queue:queue", "Show how much work there is."),
    "workers": Command("penstock.gateway.cli.queue:workers", "List those who run rollouts."),
    "pause": Command(
        "penstock.gateway.cli.queue:pause", "Hand out no work until `penstock resume`; what runs goes on."
    ),
    "resume": Command("penstock.gateway.cli.queue:resume", "Hand out work again."),
    "drain": Command(
        "penstock.gateway.cli.queue:drain", "Hand out no work, send workers home, and wait until nothing runs."
    ),
    "cancel": Command("penstock.gateway.cli.rollouts:cancel", "Stop rollouts, whether they wait or run."),
    "requeue": Command("penstock.gateway.cli.rollouts:requeue", "Queue rollouts again that have ended."),
    "reward": Command("penstock.gateway.cli.rollouts:reward", "Say how well an attempt, or one call of it, went."),
    "tools": Command(
        "penstock.gateway.cli.reading:tools", "List the tools that a rollout used, and what asked for each."
    ),
    "doctor": Command("penstock.gateway.cli.rollouts:doctor", "Say of each call if it can be trained on, else why."),
    "rollouts": Command("penstock.gateway.cli.reading:rollouts", "List rollouts, newest first."),
    "spans": Command(
        "penstock.gateway.cli.reading:spans", "List the spans of a rollout, in order: its calls, rewards and events."
    ),
    "search": Command(
        "penstock.gateway.cli.reading:search",
        "Find a text in what calls say: messages, tool calls and results, errors.",
    ),
    "show": Command(
        "penstock.gateway.cli.reading:show_rollout",
        "Show a rollout as a tree: attempts, calls, and what each call added to the conversation.",
    ),
    "budgets": Command("penstock.gateway.cli.budgets:budgets", "Show what is used of budgets, the fullest first."),
    "sql": Command("penstock.gateway.cli.sql:sql", "Ask the tape by SQL: one SELECT, in DuckDB's SQL."),
    "stats": Command(
        "penstock.gateway.cli.reading:stats",
        "Show figures: calls, tokens and latencies by model, tools, rewards, the queue, and the tape.",
    ),
    "unread": Command("penstock.gateway.cli.reading:unread", "List what answers hold that was not read."),
    "upstreams": Command(
        "penstock.gateway.cli.upstreams:upstreams",
        "List upstreams: which serve, rest or fail their checks, and which calls wait.",
    ),
    "changes": Command("penstock.gateway.cli.reading:changes", "Follow what happens, until interrupted."),
    "export": Command(
        "penstock.gateway.cli.export:export", "Write rollouts, spans, conversations or runs of tools to a file."
    ),
    "samples": Command(
        "penstock.adapters.commands:samples",
        "Write training data made from rollouts: token samples, conversations, preferences or triplets.",
    ),
    "key": Command(
        "penstock.gateway.cli.keys:make",
        "Make a named key for the control API or for calls: the key, and what penstock.toml keeps of it.",
    ),
    "token": Command(
        "penstock.gateway.cli.reading:token",
        "Make an agent token: the API key of an agent that may speak for one rollout and nothing else.",
    ),
    "forget": Command(
        "penstock.gateway.cli.retention:forget",
        "Take rollouts off the tape for good: what they were given, their calls, rewards and outcomes.",
    ),
    "hold": Command(
        "penstock.gateway.cli.retention:hold",
        "Keep rollouts, whatever the rules of retention say, until that is lifted.",
    ),
    "lake": Command(
        "penstock.gateway.cli.lake:lake",
        "Append what is new on a tape to tables of Parquet (Delta Lake), in a directory or in S3.",
    ),
    "check": Command(
        "penstock.gateway.cli.serve:check", "Read every record of a tape and report what is not as it should be."
    ),
    "backup": Command(
        "penstock.gateway.cli.serve:backup",
        "Copy a tape into a new directory while a gateway writes it, and check the copy.",
    ),
    "restore": Command(
        "penstock.gateway.cli.serve:restore", "Put a backup where a gateway finds its tape, after it was checked."
    ),
    "tui": Command("penstock.tui.command:tui", "See agents, tools, releases and training live, and act on them."),
    "completion": Command(
        "penstock.gateway.cli.completion:completion", "Print the script that completes commands and options in a shell."
    ),
}


class Group(NamedTuple):
    """Commands that share their first word."""

    help: str
    commands: Mapping[str, Command | Group]
    usual: str | None = None
    """The command that runs where none is named; None: the table of the group is shown."""
    words: bool = False
    """Whether that command takes words, such as a file, which are then not read as commands."""


GROUPS: Final[dict[str, Group]] = {
    "sidecar": Group(
        "Agents that know nothing of Penstock, and have no base URL. Without a command: run.",
        {
            "run": Command(
                "penstock.sidecar.intercept.commands:run",
                "Run an agent that knows nothing of Penstock: its calls of model hosts go through the gateway.",
            ),
            "serve": Command(
                "penstock.sidecar.intercept.commands:serve",
                "Stand before agents that are started by others, and take their rollouts later.",
            ),
            "bind": Command(
                "penstock.sidecar.intercept.commands:bind",
                "Give the agent on a port of a sidecar its rollout: from now on its calls pass.",
            ),
            "release": Command(
                "penstock.sidecar.intercept.commands:release",
                "Take its rollout from the agent on a port of a sidecar: its connections end, and calls wait for the "
                "next one.",
            ),
            "check": Command(
                "penstock.sidecar.intercept.commands:check",
                "Say of each family of clients whether its calls get to the gateway, and else which variable is "
                "missing.",
            ),
            "iptables": Command(
                "penstock.sidecar.intercept.commands:iptables",
                "Redirect connections of agents to a sidecar in transparent mode, by rules of the kernel for this "
                "network.",
            ),
        },
        usual="run",
    ),
    "mcp": Group(
        "Tools of agents and tools for agents (MCP). Without a command: serve.",
        {
            "serve": Command(
                "penstock.gateway.cli.mcp:serve",
                "Give a coding agent tools to improve your agents: an MCP server on stdin and stdout.",
            ),
            "definitions": Command(
                "penstock.gateway.cli.definitions:definitions",
                "Show what servers of tools list, since when, and what has changed in it.",
            ),
            "approve": Command(
                "penstock.gateway.cli.definitions:approve",
                "Approve what a server of tools lists, where changes are held back or denied.",
            ),
            "adopt": Command(
                "penstock.gateway.cli.definitions:adopt",
                "Register what a server has said of a tool as versions of a resource, which releases can change.",
            ),
            "replay": Command(
                "penstock.gateway.cli.mcp:replay",
                "Play the recorded servers of a rollout as one MCP server on stdin and stdout.",
            ),
            "wrap": Command(
                "penstock.sidecar.wrapping.command:wrap",
                "Stand before a server of tools on stdin and stdout, and record what passes.",
            ),
        },
        usual="serve",
    ),
    "policy": Group(
        "Which tool calls may run, and which wait for a person.",
        {
            "test": Command(
                "penstock.gateway.cli.policy:try_rules",
                "Say what rules would have done to recorded tool calls, and how the rollouts that they touch were "
                "rewarded.",
            ),
            "waiting": Command("penstock.gateway.cli.policy:waiting", "List tool calls that wait for a person."),
            "approve": Command("penstock.gateway.cli.policy:approve", "Let a tool call run that waits for a person."),
            "refuse": Command(
                "penstock.gateway.cli.policy:refuse", "Do not let a tool call run that waits for a person."
            ),
        },
    ),
    "masking": Group(
        "What rules keep off the tape.",
        {
            "try": Command("penstock.gateway.cli.masking:try_rules", "Show a body as masking rules would keep it."),
        },
    ),
    "resource": Group(
        "Versions of prompts, of weights and of what tools are said to do.",
        {
            "add": Command(
                "penstock.gateway.cli.resources:add",
                "Register a version of a prompt, of a model or of a tool's description.",
            ),
            "list": Command("penstock.gateway.cli.resources:list_resources", "List what releases can change."),
            "show": Command(
                "penstock.gateway.cli.resources:show_resource",
                "Show a resource with its versions, or one version with its text.",
            ),
            "diff": Command("penstock.gateway.cli.resources:diff", "Show what two versions say differently."),
        },
    ),
    "prompts": Group(
        "Find the prompts that unmodified agents send.",
        {
            "discover": Command(
                "penstock.gateway.cli.prompts:discover",
                "Find the prompts in recorded calls, and register them if you like.",
            ),
            "check": Command(
                "penstock.gateway.cli.prompts:check",
                "Say which registered prompt a text is, and what stands in its slots.",
            ),
        },
    ),
    "release": Group(
        "Try a change on some rollouts, as an experiment that can be taken back.",
        {
            "start": Command(
                "penstock.gateway.cli.releases:start", "Try another version of a resource on some rollouts."
            ),
            "list": Command("penstock.gateway.cli.releases:list_releases", "List releases, newest first."),
            "status": Command(
                "penstock.gateway.cli.releases:status",
                "Show a release: its stage, its arms side by side, its evidence, and what it waits for.",
            ),
            "watch": Command("penstock.gateway.cli.releases:watch", "Follow a release until it ends."),
            "rehearse": Command(
                "penstock.sidecar.rehearsing:rehearse",
                "Run an agent on recorded tasks for a release that rehearses, until it has seen enough.",
            ),
            "promote": Command(
                "penstock.gateway.cli.releases:promote",
                "Make the candidate the stable version now, whatever the evidence says.",
            ),
            "rollback": Command(
                "penstock.gateway.cli.releases:rollback",
                "Send every new call to the stable version, also those of rollouts that are on the candidate.",
            ),
            "abort": Command(
                "penstock.gateway.cli.releases:abort",
                "End a release: no new rollout gets the candidate; those that have it keep it.",
            ),
            "hold": Command(
                "penstock.gateway.cli.releases:hold", "Stop a release where it is: no new rollout takes part."
            ),
            "resume": Command("penstock.gateway.cli.releases:resume", "Go on with a release that is held."),
            "approve": Command(
                "penstock.gateway.cli.releases:approve", "Let a release leave the stage that waits for a person."
            ),
            "history": Command(
                "penstock.gateway.cli.releases:history",
                "Show everything that was done to a release: who, why, and the evidence.",
            ),
            "verify": Command(
                "penstock.gateway.cli.releases:verify",
                "Make every decision of a release again from the tape, and say what does not agree.",
            ),
            "anchor": Command(
                "penstock.gateway.cli.releases:anchor",
                "Print the ends of audit chains, to keep elsewhere: `verify --anchor` compares them later.",
            ),
        },
    ),
    "index": Group(
        "The index of the tape: filters find rows without a scan. Without a command: status.",
        {
            "status": Command("penstock.gateway.cli.index:status", "Say whether filters use the index, and else why."),
            "rebuild": Command("penstock.gateway.cli.index:rebuild", "Make the index anew from the tape."),
        },
        usual="status",
    ),
    "prices": Group(
        "What models cost. Without a command: list.",
        {
            "list": Command("penstock.gateway.cli.prices:prices", "Show the prices that costs are computed with."),
            "update": Command("penstock.gateway.cli.prices:update", "Take prices from a newer list."),
        },
        usual="list",
    ),
    "retention": Group(
        "How long rollouts stay, and what was forgotten. Without a command: status.",
        {
            "status": Command(
                "penstock.gateway.cli.retention:status",
                "Show how long rollouts stay, how large the tape is, and what is still to be deleted.",
            ),
            "forgotten": Command(
                "penstock.gateway.cli.retention:forgotten", "List rollouts that were forgotten, by name: when, and why."
            ),
        },
        usual="status",
    ),
    "webhook": Group(
        "Who is told what becomes of releases.",
        {
            "list": Command(
                "penstock.gateway.cli.webhooks:list_webhooks",
                "List webhooks: what waits for each, since when it takes nothing, and why.",
            ),
            "deliveries": Command(
                "penstock.gateway.cli.webhooks:deliveries",
                "List what a webhook was told, or is to be told, newest first, and what became of it.",
            ),
            "test": Command(
                "penstock.gateway.cli.webhooks:send_test",
                "Send a webhook a signed test, once, and say what it answers.",
            ),
        },
    ),
    "runs": Group(
        "What trainers report of their runs.",
        {
            "list": Command("penstock.gateway.cli.runs:list_runs", "List training runs, newest first."),
            "show": Command(
                "penstock.gateway.cli.runs:show_run",
                "Show a run: its configuration, its metrics as a table, what happened last.",
            ),
            "watch": Command(
                "penstock.gateway.cli.runs:watch",
                "Follow a run until it ends: how far it is, its curves, what happens.",
            ),
            "plot": Command(
                "penstock.gateway.cli.runs:plot", "Draw the metrics of a run, beside those of others if you like."
            ),
            "export": Command("penstock.gateway.cli.runs:export", "Write every point of a run for another tool."),
        },
    ),
    "train": Group(
        "Learn weights and prompts from rollouts.",
        {
            "grpo": Command(
                "penstock.trainer.commands:grpo",
                "Train a model on rollouts of agents, and publish its weights as it learns.",
            ),
            "sft": Command(
                "penstock.trainer.commands:sft",
                "Fine-tune a model on answers of the tape: those of good rollouts, or the best of each group.",
            ),
            "dpo": Command(
                "penstock.trainer.commands:dpo", "Train a model to prefer the better of two rollouts of one group."
            ),
            "merge": Command(
                "penstock.trainer.commands:merge",
                "Merge an adapter into the weights of its model, as the Hugging Face hub lays models out.",
            ),
            "apo": Group(
                "Improve the prompts of agents, where they can be improved. Without a command: optimise.",
                {
                    "optimise": Command(
                        "penstock.trainer.apo.commands:optimise",
                        "Search for better prompts, and prove on tasks that nobody has seen that one is better.",
                    ),
                    "report": Command(
                        "penstock.trainer.apo.commands:report",
                        "Show what runs have come to: the test, what the texts have learnt and from what, the cost.",
                    ),
                    "advise": Command(
                        "penstock.trainer.apo.commands:advise",
                        "Say what is worth doing before anything is spent: prompts, weights, tool texts, a better "
                        "grader, or nothing.",
                    ),
                },
                usual="optimise",
                words=True,
            ),
            "custom": Command(
                "penstock.trainer.apo.commands:custom",
                "Run a training algorithm of your own: a function that is given the gateway, tasks and a runner.",
            ),
        },
    ),
}


def every() -> list[str]:
    """All commands, each as the words that call it."""
    return [*COMMANDS, *(words for name, group in GROUPS.items() for words in _inside(name, group))]


def _inside(name: str, group: Group) -> list[str]:
    found: list[str] = []
    for action, one in group.commands.items():
        found += _inside(f"{name} {action}", one) if isinstance(one, Group) else [f"{name} {action}"]
    return found
