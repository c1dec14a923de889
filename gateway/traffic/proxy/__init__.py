"""The life of one call, from its address to its record.

Begin with `call`; `plan` decides where a call goes.
"""
