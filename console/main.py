"""The `penstock` command. Its commands stand in `commands.command_table`, and one is loaded when it runs.

`--help` shows the tables and loads no command, and so no server, no database and no client. All but `serve`, `check`,
`backup`, `restore`, `completion` and `run` speak to a running gateway through `gateway.client.client` and to nothing
else. Exit codes: 0 done, 1 failed, 2 wrongly called, 130 interrupted.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Final, Literal

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts import Group as Section
from cyclopts.argument import ArgumentCollection, Token

from penstock.console.commands.command_table import COMMANDS, FIRST, GROUPS, MEANT, SECTIONS, CommandEntry, CommandGroup
from penstock.gateway.client.console import CommandError, note
from penstock.gateway.client.environment import CONFIG_FILE, configured_gateway

EXPECTED_TYPES: Final[dict[type | None, str]] = {int: "a whole number", float: "a number"}
"""What a value should be, by the type that it becomes."""
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
INSTEAD: Final = frozenset(("--demo", "--play", "--context"))
"""Options of `penstock tui` that name what is asked in place of the gateway of ./penstock.toml."""
HELP_OPTIONS: Final = frozenset(("-h", "--help", "--version"))
HELP = "A transparent gateway that records every model call of unmodified agents on a durable tape."
REST = "`penstock --help` lists all commands, `penstock COMMAND --help` the options of one."


def version() -> str:
    """The installed version, as `penstock --version` prints it."""
    from importlib import metadata

    return f"penstock {metadata.version('penstock-gateway')}"


def _application(sections: Mapping[str, Sequence[str]], epilogue: str = "") -> App:
    made = App(
        name="penstock",
        help=HELP,
        help_epilogue=epilogue,
        config=_follow_file,
        version=version,
        result_action="return_value",
        print_error=False,
        exit_on_error=False,
    )
    for number, (title, names) in enumerate(sections.items()):
        section = Section(title, sort_key=number)
        for order, name in enumerate(names):
            if name in COMMANDS:
                command = COMMANDS[name]
                made.command(command.path, name=name, help=command.help, group=section, sort_key=order)
            else:
                made.command(_part(name, GROUPS[name], section, order))
    made["--help"].group = made["--version"].group = Section("Options", sort_key=len(sections))
    return made


def _part(name: str, group: CommandGroup, section: Section | None, order: int) -> App:
    made = App(name=name, help=group.help, group=section, sort_key=order)
    for place, (action, command) in enumerate(group.commands.items()):
        if isinstance(command, CommandGroup):
            made.command(_part(action, command, None, place))
        else:
            made.command(command.path, name=action, help=command.help, sort_key=place)
    return made


def _follow_file(command: App, words: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take the gateway of ./penstock.toml where neither the command line nor the environment names one, and something
    else does not stand for it. Agents, which the sidecar and the trainer give the address to, open no socket."""
    if any(argument.name in INSTEAD and argument.tokens for argument in arguments):
        return
    for argument in arguments:
        if argument.name == "--gateway" and not argument.tokens and os.path.exists(CONFIG_FILE):
            from penstock.gateway.model.toml import ConfigError

            by_socket = not command.default_command.__module__.startswith(("penstock.sidecar", "penstock.trainer"))
            try:
                url = configured_gateway(by_socket)
            except ConfigError as e:
                raise CommandError(str(e), 2) from None
            argument.append(Token(keyword=argument.name, value=url, source=str(CONFIG_FILE)))


app = _application(SECTIONS)


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that completes commands and options in a shell.

    bash: eval "$(penstock completion bash)" in ~/.bashrc. zsh: penstock completion zsh > a file _penstock in a folder
    of $fpath. fish: penstock completion fish > ~/.config/fish/completions/penstock.fish.

    Parameters
    ----------
    shell
        The shell that is to complete them.
    """
    print(app.generate_completion(shell=shell))


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Raises `SystemExit` after an error: 2 when it was called wrongly. `arguments`: those of the
    process unless given."""
    _collect_rarely()
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] != ["mcp"]:
        # Who speaks a protocol there refuses to (`commands.mcp`).
        _open_closed()
    try:
        if not words:
            _application({"To begin with": FIRST}, REST).help_print([])
        else:
            app(in_order(words))
        sys.stdout.flush()
    except CommandError as e:
        _end(str(e), e.code)
    except CycloptsError as e:
        command = " ".join(["penstock", *(e.command_chain or ())])
        _end(f"{_wrong(e)} See {command} --help.", 2)
    except BrokenPipeError:
        # The reader has seen enough.
        _write_no_more()
    except OSError as e:
        if e.errno not in FULL:
            raise
        _write_no_more()
        _end(f"{e.filename or 'stdout'} cannot be written: {e.strerror}", 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _open_closed() -> None:
    """Streams that were closed before it began have nothing in them, and take anything."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _write_no_more() -> None:
    """Point stdout to nowhere, so that its unwritten rest is not flushed again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _collect_rarely() -> None:
    """Make garbage collection rare. Imported modules stay, and a process that ends gives all of its memory back at
    once: to look through it for garbage, during imports and at the end, took a quarter of a command's time."""
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)


