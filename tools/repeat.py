"""`megastable repeat`."""

from megastable.cli import main

if __name__ == "__main__":
    main("repeat")
