"""OpenTelemetry in and out.

*In* (`ingest`): OTLP/HTTP at `/v1/traces`. A request is decoded (`wire`, `otlpjson`), every span of it becomes an entry
of the tape (`spans`, `values`) and is joined to the attempt it belongs to (`joining`). *Out* (`exporter`): the change
feed as spans with the current conventions (`outgoing`, `content`), sent in batches (`delivery`).

The names that move with the conventions are in one file, `semconv`. Protobuf is imported by the first request that
needs it: a gateway that nobody sends spans to does not carry it.
"""
