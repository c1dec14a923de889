"""Bytes in, values out; nothing here knows the tape. `dialects` has a file for each API, and in `json_scan` and
`loose_json` the places and values of JSON, and the paths that people write. `http` has the connections.
`rewriting` changes answers on their way. `http.redaction` masks keys in headers and URLs, `masking` what people's rules
find in bodies. `capture` asks engines for token ids, which `rewriting` takes out of answers again."""
