"""The same as `gpt2-compat explain`."""

import sys

from compat.cli import main

if __name__ == "__main__":
    main(["explain", *sys.argv[1:]])
