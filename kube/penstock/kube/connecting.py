"""Choice of the cluster: the one that this process runs in, else kubectl's current context."""

from __future__ import annotations

import os

from kubernetes import config
from kubernetes.client import ApiClient, Configuration

from penstock.core.errors import UserError


def connect(num_connections: int) -> ApiClient:
    """Return a client with at most ``num_connections`` connections; raises `UserError` without a Kubernetes
    configuration.
    """
    client = Configuration()
    client.connection_pool_maxsize = num_connections
    try:
        config.load_incluster_config(client)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        _outside(client)
    return ApiClient(client)


def _outside(client: Configuration) -> None:
    try:
        named = os.environ.get("KUBECONFIG") or None  # the client library would use its value at import
        config.load_kube_config(config_file=named, client_configuration=client)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        what = f"no Kubernetes configuration found: {' '.join(str(error).split())}"
        remedy = "run inside a pod, or set KUBECONFIG to a file with which `kubectl version` reaches the cluster"
        raise UserError(what=what, where="KUBECONFIG", remedy=remedy) from None
