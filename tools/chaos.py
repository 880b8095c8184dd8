"""`megastable chaos`. drills/ is no part of the installed package: it lies beside this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megastable.cli import main

if __name__ == "__main__":
    main("chaos")
