"""`make demo`: agents, a local model and a gateway. `python -m penstock.gateway.demo`. Begin with `demo`."""