def in_order(arguments: list[str]) -> list[str]:
    """The arguments with the command first: options that stand before it go behind it, and the usual command of a group
    stands where none is named. Raises `CommandError` for options without a command."""
    words, options, rest = list[str](), list[str](), arguments
    group: CommandEntry | CommandGroup | None = CommandGroup(HELP, {**COMMANDS, **GROUPS})
    while isinstance(group, CommandGroup):
        if group.usual is not None and not (rest and _names(group, rest[0])):
            words.append(group.usual)
            break
        at = 0 if group.usual is not None else _command_place(group, rest)
        if at is None:
            if rest and HELP_OPTIONS.isdisjoint(rest):
                said = " ".join(["penstock", *words])
                raise CommandError(f"{rest[0]} goes behind a command: {said} COMMAND {rest[0]}. See {said} --help.", 2)
            break
        words, options, rest = [*words, rest[at]], [*options, *rest[:at]], rest[at + 1 :]
        group = group.commands.get(words[-1])
    return [*words, *options, *rest]


def _command_place(group: CommandGroup, arguments: list[str]) -> int | None:
    """The place of the word that names a command, or should; None without one. The word behind an option may be its
    value."""
    value = False
    for at, word in enumerate(arguments):
        if word in group.commands or not (word.startswith("-") or value):
            return at
        if word == "--":
            return None
        value = word.startswith("-") and "=" not in word
    return None


def _names(group: CommandGroup, word: str) -> bool:
    """True if the word behind a group is, or should be, one of its commands, or asks for help."""
    if word in group.commands or word in HELP_OPTIONS:
        return True
    return not word.startswith("-") and not group.words


def _wrong(error: CycloptsError) -> str:
    """Says how a command was called wrongly."""
    word = (error.unused_tokens or [""])[0]
    if isinstance(error, UnknownCommandError) and not error.command_chain and word in MEANT:
        return f"Unknown command {word!r}. Did you mean `penstock {MEANT[word]}`?"
    if isinstance(error, UnusedCliTokensError) and not isinstance(error, UnknownOptionError):
        group, words = GROUPS.get((error.command_chain or ("",))[0]), error.unused_tokens or ()
        if group is not None and words and words[0] in group.commands:
            return f"{words[0]!r} goes before the options."
        named = f"; a tape goes behind --data: --data {words[0]}" if words and error.command_chain == ("check",) else ""
        return f"Nothing is done with {' '.join(map(repr, words))}{named}."
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        # cyclopts says the same of an option that is not there and of one without its value.
        given = error.keyword is not None or bool(error.argument.tokens)
        return f"{name} needs a value: {_help_of(name, error.command_chain)}" if given else f"{name} is missing."
    if isinstance(error, CoercionError) and error.token is not None and error.target_type in EXPECTED_TYPES:
        name = error.token.keyword or (error.argument.name if error.argument is not None else "the argument")
        return f"{name}: {error.token.value!r} is not {EXPECTED_TYPES[error.target_type]}."
    said = " ".join(str(error).split())
    if isinstance(error, UnknownOptionError) and "Did you mean" not in said and _runs_a_command(error.command_chain):
        said += " Options of what is run go behind --."
    return said


def _help_of(option: str, chain: Sequence[str] | None) -> str:
    """The help of an option, which cyclopts reads from docstrings only for `--help`."""
    arguments = app.parse_commands(chain)[1][-1].assemble_argument_collection(parse_docstring=True)
    return next((one.parameter.help or "" for one in arguments if option in one.names), "")


def _runs_a_command(chain: Sequence[str] | None) -> bool:
    """True if a command runs another one, whose words go behind `--`."""
    _, apps, _ = app.parse_commands(chain)
    return apps[-1].default_command is not None and "command" in signature(apps[-1].default_command).parameters


def _end(message: str, code: int) -> None:
    note(f"penstock: {message}")
    sys.exit(code)


if __name__ == "__main__":
    main()
