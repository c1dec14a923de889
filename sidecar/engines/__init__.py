"""Where agents run: on this machine, in containers, on Ray, on Kubernetes. It sees what `sidecar` sees. Begin with
`local`.
"""
