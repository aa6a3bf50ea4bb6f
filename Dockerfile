# Images of penstock: `docker build --target operator|api|trainer .`
#
# BASE needs Python 3.11 or newer and venv; both stages use the same one. TRAINER_BASE may be another, such as one with
# CUDA's tools, if its Python is of the same minor version. torch brings CUDA's libraries itself from PyPI; TORCH_INDEX
# https://download.pytorch.org/whl/cpu gives the smaller one without.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
ARG TRAINER_BASE=${BASE}

FROM ${BASE} AS build
# pip compiles what it installs, as the images' file systems are read-only and every process would compile torch anew.
# Given this date, compiled files hold hashes of their sources (PEP 552), where times would differ from build to build.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SOURCE_DATE_EPOCH=315532800
RUN python3 -m venv /opt/penstock
COPY constraints.txt /src/
# The tools that build the package are pinned like all else.
RUN /opt/penstock/bin/pip install --constraint /src/constraints.txt hatchling
COPY LICENSE /src/
COPY core /src/core
COPY planner /src/planner
COPY view /src/view
COPY trainer /src/trainer
COPY agent /src/agent
COPY kube /src/kube
COPY operator /src/operator
COPY client /src/client
COPY api /src/api
COPY cli /src/cli
# All members, and a constraint with the place of each: whatever needs one takes this wheel, and asks no index for it.
RUN for project in /src/*/pyproject.toml; do \
      cd "${project%/*}" && /opt/penstock/bin/python -m hatchling build -t wheel -d /wheels || exit 1; \
    done \
 && for wheel in /wheels/*.whl; do \
      name="$(basename "${wheel%%-*}" | tr _ -)" && echo "$name @ file://$wheel" >> /wheels/penstock.txt; \
    done

# Each image installs the member that it starts, with what that one needs.
FROM build AS build-operator
RUN /opt/penstock/bin/pip install --constraint /src/constraints.txt --constraint /wheels/penstock.txt \
      penstock-operator \
 && /opt/penstock/bin/pip uninstall --yes hatchling pathspec pluggy trove-classifiers pip

FROM build AS build-api
RUN /opt/penstock/bin/pip install --constraint /src/constraints.txt --constraint /wheels/penstock.txt \
      penstock-cli penstock-api \
 && /opt/penstock/bin/pip uninstall --yes hatchling pathspec pluggy trove-classifiers pip

FROM build AS build-trainer
ARG TORCH_INDEX=https://pypi.org/simple
RUN grep '^torch==' /src/constraints.txt | xargs /opt/penstock/bin/pip install --index-url ${TORCH_INDEX} --no-deps \
 && /opt/penstock/bin/pip install --constraint /src/constraints.txt --constraint /wheels/penstock.txt \
      penstock-agent penstock-trainer \
 && /opt/penstock/bin/pip uninstall --yes hatchling pathspec pluggy trove-classifiers pip
# Operators start pods by the name that images of 0.1.0 have (ADR 0034).
RUN ln -s penstock-agent /opt/penstock/bin/penstock

# A user without an entry anywhere (USER is asked for instead), and nothing to write but what is mounted. Compiled
# functions are kept below /tmp.
FROM ${BASE} AS base
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/tmp/numba HOME=/tmp USER=penstock
WORKDIR /
USER 65532:65532

FROM base AS operator
COPY --from=build-operator /opt/penstock /opt/penstock
ENTRYPOINT ["penstock-operator"]

FROM base AS api
COPY --from=build-api /opt/penstock /opt/penstock
ENTRYPOINT ["penstock"]
CMD ["serve", "--cluster"]

FROM ${TRAINER_BASE} AS trainer
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/tmp/numba HOME=/tmp USER=penstock
WORKDIR /
USER 65532:65532
COPY --from=build-trainer /opt/penstock /opt/penstock
ENTRYPOINT ["penstock-agent"]
