"""OpenTelemetry in and out.

*In* (`ingest`): OTLP/HTTP at `/v1/traces`. A request is decoded (`wire`, `json_encoding`), every span of it becomes an
entry of the tape (`span_in`, `values`) and is joined to the attempt it belongs to (`attempt_of`). *Out* (`exporter`):
the change feed as spans with the current conventions (`span_out`, `content`), sent in batches (`batches`, `delivery`).

The names that move with the conventions are in one file, `semconv`. Protobuf is imported by the first request that
needs it: a gateway that nobody sends spans to does not carry it.
"""
