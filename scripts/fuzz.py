"""Load many mutated checkpoints: each is loaded as its files state, or refused with an error."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fuzz.harness import run
from tests.fuzz.mutations import KINDS, mutation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=2000, help="number of mutations (2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (0)")
    parser.add_argument("--start", type=int, default=0, help="index of the first mutation (0)")
    parser.add_argument("--kind", choices=KINDS, help="mutate only this kind of file")
    parser.add_argument("--keep", type=Path, help="folder to which failing checkpoints are written")
    asked = parser.parse_args()
    began = time.monotonic()
    report = run(asked.n, asked.seed, asked.start, asked.kind)
    print(*report.lines(), sep="\n")
    seconds = time.monotonic() - began
    print(f"{asked.n:,} mutations in {seconds:.0f} s, {len(report.failures)} failures")
    for failure in report.failures if asked.keep else []:
        folder = asked.keep / f"{asked.seed}-{failure['index']}-{failure['kind']}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in mutation(asked.seed, failure["index"], [failure["kind"]])[1].items():
            (folder / name).write_bytes(data)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
