# The library and its command line on a CPU: docker build -t anybatch . && docker run --rm -v "$PWD":/work anybatch doctor train.py
# For a GPU, build on an image that has torch for it: docker build --build-arg BASE=pytorch/pytorch:2.13.0-cuda12.8-cudnn9-runtime .
ARG BASE=python:3.11-slim
FROM ${BASE}
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
# torch comes from the index of CPU builds, unless the base image has one.
RUN python -c "import torch" 2>/dev/null \
    || pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir /source
RUN useradd --create-home --uid 1000 user
USER 1000
WORKDIR /work
ENTRYPOINT ["anybatch"]
CMD ["--help"]
