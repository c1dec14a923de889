"""What screens show and no `penstock ...` command prints in this form: waterfalls, races, charts. Pure."""
