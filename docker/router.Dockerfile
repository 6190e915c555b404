# The image of router pods: HTTP API, Harmony, dispatch, and Ray to be placed by. No torch.
# Build from the root of the repository: docker build -f docker/router.Dockerfile -t antiphon-router:0.1.0 .
# Ray wants the same Python in all pods: pass one PYTHON_IMAGE, best by digest, to this and the worker image.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
COPY requirements/image-router.txt requirements/
RUN python -m venv /opt/antiphon \
 && /opt/antiphon/bin/pip install --no-cache-dir --no-compile --require-hashes --only-binary :all: \
      --requirement requirements/image-router.txt
COPY . .
RUN /opt/antiphon/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
 && /opt/antiphon/bin/pip uninstall --yes setuptools wheel pip

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/antiphon /opt/antiphon
ENV PATH=/opt/antiphon/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    RAY_USAGE_STATS_ENABLED=0
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin antiphon
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# In a cluster KubeRay starts Ray here, and Ray the router. By hand: docker run IMAGE antiphon chat --url URL
CMD ["antiphon", "--help"]
