"""The port, which tells calls from control requests. Only this package and those above it import both `proxy` and
`api`.

Begin with `dispatch`.
"""
