# Megatron-QeRL with its pinned dependencies in a virtual environment of its own.
#
#   docker build --tag megatron-qerl .
#   docker run --gpus all --ipc host --volume "$PWD:/workspace" megatron-qerl megatron-qerl train configs/demo.yaml
#
# The base gives what the wheels do not: the CUDA 13 compiler that Transformer Engine's torch extension is built with,
# and the libraries of the node's network. NVIDIA's 26.03 image has Python 3.12 and is built around PyTorch 2.11, the
# versions pinned here. Its own torch is a pre-release build and is not used: constraints.txt pins the released one.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.03-py3
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Build with --build-arg TRANSFORMER_ENGINE=0 where the base has no CUDA compiler.
ARG TRANSFORMER_ENGINE=1
ARG UV_VERSION=0.13.9
# The base constrains pip to the packages it was built with, which are others than ours.
ENV PIP_CONSTRAINT= \
    VIRTUAL_ENV=/opt/megatron-qerl \
    PATH=/opt/megatron-qerl/bin:${PATH}

# 1. The environment. Debian and Ubuntu mark their Python as not for pip to write into, so uv gets a place of its own.
RUN python3 -m venv /opt/uv \
    && /opt/uv/bin/python -m pip install --no-cache-dir "uv==${UV_VERSION}" \
    && /opt/uv/bin/uv venv --python 3.12 --no-python-downloads "${VIRTUAL_ENV}"

# 2. The dependencies: this layer changes only with the two files that name them.
WORKDIR /opt/src
COPY pyproject.toml constraints.txt ./
RUN /opt/uv/bin/uv pip install --no-cache --constraints constraints.txt --extra wandb --requirements pyproject.toml

# 3. Transformer Engine, whose torch extension is compiled against the torch installed above.
RUN if [ "${TRANSFORMER_ENGINE}" = 1 ]; then \
        /opt/uv/bin/uv pip install --no-cache --constraints constraints.txt setuptools ninja wheel==0.48.0 pybind11==3.1.0 \
        && NVTE_FRAMEWORK=pytorch /opt/uv/bin/uv pip install --no-cache --constraints constraints.txt \
            --no-build-isolation --extra gpu --requirements pyproject.toml; \
    fi

# 4. The package itself, without its dependencies.
COPY README.md LICENSE ./
COPY megatron_qerl megatron_qerl
COPY te_extensions te_extensions
RUN /opt/uv/bin/uv pip install --no-cache --no-deps --build-constraints constraints.txt .

# 5. An environment for SGLang, apart because it pins another torch. megatron-qerl doctor --engine-python
#    /opt/sglang/bin/python looks into it. Empty: none, as long as rollout.engine is embedded nobody needs it.
ARG SGLANG_VERSION=
RUN if [ -n "${SGLANG_VERSION}" ]; then \
        /opt/uv/bin/uv venv --python 3.12 --no-python-downloads /opt/sglang \
        && VIRTUAL_ENV=/opt/sglang /opt/uv/bin/uv pip install --no-cache "sglang==${SGLANG_VERSION}"; \
    fi

# 6. A user that owns nothing but its home and the working folder. 10001 is free in Debian and Ubuntu bases.
RUN groupadd --gid 10001 qerl \
    && useradd --uid 10001 --gid qerl --create-home --shell /bin/bash qerl \
    && install --directory --owner qerl --group qerl /workspace
COPY --chown=qerl:qerl configs /workspace/configs
COPY --chown=qerl:qerl launch/local.sh /workspace/launch/local.sh
# Nothing is fetched at run time: models and data are mounted. Kernels are compiled at first use by the NVRTC that torch
# brings, for the GPU that is there.
ENV HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1 \
    PYTHON=/opt/megatron-qerl/bin/python
# By number, so that a cluster that refuses root can see that this is another user.
USER 10001:10001
WORKDIR /workspace

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="megatron-qerl" \
      org.opencontainers.image.description="Reinforcement learning with a frozen NVFP4 base, LoRA and recorded noise" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

HEALTHCHECK --interval=5m --timeout=2m --start-period=1m --retries=1 CMD ["megatron-qerl", "doctor"]
CMD ["megatron-qerl", "--help"]

# 7. An image in which an import fails must not exist.
RUN megatron-qerl --version \
    && python -c "import megatron.core, modelopt, peft, torch, transformers; import te_extensions, megatron_qerl.controller" \
    && if [ "${TRANSFORMER_ENGINE}" = 1 ]; then python -c "import transformer_engine_torch"; fi
