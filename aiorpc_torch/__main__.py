"""The command line: `doctor` checks this machine, `top` shows the workers that run on it."""

import argparse

from ._doctor import run_checks
from ._top.terminal import run_top


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m aiorpc_torch")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check this machine, and say what to do")
    doctor.add_argument("--master", metavar="HOST:PORT", help="address of rank 0")
    doctor.add_argument("--interface", metavar="NAME", help="network interface, as for worker()")
    top = commands.add_parser("top", help="show the workers of this user on this machine, live")
    once = top.add_mutually_exclusive_group()
    once.add_argument("--json", action="store_true", help="print them once, as JSON")
    once.add_argument("--svg", metavar="FILE", help="draw them once, as a picture")
    top.add_argument("--pid", type=int, help="show the worlds of this process only")
    options = parser.parse_args(arguments)
    if options.command == "top":
        return run_top(as_json=options.json, svg=options.svg, pid=options.pid)
    return 1 if run_checks(options.master, options.interface) else 0


if __name__ == "__main__":
    raise SystemExit(main())
