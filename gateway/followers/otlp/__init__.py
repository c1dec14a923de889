"""OpenTelemetry in and out.

*In* (`ingest`): OTLP/HTTP at `/v1/traces`, `/v1/logs` and `/v1/metrics`. A request is split into items (`signals`);
every span or log record in it becomes an entry of the tape and is joined to the attempt it belongs to (`span_import`).
*Out* (`exporter`): the change feed as spans with the current conventions (`span_export`), linked to their causes
(`selection`), sent in batches.

The names that change with the conventions are in one file, `semconv`. The first request that needs protobuf imports it:
a gateway that gets no spans does not carry it. Begin with `ingest` or `exporter`.
"""
