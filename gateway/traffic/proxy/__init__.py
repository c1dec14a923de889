"""The life of one call, from its address to its record.

It may import every layer from `releases` and `otlp` down, but not `api`. Begin with `call`; `plan` decides
where a call goes.
"""
