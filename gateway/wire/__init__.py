"""Bytes in, values out; nothing here knows the tape. `dialects` has a file for each API, and in `json_scan` and
`loose_json` the places and values of JSON, and the paths that people write. `http` has the connections.
`rewriting` changes answers on their way. `masking` takes out what rules name, `capture` asks engines for token ids,
which `rewriting` takes out of answers again."""
