"""Runs `edgemoe service`, by edgemoe/cli/systemd_units.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgemoe.cli import systemd_units as service


def run(args: argparse.Namespace) -> int:
    """Installs, uninstalls or shows the service."""
    if args.action == "status":
        root = Path(args.root)
        rows = service.status(root)
        if not service.is_installed(root):
            print("edgemoe is not installed as a service; `sudo edgemoe service install --model DIR` does that")
            return 0
        width = max(len(thing) for thing, _ in rows)
        print("\n".join(f"{thing:{width}}  {state}" for thing, state in rows))
        return 0
    if args.action == "uninstall":
        options = service.Options(root=Path(args.root), dry_run=args.dry_run)
    else:
        options = service.Options(
            root=Path(args.root),
            model=args.model,
            config=Path(args.config).absolute(),
            socket_group=args.socket_group,
            start=not args.no_start,
            dry_run=args.dry_run,
        )
    done = service.install(options) if args.action == "install" else service.uninstall(options)
    print("\n".join(f"{'would ' if options.dry_run else ''}{line}" for line in done))
    if args.action == "install":
        print(
            f"\nApps reach the model at {service.SOCKET}. Members of the group {options.socket_group} may use it:\n"
            f"  sudo usermod --append --groups {options.socket_group} USER   (who then logs in again)\n"
            f"Settings are in {options.config}; after a change: sudo systemctl restart edgemoe"
        )
    return 0
