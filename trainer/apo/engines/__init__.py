"""Engines: one module each behind `trainer.apo.protocol`. Begin with `beam`, the simplest; `ours` is the default."""
