"""Static volumes behind claims: folders of this machine, which every node of a lab sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHARED, LOCAL = "lab-shared", "lab-local"
MODES = {SHARED: "ReadWriteMany", LOCAL: "ReadWriteOnce"}
VOLUMES_PER_CLASS = 32
CAPACITY = "100Gi"


def manifests(folder: Path) -> list[dict[str, Any]]:
    """Two storage classes and their volumes, the first class for what many nodes write, the second for one."""
    found = [_storage_class(name) for name in MODES]
    for name in MODES:
        found += [_volume(f"{name}-{number}", name, folder) for number in range(1, VOLUMES_PER_CLASS + 1)]
    return found


def make_folders(folder: Path) -> None:
    """The folders behind the volumes; pods of any user may write there."""
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
