"""Print what the search finds: `python -m tests.faults [WORDS of an operation or a fault ...]`."""

import argparse
import faulthandler
import gc
import logging
import sys
import time

from .faults import FAULTS, is_possible
from .operations import OPERATIONS
from .search import Search


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--operation", nargs="*", default=[])
    parser.add_argument("-f", "--fault", nargs="*", default=[])
    parser.add_argument("--sample", type=int)
    args = parser.parse_args()
    operations = [each for each in OPERATIONS if each.name in args.operation] or OPERATIONS
    faults = [each for each in FAULTS if each.name in args.fault] or FAULTS
    failed = 0
    gc.freeze()
    logging.disable()
    for operation in operations:
        where = operation.around, operation.way
        for fault in [each for each in faults if is_possible(each, *where)]:
            faulthandler.dump_traceback_later(120, exit=True)
            begin = time.process_time()
            report = Search(operation, fault).run(args.sample)
            seconds = time.process_time() - begin
            failed += bool(report.findings)
            found = len(report.findings)
            name = f"{operation.name} × {fault.name}"
            print(f"{name}: {report.steps} steps, {found} findings, {seconds:.2f} s", flush=True)
            if report.findings:
                print(report.text(), flush=True)
    return failed > 0


sys.exit(main())
