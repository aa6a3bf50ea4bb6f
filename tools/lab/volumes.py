"""Static persistent volumes: folders of the host, which every node of a lab can mount."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHARED, LOCAL = "lab-shared", "lab-local"
MODES = {SHARED: "ReadWriteMany", LOCAL: "ReadWriteOnce"}
VOLUMES_PER_CLASS = 32
CAPACITY = "100Gi"


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests of two storage classes and their volumes: one for many writing nodes, one for one node."""
    objects = [_storage_class(name) for name in MODES]
    for name in MODES:
        objects += [_volume(f"{name}-{number}", name, folder) for number in range(1, VOLUMES_PER_CLASS + 1)]
    return objects


def make_folders(folder: Path) -> None:
    """Create the folders of the volumes, writable by pods of any user."""
    for name in MODES:
        for number in range(1, VOLUMES_PER_CLASS + 1):
            path = folder / f"{name}-{number}"
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o777)


def _storage_class(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }


def _volume(name: str, storage_class: str, folder: Path) -> dict[str, Any]:
    spec = {
        "accessModes": [MODES[storage_class]],
        "capacity": {"storage": CAPACITY},
        "hostPath": {"path": str(folder / name), "type": "Directory"},
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": storage_class,
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
