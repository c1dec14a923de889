"""Reads what calls say. Pure. `turns` makes a call a `Turn`, `diagnosis` says what can be trained on, `filters` is the
query language, and `policy` decides about tool calls."""
