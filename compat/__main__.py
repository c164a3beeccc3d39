"""`python -m compat`: the same as the command `gpt2-compat`."""

import sys
from pathlib import Path

import compat

if __name__ == "__main__":
    if Path(str(compat.__file__)).parent != Path(__file__).parent:
        sys.exit(
            f"error: Python imports {compat.__file__} as `compat`, because it comes first in its "
            "search path. Run the command gpt2-compat instead of python -m compat."
        )
    from compat.cli import main

    main()
