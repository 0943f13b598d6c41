"""The Fabric door: `fab --list`, `fab deploy --host gpu1 --profile mtp`. The tasks are made from mtpdeploy's table of verbs."""

from mtpdeploy.fabric_door import collection

namespace = collection()
