"""Drawings of screens that no `penstock ...` command prints in this form: waterfalls, races, charts. Pure."""
