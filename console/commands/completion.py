"""`penstock completion`: prints the script with which a shell completes commands, options and their values."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that completes commands and options in a shell.

    bash: eval "$(penstock completion bash)" in ~/.bashrc. zsh: penstock completion zsh > a file _penstock in a folder
    of $fpath. fish: penstock completion fish > ~/.config/fish/completions/penstock.fish.

    Parameters
    ----------
    shell
        The shell that is to complete them.
    """
    # Imported here: the module with the table of commands imports this one.
    from penstock.console.main import app

    print(app.generate_completion(shell=shell))
