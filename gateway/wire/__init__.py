"""Bytes in, values out; nothing here knows the tape. `dialects` has a file for each API, `http` the connections,
`masking` takes out what rules name, `capture` asks engines for token ids and takes them out of answers again."""
