# The image of everything but routers: Ray's head, the supervisor, prefill and decode workers; also a whole
# deployment in one container. The CUDA kernels are compiled here, and no compiler is in what is left.
# Build from the root of the repository: docker build -f docker/worker.Dockerfile -t antiphon-worker:0.1.0 .
# Ray wants the same Python in all pods: pass one PYTHON_IMAGE, best by digest, to this and the router image.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# Of the CUDA version that torch's wheels bring; its distribution must not have a newer C library than PYTHON_IMAGE.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu22.04

# hadolint ignore=DL3006
FROM ${CUDA_IMAGE} AS cuda

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
COPY requirements/image-worker.txt requirements/
RUN python -m venv /opt/antiphon \
 && /opt/antiphon/bin/pip install --no-cache-dir --no-compile --require-hashes --only-binary :all: \
      --requirement requirements/image-worker.txt
COPY . .
RUN /opt/antiphon/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
 && /opt/antiphon/bin/pip uninstall --yes setuptools wheel pip

FROM build AS kernels
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY --from=cuda /usr/local/cuda /usr/local/cuda
ENV PATH=/usr/local/cuda/bin:/opt/antiphon/bin:$PATH \
    ANTIPHON_KERNEL_LIBRARY_DIR=/opt/antiphon/kernels
RUN antiphon kernels build

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
# What UCX opens for RDMA devices, besides what its wheel brings.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 libnuma1 librdmacm1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin antiphon
COPY --from=build /opt/antiphon /opt/antiphon
COPY --from=kernels /opt/antiphon/kernels /opt/antiphon/kernels
ENV PATH=/opt/antiphon/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    RAY_USAGE_STATS_ENABLED=0 \
    ANTIPHON_KERNEL_LIBRARY_DIR=/opt/antiphon/kernels
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
  CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
CMD ["antiphon", "serve", "--config", "/etc/antiphon/deployment.yaml"]
