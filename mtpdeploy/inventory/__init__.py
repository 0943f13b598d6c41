"""What should run where: inventories, profiles and workloads as validated, frozen values.

Loaded when first asked for: the values alone (inventory.values) are plain dataclasses, reading files brings Pydantic and YAML.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpdeploy.inventory.hosts import Inventory, inventory_files, load
    from mtpdeploy.inventory.layers import NO_HOST, env_for, resolve
    from mtpdeploy.inventory.profiles import Profile, load_profile, profile_names, workload, workload_names

__all__ = [
    "NO_HOST",
    "Inventory",
    "Profile",
    "env_for",
    "inventory_files",
    "load",
    "load_profile",
    "profile_names",
    "resolve",
    "workload",
    "workload_names",
]

_IN = {
    "hosts": ("Inventory", "inventory_files", "load"),
    "layers": ("NO_HOST", "env_for", "resolve"),
    "profiles": ("Profile", "load_profile", "profile_names", "workload", "workload_names"),
}


def __getattr__(name: str) -> Any:
    for module, names in _IN.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
