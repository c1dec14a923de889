"""Calls that the gateway makes itself to try a release before agents get it: `check`, `replay`, `rehearsal`, `shadow`.
`adapter_keeper` loads the adapters that releases need."""
