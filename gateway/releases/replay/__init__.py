"""The stage *replayed*: recorded calls are asked again. Begin with `stage`."""
