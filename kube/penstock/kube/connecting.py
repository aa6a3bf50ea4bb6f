"""The cluster that is meant: the one that this process runs in, else the one that kubectl would ask."""

from __future__ import annotations

import os

from kubernetes import config
from kubernetes.client import ApiClient, Configuration

from penstock.core.errors import UserError


def connect(num_connections: int) -> ApiClient:
    """Connections to the cluster, so many at once; raises `UserError` if none is meant."""
    client = Configuration()
    client.connection_pool_maxsize = num_connections
    try:
        config.load_incluster_config(client)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        _outside(client)
    return ApiClient(client)


def _outside(client: Configuration) -> None:
    try:
        named = os.environ.get("KUBECONFIG") or None  # as it is now; the client looks when it is imported
        config.load_kube_config(config_file=named, client_configuration=client)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        remedy = "run it in a pod, or name a file that kubectl can use in KUBECONFIG"
        raise UserError(what=f"no cluster is meant: {error}", where="KUBECONFIG", remedy=remedy) from None
