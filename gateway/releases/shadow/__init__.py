"""The stage *shadowed*: calls of production are asked twice. Begin with `stage`."""
