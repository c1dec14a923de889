"""Engines, one module each, for `trainer.apo.protocol`. Begin with `beam`, the simplest; `ours` is the default."""
