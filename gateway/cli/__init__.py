"""The `penstock` commands: a module of functions for each kind of command. `gateway.__main__` has the table of them.

It may import every other layer, and nothing imports it but that table. A module is loaded when one of its commands
runs; the command imports what it needs of the gateway. Begin with `reading`.
"""
