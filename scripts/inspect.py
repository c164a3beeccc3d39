"""The same as `gpt2-compat inspect`."""

import os
import sys

if __name__ == "inspect":  # imported by another script here, which needs Python's own module
    kept, here = sys.path, os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in kept if os.path.abspath(path) != here]
    del sys.modules["inspect"]
    __import__("inspect")
    sys.path = kept
elif __name__ == "__main__":
    from compat.cli import main

    main(["inspect", *sys.argv[1:]])
