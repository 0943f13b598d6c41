"""What should run where: inventories, profiles and workloads as validated, frozen values."""

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
