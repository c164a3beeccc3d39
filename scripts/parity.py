"""The same as `gpt2-compat parity`."""

import sys

from compat.cli import main

if __name__ == "__main__":
    main(["parity", *sys.argv[1:]])
