"""Runs `edgemoe cluster`: lists and changes the boxes that belong to this box's cluster."""

from __future__ import annotations

import argparse
import json
import os
import time
from urllib.parse import urlencode

from rich.console import Group
from rich.table import Table
from rich.text import Text

from edgemoe.cli.client import Client, socket_of
from edgemoe.cli.command_settings import read_settings
from edgemoe.cli.output import console
from edgemoe.errors import ConfigError, ServiceError
from edgemoe.types.json_object import Json

COLOURS = {"this box": "green", "here": "green", "leaving": "yellow", "gone": "red", "refused": "red"}
COST = (
    "this box would go on as the only voter of a new cluster, with the boxes that it sees now. Changes of members and "
    "plans that it has not heard of are lost. Boxes that it does not see are let in by a new invitation only. If they "
    "still run behind a broken link, two clusters serve from then on. Requests and delivered tokens are not affected. "
    "Say --yes to do so"
)
VOTE_S, LOOK_S = 120.0, 0.5  # that a box has to catch up; between looks


def run(args: argparse.Namespace) -> int:
    """Runs one action, and prints a message about it."""
    if args.action == "init" and not read_settings(args).settings.cluster.node:
        return _begin(args)
    if args.action == "recover" and not args.yes:
        raise ConfigError(COST)
    with Client(socket_of(args)) as client:
        if args.action == "list":
            found = client.get("/cluster")
            print(json.dumps(found, indent=2)) if args.json else console().print(picture(found))
            return int(not found["has_majority"])
        verb = {"init": "begin"}.get(args.action, args.action)
        asked = {"verb": verb, "node": getattr(args, "node", ""), "dead": int(getattr(args, "dead", False))}
        asked |= {"hours": getattr(args, "hours", 24.0)}
        print(client.post(f"/cluster?{urlencode(asked)}")["message"], flush=True)
        if args.action == "vote":
            _wait_for_vote(client, args.node)
    return 0


def _begin(args: argparse.Namespace) -> int:
    """Makes this box the first one of a cluster, before its daemon starts again."""
    from edgemoe.cli.joining import begin_cluster

    settings = read_settings(args).settings
    box, roster = begin_cluster(settings, args.node or "", args.address or "", os.environ)
    print(
        f"{box.node} at {box.address} is the first box of cluster {roster.cluster}. Start its daemon again, then "
        "invite others: edgemoe cluster invite NODE"
    )
    return 0


def picture(found: Json) -> Group:
    """Returns the state of the cluster, and a line for each box."""
    title = f"cluster {found['cluster']}, change {found['version']}" if found["cluster"] else "a list of peers"
    voters = "" if found["has_majority"] else "; no majority of the voters answers"
    leader = f"; {found['leader']} leads" if found["leader"] else "; nobody leads"
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("Box", "State", "Vote", "Address", "Key"):
        table.add_column(head)
    for box in found["boxes"]:
        colour = COLOURS.get(box["state"], "")
        state = Text(box["state"], colour)
        table.add_row(box["node"], state, box["vote"], box["address"], " or ".join(key[:8] for key in box["keys"]))
    for each in found["invited"]:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(each["until_s"]))
        table.add_row(each["node"], "invited", "no", f"until {until}", "")
    return Group(Text(f"{title}{leader}{voters}"), table, Text(found["trouble"], "yellow"))


def _wait_for_vote(client: Client, node: str) -> None:
    """Waits until the box votes. Raises ServiceError if it does not."""
    ends_s = time.monotonic() + VOTE_S
    while time.monotonic() < ends_s:
        boxes = {box["node"]: box for box in client.get("/cluster")["boxes"]}
        if boxes.get(node, {}).get("vote") == "yes":
            print(f"{node} votes")
            return
        time.sleep(LOOK_S)
    raise ServiceError(
        f"{node} has not caught up within {VOTE_S:.0f} s and gets its vote later; `edgemoe doctor` there names the "
        "fault, and `edgemoe cluster unvote` takes the vote back"
    )
