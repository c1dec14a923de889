"""The port: is a request a call or a control request? Only this package and those above it import both `proxy` and
`api`.

Begin with `dispatch`.
"""
