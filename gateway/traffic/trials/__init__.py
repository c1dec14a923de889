"""Calls that the gateway makes itself to try a release before agents get it, a file for each stage: `check`, `replay`,
`rehearsal` (with `tool_player`), `shadow`. `sender` sends them, `judges` compares answers, and `adapter_keeper` loads
the adapters that releases need."""
