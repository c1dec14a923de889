"""The `penstock` commands: a module of functions for each kind of command. `command_table` lists them.

It may import every other layer, and only `console.main` imports it. A module is loaded when one of its commands
runs; the command imports what it needs of the gateway. Begin with `inspection`.
"""
