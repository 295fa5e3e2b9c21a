# The router: servers and placement, without torch, about 400 MB less than a CPU worker.
#   docker build -f deploy/docker/router.Dockerfile -t tandem-router:0.1.0 .
# Pin the base by digest for reproducible builds: --build-arg BASE=python:3.12-slim-bookworm@sha256:…; see docs/operate/images.md.
ARG BASE=python:3.12-slim-bookworm
# Timestamp of all files, so that images differ only by content and not by build time.
ARG SOURCE_DATE_EPOCH=1767225600

FROM ${BASE} AS dependencies
ARG SOURCE_DATE_EPOCH
# For an index or a proxy of your own; what is not given is not set.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY deploy/docker/locks locks
# Build tools stay in this stage. The installed environment has no pip.
RUN python3 -m venv tools \
    && tools/bin/pip install --quiet --no-deps --require-hashes --requirement locks/tools.txt \
    && python3 -m venv --without-pip /opt/tandem \
    && tools/bin/pip --python /opt/tandem/bin/python3 install --quiet --no-deps --require-hashes --requirement locks/router.txt \
    && tools/bin/pip --python /opt/tandem/bin/python3 check
COPY pyproject.toml deploy/docker/seal.sh ./
RUN mkdir -p /opt/tandem/share/tandem \
    && tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
        --output-file /opt/tandem/share/tandem/sbom.cdx.json /opt/tandem/bin/python3 \
    && ./seal.sh /opt/tandem /

# A separate step, so that a changed source makes only a small layer.
FROM dependencies AS own
ARG SOURCE_DATE_EPOCH
COPY . src
RUN tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels ./src \
    && tools/bin/pip --python /opt/tandem/bin/python3 install --quiet --no-deps --no-warn-script-location --root /own wheels/*.whl \
    && ./seal.sh /own /own

# Compiled here, because the image itself has no compiler.
FROM own AS native
ARG SOURCE_DATE_EPOCH
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && PYTHONPATH="$(echo /own/opt/tandem/lib/python3*/site-packages)" /opt/tandem/bin/python3 \
        -m tandem.native.prebuild router.fleet.native_streams /native/opt/tandem \
    && ./seal.sh /native /native

FROM ${BASE} AS router
ARG SOURCE_DATE_EPOCH
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-router" \
      org.opencontainers.image.description="HTTP and gRPC servers and placement of a Tandem cluster" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Nothing else is ever written to: mount volumes there and make the root file system read-only. Runs as any user.
RUN install -d -m 1777 /cache /models && touch --date="@$SOURCE_DATE_EPOCH" /cache /models
COPY --from=dependencies /opt/tandem /opt/tandem
COPY --from=own /own /
COPY --from=native /native /
ENV PATH=/opt/tandem/bin:$PATH HOME=/tmp XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    GRPC_ENABLE_FORK_SUPPORT=0
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# Reads the same YAML and variables as the router; Kubernetes uses its own probes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-m", "cluster.probe", "router", "--config", "/etc/tandem/cluster/cluster.yaml"]
CMD ["tandem", "router", "--config", "/etc/tandem/cluster/cluster.yaml"]
