"""What `penstock` does: a module of functions for each kind of command. `gateway.__main__` has the table of them.

A module is loaded when one of its commands runs, and what it needs of the gateway when the command needs it.
"""
