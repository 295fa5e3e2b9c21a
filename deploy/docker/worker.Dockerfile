# Both pools. `--target cpu` or `--target cuda`.
#   docker build -f deploy/docker/worker.Dockerfile --target cuda --build-arg TORCH_INDEX=ADDRESS -t tandem-worker-cuda:0.1.0 .
# TORCH_INDEX: where torch's build for the device is; must be said, "configured" is pip's own index. EXTRAS: more locks, "ray nixl".
# Pin the base by digest for reproducible builds: --build-arg BASE=python:3.12-slim-bookworm@sha256:…; see docs/operate/images.md.
ARG BASE=python:3.12-slim-bookworm
# Timestamp of all files, so that images differ only by content and not by build time.
ARG SOURCE_DATE_EPOCH=1767225600

# Without an index pip would install the GPU build on many machines: better to fail now than after downloading gigabytes.
FROM ${BASE} AS index
ARG TORCH_INDEX=""
RUN test -n "$TORCH_INDEX" || { \
        echo "TORCH_INDEX is empty. Say which package index has torch's build for the device of this image: PyTorch's" \
            "installation page names one for CPUs (--target cpu) and one for each version of CUDA (--target cuda)." \
            "Give it as --build-arg TORCH_INDEX=ADDRESS; for compose, export TORCH_INDEX=ADDRESS first." \
            "If the index that pip is configured with here has that build, say TORCH_INDEX=configured." >&2; \
        exit 1; \
    }
# Any file. (A WORKDIR that nothing uses is not made by buildah that keeps layers, nor by podman.)
COPY LICENSE /said/

FROM ${BASE} AS dependencies
ARG EXTRAS=""
# For an index or a proxy of your own; what is not given is not set.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# Only enforces an order: that check runs before anything is downloaded.
COPY --from=index /said said
COPY deploy/docker/locks locks
# Build tools stay in this stage. The installed environment has no pip.
RUN python3 -m venv tools \
    && tools/bin/pip install --quiet --no-deps --require-hashes --requirement locks/tools.txt \
    && python3 -m venv --without-pip /opt/tandem \
    && for lock in worker $EXTRAS; do \
        tools/bin/pip --python /opt/tandem/bin/python3 install --quiet --no-deps --require-hashes --requirement "locks/$lock.txt" \
        || exit 1; \
    done


# A GPU build depends on CUDA libraries as packages, which it pins exactly; the driver comes with the machine.
FROM dependencies AS torch
ARG SOURCE_DATE_EPOCH
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=""
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
COPY pyproject.toml deploy/docker/seal.sh ./
RUN case "$TORCH_INDEX" in configured) set -- ;; *) set -- --index-url "$TORCH_INDEX" ;; esac \
    && tools/bin/pip --python /opt/tandem/bin/python3 install --quiet "$@" "torch==$TORCH_VERSION" \
    && tools/bin/pip --python /opt/tandem/bin/python3 check \
    && mkdir -p /opt/tandem/share/tandem \
    && tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
        --output-file /opt/tandem/share/tandem/sbom.cdx.json /opt/tandem/bin/python3 \
    && ./seal.sh /opt/tandem /

# A separate step, so that a changed source makes only a small layer.
FROM dependencies AS own
ARG SOURCE_DATE_EPOCH
COPY . src
RUN tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels ./src \
    && tools/bin/pip --python /opt/tandem/bin/python3 install --quiet --no-deps --no-warn-script-location --root /own wheels/*.whl \
    && src/deploy/docker/seal.sh /own /own

# Triton compiles launchers for the installed Python; kernels for a processor that is none of those below, too.
FROM ${BASE} AS compiler
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*

# Kernels for every kind of x86-64 processor that they tell apart: no worker waits for its compiler, or needs its memory.
FROM compiler AS native
ARG SOURCE_DATE_EPOCH
COPY --from=torch /opt/tandem /opt/tandem
COPY --from=own /own /
COPY deploy/docker/seal.sh /build/
RUN /opt/tandem/bin/python3 -m tandem.native.prebuild \
        torch engine.kernels.cpu.build kv_transfer.memory.mover /native/opt/tandem \
    && /build/seal.sh /native /native

FROM compiler AS worker
ARG SOURCE_DATE_EPOCH
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-worker" \
      org.opencontainers.image.description="Prefill and decode workers of a Tandem cluster" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Nothing else is ever written to: mount volumes there and make the root file system read-only. Runs as any user.
RUN install -d -m 1777 /cache /models && touch --date="@$SOURCE_DATE_EPOCH" /cache /models
COPY --from=torch /opt/tandem /opt/tandem
COPY --from=own /own /
COPY --from=native /native /
ENV PATH=/opt/tandem/bin:$PATH HOME=/tmp XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/triton \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 7000
STOPSIGNAL SIGTERM
# The command decides which pool it serves: docs/operate/images.md has health checks for both.

FROM worker AS cuda
RUN python3 -c "import torch, triton; assert torch.version.cuda, 'torch for CPUs: see TORCH_INDEX'"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["tandem", "decode", "--config", "/etc/tandem/cluster/cluster.yaml"]

FROM worker AS cpu
RUN python3 -c "import torch; assert not torch.version.cuda, 'torch for GPUs, gigabytes more: see TORCH_INDEX'"
CMD ["tandem", "decode", "--config", "/etc/tandem/cluster/cluster.yaml"]
