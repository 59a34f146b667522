# lora-sync-proxy: the wheel in a slim image, as a user without rights. It writes nothing: run it with --read-only.
# Both stages start from BASE, so that a machine without a registry can bring its own Python 3.11+ image.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# --build-arg EXTRAS=otel for traces
ARG EXTRAS=
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY proxy ./proxy
COPY trainer_client ./trainer_client
RUN python3 -m venv /opt/proxy \
 && /opt/proxy/bin/pip install --no-cache-dir --disable-pip-version-check ".${EXTRAS:+[$EXTRAS]}"

# What is in the image, for whoever has to know: CycloneDX, by its own tool, of which nothing stays.
FROM build AS sbom
COPY scripts/sbom ./scripts/sbom
RUN scripts/sbom /opt/proxy/bin/python /sbom.cdx.json

FROM ${BASE}
LABEL org.opencontainers.image.title="lora-sync-proxy" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/proxy /opt/proxy
COPY --from=sbom /sbom.cdx.json /opt/proxy/sbom.cdx.json
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin lora-sync
USER 10001
ENV PATH=/opt/proxy/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PROXY_HOST=0.0.0.0 \
    PROXY_PORT=8000
EXPOSE 8000
# SIGTERM stops taking rollouts and lets those in flight finish, PROXY_SHUTDOWN_S (60) at most:
# give `docker stop` more than that, as in `docker stop --time 70`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s \
    CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['PROXY_PORT'] + '/proxy/live', timeout=2)"]
ENTRYPOINT ["lora-sync-proxy"]
