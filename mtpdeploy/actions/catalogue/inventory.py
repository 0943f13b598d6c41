"""What there is to work with: profiles, hosts, a home folder to start from."""

from __future__ import annotations

from mtpdeploy.actions.verbs import INVENTORY, SET, Argument, Option, Verb

VERBS = (
    Verb(
        "init",
        "Make a home folder: an inventory to fill in, and the fabfile.",
        "mtpdeploy.actions.init:init",
        "mtpdeploy.report.init:text",
        options=(
            Option(
                "all",
                "Copy the shipped profiles, workloads and templates too, to change them.",
                type=bool,
                default=False,
            ),
        ),
        arguments=(Argument("folder", "Folder to make or to fill; default: the home.", required=False),),
        examples=("mtpdeploy init ~/gpu", "mtpdeploy init ~/gpu --all"),
        details="Files that are there already are kept. Shipped profiles and templates are found without a copy; a copy shadows ours.",
    ),
    Verb(
        "hosts",
        "List the hosts of the inventory.",
        "mtpdeploy.actions.hosts:hosts",
        "mtpdeploy.report.hosts:text",
        options=(
            Option("host", "Only these: host, group, comma list or ssh alias (user@name:port)."),
            INVENTORY,
        ),
        examples=("mtpdeploy hosts", "mtpdeploy hosts --host h200 --json"),
        details="What the files say; no connection is opened. `doctor` asks the hosts themselves.",
    ),
    Verb(
        "profiles",
        "List the profiles that can be named.",
        "mtpdeploy.actions.profiles:profiles",
        "mtpdeploy.report.profiles:profiles_text",
        examples=("mtpdeploy profiles",),
        details="The home's inventories/profiles/*.yml come first; one there shadows the shipped one of the same name.",
    ),
    Verb(
        "profiles.show",
        "Show what a profile says, or what it comes to on a host.",
        "mtpdeploy.actions.profiles:show",
        "mtpdeploy.report.profiles:show_text",
        options=(
            Option(
                "resolved",
                "Apply every layer (defaults < group < host < profile < --set) and tell where each value came from.",
                type=bool,
                default=False,
            ),
            Option("host", "Host of the inventory whose layers are applied; implies --resolved."),
            INVENTORY,
            SET,
        ),
        arguments=(Argument("name", "Profile by name, or a YAML file."),),
        examples=(
            "mtpdeploy profiles show mtp",
            "mtpdeploy profiles show mtp --resolved --host gpu1",
            "mtpdeploy profiles show mtp --resolved --set args.mem_fraction_static=0.9 --json",
        ),
    ),
)
