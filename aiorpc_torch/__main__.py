"""The command line: `python -m aiorpc_torch doctor` checks this machine."""

import argparse

from ._world.doctor import run_checks


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m aiorpc_torch")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check this machine, and say what to do")
    doctor.add_argument("--master", metavar="HOST:PORT", help="address of rank 0")
    doctor.add_argument("--interface", metavar="NAME", help="network interface, as for worker()")
    options = parser.parse_args(arguments)
    return 1 if run_checks(options.master, options.interface) else 0


if __name__ == "__main__":
    raise SystemExit(main())
