"""The same as `gpt2-compat pack`."""

import sys

from compat.cli import main

if __name__ == "__main__":
    main(["pack", *sys.argv[1:]])
