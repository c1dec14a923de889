# Three images of one checkout: docker build --target gateway|sidecar|trainer. docs/deploy.md says how they are run.
#
# Without arguments the base is what the tag means today. A person who wants the same base every day names its digest:
#   --build-arg DIGEST=@sha256:...     (docker buildx imagetools inspect debian:bookworm-slim prints it)
ARG BASE=docker.io/library/debian:bookworm-slim
ARG DIGEST=

# Python alone, and the user that everything runs as.
FROM ${BASE}${DIGEST} AS runtime
# Debian removes a version from its mirrors when the next one is out, so a pinned one cannot be installed for long.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
    && groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin penstock \
    && install --directory --owner=10001 --group=10001 /data /run/penstock \
    && install --directory /etc/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="Penstock" \
      org.opencontainers.image.description="A gateway between unmodified agents and their models, with a durable tape" \
      org.opencontainers.image.licenses="MIT"
COPY deploy/healthcheck.py /opt/healthcheck.py
STOPSIGNAL SIGTERM
USER 10001:10001
ENTRYPOINT ["penstock"]

# What installs stays here: pip is in /build, and /opt/penstock has never had one.
FROM ${BASE}${DIGEST} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/penstock
WORKDIR /source
# Everything that is installed is pinned by its hash (`make locks`): what builds, what runs, and what each extra adds.
COPY deploy/locks deploy/locks
# Extras of pyproject.toml in brackets, such as [mcp,providers].
ARG EXTRAS=
# pip compiles what it installs: the root of a running container may be read-only.
RUN set -- && IFS='[], ' \
    && for extra in ${EXTRAS}; do set -- "$@" ${extra:+--requirement "deploy/locks/${extra}.txt"}; done \
    && /build/bin/pip install --no-cache-dir --require-hashes --only-binary :all: --requirement deploy/locks/build.txt \
    && /build/bin/pip --python /opt/penstock/bin/python install --no-cache-dir --require-hashes --only-binary :all: \
    --requirement deploy/locks/gateway.txt "$@"
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
COPY gateway gateway
COPY console console
COPY sidecar sidecar
COPY adapters adapters
COPY trainer trainer
COPY tui tui
# What an image has is listed in it, in the form of CycloneDX.
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /build/bin/pip --python /opt/penstock/bin/python install --no-cache-dir --no-index --no-deps /wheels/*.whl \
    && /build/bin/pip --python /opt/penstock/bin/python check \
    && /build/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
    --output-file /opt/penstock/sbom.cdx.json /opt/penstock/bin/python

FROM build AS build-trainer
# Another torch than that of deploy/locks/torch.txt, such as one without a GPU: it and what it needs have no hashes.
ARG TORCH=
RUN set -- --requirement deploy/locks/torch.txt \
    && if [ -n "${TORCH}" ]; then \
    set -- && /build/bin/pip --python /opt/penstock/bin/python install --no-cache-dir "${TORCH}"; fi \
    && /build/bin/pip --python /opt/penstock/bin/python install --no-cache-dir --no-deps --require-hashes \
    --only-binary :all: "$@" --requirement deploy/locks/trainer.txt \
    && /build/bin/pip --python /opt/penstock/bin/python check \
    && /build/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
    --output-file /opt/penstock/sbom.cdx.json /opt/penstock/bin/python

# The gateway: its configuration is /etc/penstock/penstock.toml if there is one, its tape is in /data.
FROM runtime AS gateway
COPY --from=build /opt/penstock /opt/penstock
WORKDIR /etc/penstock
VOLUME ["/data"]
EXPOSE 4747
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s --retries=3 \
    CMD ["python3", "-I", "/opt/healthcheck.py", "4747", "/readyz"]
CMD ["serve", "--host", "0.0.0.0", "--data", "/data/tape"]

# The sidecar: what agents need is in /run/penstock. nftables is for `penstock sidecar iptables`, which needs root and
# NET_ADMIN, and which only an init container of the transparent mode runs.
FROM runtime AS sidecar
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends nftables \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
USER 10001:10001
COPY --from=build /opt/penstock /opt/penstock
WORKDIR /run/penstock
VOLUME ["/run/penstock"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s --retries=3 \
    CMD ["python3", "-I", "/opt/healthcheck.py", "8099", "/ready"]
CMD ["sidecar", "serve", "/run/penstock"]

# The trainer: `penstock train ...`. Runs are kept in /data.
FROM runtime AS trainer
COPY --from=build-trainer /opt/penstock /opt/penstock
WORKDIR /data
VOLUME ["/data"]
HEALTHCHECK NONE
CMD ["train", "--help"]
