"""The commands of `penstock`, each by its dotted path and with its help, so that `--help` loads none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.console.views.registry import NOUNS


class CommandEntry(NamedTuple):
    """A command of the table."""

    path: str
    help: str
    """The first sentence of its docstring, which cannot be read without loading it."""


def noun_command(name: str) -> CommandEntry:
    """The command that lists a noun."""
    return CommandEntry(f"penstock.console.commands.nouns:{name}", NOUNS[name].help)


COMMANDS: Final[dict[str, CommandEntry]] = {
    **{noun.command: noun_command(name) for name, noun in NOUNS.items() if " " not in noun.command},
    "serve": CommandEntry("penstock.console.commands.serve:serve", "Run the gateway."),
    "enqueue": CommandEntry("penstock.console.commands.enqueue:enqueue", "Queue the tasks of a file of JSON lines."),
    "run": CommandEntry(
        "penstock.sidecar.run.commands:run", "Take rollouts from the queue and run an unmodified agent on each."
    ),
    "pause": CommandEntry(
        "penstock.console.commands.administration:pause", "Hand out no work until `penstock resume`; what runs goes on."
    ),
    "resume": CommandEntry("penstock.console.commands.administration:resume", "Hand out work again."),
    "drain": CommandEntry(
        "penstock.console.commands.administration:drain",
        "Hand out no work, send workers home, and wait until nothing runs.",
    ),
    "cancel": CommandEntry(
        "penstock.console.commands.administration:cancel", "Stop rollouts, whether they wait or run."
    ),
    "requeue": CommandEntry(
        "penstock.console.commands.administration:requeue", "Queue rollouts again that have ended."
    ),
    "reward": CommandEntry(
        "penstock.console.commands.administration:reward", "Say how well an attempt, or one call of it, went."
    ),
    "tools": CommandEntry(
        "penstock.console.commands.inspection:tools", "List the tools that a rollout used, and what asked for each."
    ),
    "doctor": CommandEntry(
        "penstock.console.commands.administration:doctor", "Say of each call if it can be trained on, else why."
    ),
    "spans": CommandEntry(
        "penstock.console.commands.inspection:spans",
        "List the spans of a rollout, in order: its calls, rewards and events.",
    ),
    "search": CommandEntry(
        "penstock.console.commands.inspection:search",
        "Find a text in what calls say: messages, tool calls and results, errors.",
    ),
    "show": CommandEntry(
        "penstock.console.commands.inspection:show_rollout",
        "Show a rollout as a tree: attempts, calls, and what each call added to the conversation.",
    ),
    "sql": CommandEntry(
        "penstock.console.commands.inspection:sql", "Ask the tape by SQL: one SELECT, in DuckDB's SQL."
    ),
    "stats": CommandEntry(
        "penstock.console.commands.inspection:stats",
        "Show figures: calls, tokens and latencies by model, tools, rewards, the queue, and the tape.",
    ),
    "changes": CommandEntry("penstock.console.commands.inspection:changes", "Follow what happens, until interrupted."),
    "export": CommandEntry(
        "penstock.console.commands.inspection:export",
        "Write rollouts, spans, conversations or runs of tools to a file.",
    ),
    "samples": CommandEntry(
        "penstock.adapters.commands:samples",
        "Write training data made from rollouts: token samples, conversations, preferences or triplets.",
    ),
    "key": CommandEntry(
        "penstock.console.commands.serve:make_key",
        "Make a named key for the control API or for calls: the key, and what penstock.toml keeps of it.",
    ),
    "token": CommandEntry(
        "penstock.console.commands.inspection:token",
        "Make an agent token: the API key of an agent that may speak for one rollout and nothing else.",
    ),
    "forget": CommandEntry(
        "penstock.console.commands.administration:forget",
        "Take rollouts off the tape for good: what they were given, their calls, rewards and outcomes.",
    ),
    "hold": CommandEntry(
        "penstock.console.commands.administration:hold",
        "Keep rollouts, whatever the rules of retention say, until that is lifted.",
    ),
    "lake": CommandEntry(
        "penstock.console.commands.serve:lake",
        "Append what is new on a tape to tables of Parquet (Delta Lake), in a directory or in S3.",
    ),
    "check": CommandEntry(
        "penstock.console.commands.serve:check", "Read every record of a tape and report what is not as it should be."
    ),
    "backup": CommandEntry(
        "penstock.console.commands.serve:backup",
        "Copy a tape into a new directory while a gateway writes it, and check the copy.",
    ),
    "restore": CommandEntry(
        "penstock.console.commands.serve:restore", "Put a backup where a gateway finds its tape, after it was checked."
    ),
    "tui": CommandEntry("penstock.tui.command:tui", "See agents, tools, releases and training live, and act on them."),
    "completion": CommandEntry(
        "penstock.console.main:completion",
        "Print the script that completes commands and options in a shell.",
    ),
}


class CommandGroup(NamedTuple):
    """Commands that share their first word."""

    help: str
    commands: Mapping[str, CommandEntry | CommandGroup]
    usual: str | None = None
    """The command that runs where none is named; None: the table of the group is shown."""
    words: bool = False
    """Whether that command takes words, such as a file, which are then not read as commands."""


GROUPS: Final[dict[str, CommandGroup]] = {
    "sidecar": CommandGroup(
        "Agents that know nothing of Penstock, and have no base URL. Without a command: run.",
        {
            "run": CommandEntry(
                "penstock.sidecar.intercept.commands:run",
                "Run an agent that knows nothing of Penstock: its calls of model hosts go through the gateway.",
            ),
            "serve": CommandEntry(
                "penstock.sidecar.intercept.commands:serve",
                "Stand before agents that are started by others, and take their rollouts later.",
            ),
            "bind": CommandEntry(
                "penstock.sidecar.intercept.commands:bind",
                "Give the agent on a port of a sidecar its rollout: from now on its calls pass.",
            ),
            "release": CommandEntry(
                "penstock.sidecar.intercept.commands:release",
                "Take its rollout from the agent on a port of a sidecar: its connections end, and calls wait for the "
                "next one.",
            ),
            "check": CommandEntry(
                "penstock.sidecar.intercept.commands:check",
                "Say of each family of clients whether its calls get to the gateway, and else which variable is "
                "missing.",
            ),
            "iptables": CommandEntry(
                "penstock.sidecar.intercept.commands:iptables",
                "Redirect connections of agents to a sidecar in transparent mode, by rules of the kernel for this "
                "network.",
            ),
        },
        usual="run",
    ),
    "mcp": CommandGroup(
        "Tools of agents and tools for agents (MCP). Without a command: serve.",
        {
            "serve": CommandEntry(
                "penstock.console.commands.mcp:serve",
                "Give a coding agent tools to improve your agents: an MCP server on stdin and stdout.",
            ),
            "definitions": CommandEntry(
                "penstock.console.commands.mcp:definitions",
                "Show what servers of tools list, since when, and what has changed in it.",
            ),
            "approve": CommandEntry(
                "penstock.console.commands.mcp:approve_definitions",
                "Approve what a server of tools lists, where changes are held back or denied.",
            ),
            "adopt": CommandEntry(
                "penstock.console.commands.mcp:adopt",
                "Register what a server has said of a tool as versions of a resource, which releases can change.",
            ),
            "replay": CommandEntry(
                "penstock.console.commands.mcp:replay",
                "Play the recorded servers of a rollout as one MCP server on stdin and stdout.",
            ),
            "wrap": CommandEntry(
                "penstock.sidecar.stdio.command:wrap",
                "Stand before a server of tools on stdin and stdout, and record what passes.",
            ),
        },
        usual="serve",
    ),
    "policy": CommandGroup(
        "Which tool calls may run, and which wait for a person.",
        {
            "test": CommandEntry(
                "penstock.console.commands.mcp:try_policy",
                "Say what rules would have done to recorded tool calls, and how the rollouts that they touch were "
                "rewarded.",
            ),
            "waiting": noun_command("waiting"),
            "approve": CommandEntry(
                "penstock.console.commands.mcp:approve_call", "Let a tool call run that waits for a person."
            ),
            "refuse": CommandEntry(
                "penstock.console.commands.mcp:refuse_call", "Do not let a tool call run that waits for a person."
            ),
        },
    ),
    "import": CommandGroup(
        "Bring what others have recorded, or how they are configured.",
        {
            "agl": CommandEntry(
                "penstock.console.commands.import_agl:agl", "Import rollouts of Agent Lightning 0.3 or 1.0."
            ),
            "langfuse": CommandEntry(
                "penstock.console.commands.import_langfuse:langfuse",
                "Import traces of Langfuse with their observations and scores.",
            ),
            "otlp-file": CommandEntry(
                "penstock.console.commands.import_otlp:otlp_file",
                "Import spans out of files that an OpenTelemetry collector has written.",
            ),
            "litellm-config": CommandEntry(
                "penstock.console.commands.import_litellm:litellm_config",
                "Make a penstock.toml of the config.yaml of LiteLLM's proxy.",
            ),
        },
    ),
    "masking": CommandGroup(
        "What rules keep off the tape.",
        {
            "try": CommandEntry(
                "penstock.console.commands.serve:try_masking", "Show a body as masking rules would keep it."
            ),
        },
    ),
    "resource": CommandGroup(
        "Versions of prompts, of weights and of what tools are said to do.",
        {
            "add": CommandEntry(
                "penstock.console.commands.resources:add",
                "Register a version of a prompt, of a model or of a tool's description.",
            ),
            "list": noun_command("resources"),
            "show": CommandEntry(
                "penstock.console.commands.resources:show_resource",
                "Show a resource with its versions, or one version with its text.",
            ),
            "diff": CommandEntry("penstock.console.commands.resources:diff", "Show what two versions say differently."),
        },
    ),
    "prompts": CommandGroup(
        "Find the prompts that unmodified agents send.",
        {
            "discover": CommandEntry(
                "penstock.console.commands.resources:discover",
                "Find the prompts in recorded calls, and register them if you like.",
            ),
            "check": CommandEntry(
                "penstock.console.commands.resources:check",
                "Say which registered prompt a text is, and what stands in its slots.",
            ),
        },
    ),
    "release": CommandGroup(
        "Try a change on some rollouts, as an experiment that can be taken back.",
        {
            "start": CommandEntry(
                "penstock.console.commands.releases:start", "Try another version of a resource on some rollouts."
            ),
            "list": noun_command("releases"),
            "status": CommandEntry(
                "penstock.console.commands.releases:status",
                "Show a release: its stage, its arms side by side, its evidence, and what it waits for.",
            ),
            "watch": CommandEntry("penstock.console.commands.releases:watch", "Follow a release until it ends."),
            "rehearse": CommandEntry(
                "penstock.sidecar.run.commands:rehearse",
                "Run an agent on recorded tasks for a release that rehearses, until it has seen enough.",
            ),
            "promote": CommandEntry(
                "penstock.console.commands.releases:promote",
                "Make the candidate the stable version now, whatever the evidence says.",
            ),
            "rollback": CommandEntry(
                "penstock.console.commands.releases:rollback",
                "Send every new call to the stable version, also those of rollouts that are on the candidate.",
            ),
            "abort": CommandEntry(
                "penstock.console.commands.releases:abort",
                "End a release: no new rollout gets the candidate; those that have it keep it.",
            ),
            "hold": CommandEntry(
                "penstock.console.commands.releases:hold", "Stop a release where it is: no new rollout takes part."
            ),
            "resume": CommandEntry("penstock.console.commands.releases:resume", "Go on with a release that is held."),
            "approve": CommandEntry(
                "penstock.console.commands.releases:approve", "Let a release leave the stage that waits for a person."
            ),
            "history": CommandEntry(
                "penstock.console.commands.releases:history",
                "Show everything that was done to a release: who, why, and the evidence.",
            ),
            "verify": CommandEntry(
                "penstock.console.commands.releases:verify",
                "Make every decision of a release again from the tape, and say what does not agree.",
            ),
            "anchor": CommandEntry(
                "penstock.console.commands.releases:anchor",
                "Print the ends of audit chains, to keep elsewhere: `verify --anchor` compares them later.",
            ),
        },
    ),
    "index": CommandGroup(
        "The index of the tape: filters find rows without a scan. Without a command: status.",
        {
            "status": noun_command("index"),
            "rebuild": CommandEntry(
                "penstock.console.commands.administration:rebuild", "Make the index anew from the tape."
            ),
        },
        usual="status",
    ),
    "prices": CommandGroup(
        "What models cost. Without a command: list.",
        {
            "list": CommandEntry(
                "penstock.console.commands.administration:prices", "Show the prices that costs are computed with."
            ),
            "update": CommandEntry(
                "penstock.console.commands.administration:update_prices", "Take prices from a newer list."
            ),
        },
        usual="list",
    ),
    "retention": CommandGroup(
        "How long rollouts stay, and what was forgotten. Without a command: status.",
        {
            "status": noun_command("retention"),
            "forgotten": noun_command("forgotten"),
        },
        usual="status",
    ),
    "webhook": CommandGroup(
        "Who is told what becomes of releases.",
        {
            "list": noun_command("webhooks"),
            "deliveries": noun_command("deliveries"),
            "test": CommandEntry(
                "penstock.console.commands.administration:send_test",
                "Send a webhook a signed test, once, and say what it answers.",
            ),
        },
    ),
    "runs": CommandGroup(
        "What trainers report of their runs.",
        {
            "list": noun_command("runs"),
            "show": CommandEntry(
                "penstock.console.commands.runs:show_run",
                "Show a run: its configuration, its metrics as a table, what happened last.",
            ),
            "watch": CommandEntry(
                "penstock.console.commands.runs:watch",
                "Follow a run until it ends: how far it is, its curves, what happens.",
            ),
            "plot": CommandEntry(
                "penstock.console.commands.runs:plot", "Draw the metrics of a run, beside those of others if you like."
            ),
            "export": CommandEntry(
                "penstock.console.commands.runs:export", "Write every point of a run for another tool."
            ),
        },
    ),
    "train": CommandGroup(
        "Learn weights and prompts from rollouts.",
        {
            "grpo": CommandEntry(
                "penstock.trainer.commands:grpo",
                "Train a model on rollouts of agents, and publish its weights as it learns.",
            ),
            "sft": CommandEntry(
                "penstock.trainer.commands:sft",
                "Fine-tune a model on answers of the tape: those of good rollouts, or the best of each group.",
            ),
            "dpo": CommandEntry(
                "penstock.trainer.commands:dpo", "Train a model to prefer the better of two rollouts of one group."
            ),
            "merge": CommandEntry(
                "penstock.trainer.commands:merge",
                "Merge an adapter into the weights of its model, as the Hugging Face hub lays models out.",
            ),
            "apo": CommandGroup(
                "Improve the prompts of agents, where they can be improved. Without a command: optimise.",
                {
                    "optimise": CommandEntry(
                        "penstock.trainer.commands:optimise",
                        "Search for better prompts, and prove on tasks that nobody has seen that one is better.",
                    ),
                    "report": CommandEntry(
                        "penstock.trainer.commands:report",
                        "Show what runs have come to: the test, what the texts have learnt and from what, the cost.",
                    ),
                    "advise": CommandEntry(
                        "penstock.trainer.commands:advise",
                        "Say what is worth doing before anything is spent: prompts, weights, tool texts, a better "
                        "grader, or nothing.",
                    ),
                },
                usual="optimise",
                words=True,
            ),
            "custom": CommandEntry(
                "penstock.trainer.commands:custom",
                "Run a training algorithm of your own: a function that is given the gateway, tasks and a runner.",
            ),
        },
    ),
}
FIRST: Final = ("serve", "run", "rollouts", "show", "tui", "enqueue", "reward", "release")
"""The commands to begin with, which bare `penstock` shows."""
MEANT: Final = {
    "list": "rollouts", "ls": "rollouts", "status": "queue", "start": "serve", "add": "enqueue", "logs": "changes",
    "rm": "forget", "delete": "forget", "cost": "stats --by model", "costs": "stats --by model",
}  # fmt: skip
"""Words that other programs have for commands of this one."""
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Serve and look": (
        "serve",
        "rollouts",
        "spans",
        "search",
        "show",
        "tools",
        "stats",
        "unread",
        "prices",
        "budgets",
        "sql",
        "upstreams",
        "sessions",
        "changes",
        "audit",
        "mcp",
        "policy",
        "masking",
        "tui",
        "token",
        "key",
        "completion",
    ),
    "Work": (
        "enqueue",
        "run",
        "sidecar",
        "queue",
        "workers",
        "pause",
        "resume",
        "drain",
        "cancel",
        "requeue",
        "reward",
    ),
    "Releases": ("resource", "prompts", "release", "webhook"),
    "Training": ("doctor", "samples", "runs", "train"),
    "Tape": ("export", "import", "lake", "index", "forget", "hold", "retention", "check", "backup", "restore"),
}
"""Titles, and the commands below each."""


def all_commands() -> list[str]:
    """All commands, each as the words that call it."""
    return [*COMMANDS, *(words for name, group in GROUPS.items() for words in _inside(name, group))]


def _inside(name: str, group: CommandGroup) -> list[str]:
    found: list[str] = []
    for action, one in group.commands.items():
        found += _inside(f"{name} {action}", one) if isinstance(one, CommandGroup) else [f"{name} {action}"]
    return found
