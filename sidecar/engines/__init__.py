"""Where agents run: on this machine, in containers, on Ray, on Kubernetes. Begin with `local`."""
